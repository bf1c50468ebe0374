"""What a layer is: a shape rule, parameters, and the ops that it writes into a graph. Layers own no device memory."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from minidnn.arguments import failure, is_count, shown
from minidnn.errors import ArgumentError, MiniDnnError, ShapeError
from minidnn.graph.tensor import Role

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""(random generator, shape) -> the values with which a weight starts."""


class Parameter:
    """A weight or running statistic of a layer: its shape, how it starts, and, once asked for, its float32 value.

    The value is made at first use, so that planning for a large network costs no memory.
    """

    def __init__(self, shape: tuple[int, ...], init: Initializer, role: Role = Role.WEIGHT) -> None:
        if not isinstance(shape, (tuple, list)) or not all(is_count(n) for n in shape):
            raise ArgumentError(f"shape is {shown(shape)}; it must be a tuple of ints, each 1 or more")
        if not callable(init):
            raise ArgumentError(f"init is {shown(init)}; it must be a function of a generator and a shape")
        if role is not Role.WEIGHT and role is not Role.STATISTIC:
            raise ArgumentError(f"role is {shown(role)}; it must be Role.WEIGHT or Role.STATISTIC")
        self.shape = tuple(int(n) for n in shape)
        self.init = init
        self.role = role
        self._value: np.ndarray | None = None

    @property
    def materialized(self) -> bool:
        """Whether the value exists."""
        return self._value is not None

    def materialize(self, name: str, seed: int) -> np.ndarray:
        """The value, drawn from (seed, name) when it does not exist yet."""
        if self._value is None:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
            self._value = self._drawn(name, self.init(rng, self.shape))
        return self._value

    def _drawn(self, name: str, value: object) -> np.ndarray:
        """What an initializer returned; a user's own may return anything."""
        try:
            array = np.ascontiguousarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"the initializer of {name} returned {shown(value)}; "
                "it must be an array of numbers"
            ) from None
        if array.shape != self.shape:
            raise ShapeError(
                f"the initializer of {name} returned shape {list(array.shape)}; "
                f"it must be {list(self.shape)}"
            )
        return array

    def assign(self, value: np.ndarray) -> None:
        """Take a new value of the same shape (kept as float32, or float64 when given as such)."""
        value = np.asarray(value)
        if value.shape != self.shape:
            raise ShapeError(f"parameter has shape {list(value.shape)}; expected {list(self.shape)}")
        keep = value.dtype if value.dtype == np.float64 else np.dtype(np.float32)
        self._value = np.array(value, dtype=keep, order="C", copy=True)

    def reset(self) -> None:
        """Forget the value; the next use draws it anew."""
        self._value = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class WeightOwner(Protocol):
    """Who has newer weights than the layers' own: a trainer, while it is open."""

    net: Any
    """The network that it trains."""

    def pull(self) -> None:
        """Bring the network's weights up to date."""

    def push(self) -> None:
        """Take the network's weights over."""


class Layer:
    """Base of all layers. A new layer is one subclass: `infer`, `forward`, and, if it has a gradient, `backward`."""

    kind: ClassVar[str] = ""
    """The word of the layer-wise policies: conv, pool, fc, batch_norm, ... ; shown in tables."""
    fuses_relu: ClassVar[bool] = False
    """Whether a ReLU that follows is computed in place by this layer's forward op."""
    masks: bool = False
    """Whether `backward` can zero dX where X <= 0, so that the ReLU in front needs no op of its own (native)."""

    _owner: weakref.ref[WeightOwner] | None = None

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}

    @property
    def owner(self) -> WeightOwner | None:
        """The open trainer that has this layer's weights."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, owner: WeightOwner | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the newest weights, and no trainer."""
        if self.owner is not None:
            self.owner.pull()
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Output shape for an input shape, batch included. Raises ShapeError with what came and what was expected."""
        raise NotImplementedError

    def forward(self, scope: Scope) -> Tensor:
        """Write the forward ops; return the output tensor (the input tensor itself if there is nothing to do)."""
        raise NotImplementedError

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        """Write the backward ops for the gradient `dy` of the output; return dX if `scope.needs_dx`."""
        raise NotImplementedError

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(name, parameter) pairs; names are torchvision's."""
        for name, parameter in self.parameters.items():
            yield prefix + name, parameter

    def macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulate operations of one forward pass over an input of this shape."""
        return 0

    def extra(self) -> str:
        """Arguments to show in `repr`."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra()})"


def pair(value: int | tuple[int, int], argument: str, least: int) -> tuple[int, int]:
    """An int or a pair of ints as (height, width), each at least `least`."""
    both = value if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or not all(is_count(v, least) for v in both):
        raise ArgumentError(f"{argument} is {shown(value)}; it must be an int or a pair of ints, each {least} or more")
    return int(both[0]), int(both[1])


def expect_rank(shape: tuple[int, ...], rank: int, meaning: str) -> None:
    """Refuse a shape of another rank."""
    if len(shape) != rank:
        raise ShapeError(f"input has shape {list(shape)}; expected {rank} dimensions ({meaning})")


@contextmanager
def calling(layer: Layer, path: str, method: str, who: str = "a layer") -> Iterator[str]:
    """While `method` of the layer at `path` runs, which a user may have written: what goes wrong names the layer. `who`
    must have that method. Gives the layer's name for sentences."""
    name = f"layer {path} ({type(layer).__name__})"
    try:
        yield name
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
    except NotImplementedError:
        raise ArgumentError(f"{name} does not define {method}; {who} must") from None
    except MiniDnnError:
        raise
    except Exception as error:
        raise ArgumentError(f"{name}: {method} failed with {failure(error)}; mend the layer") from error
