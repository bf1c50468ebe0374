"""Sequential: layers one after another, nested and named as in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from numbers import Integral
from typing import Any, overload

import numpy as np

from minidnn.arguments import count, failure, flag, sample_shape, seed_of, shown
from minidnn.errors import ArgumentError, CheckpointError, ShapeError
from minidnn.graph.tensor import Role
from minidnn.nn.layer import Layer, Parameter, WeightOwner, calling


class Sequential(Layer):
    """A chain of layers, positional (`Sequential(a, b)`, names "0", "1") or named (`Sequential({"features": a})`).

    `input_shape` is the (C,H,W) that the network is made for, where that is known. The network owns its weights in
    host memory; they are drawn from `initialize(seed)` or at first use with seed 0. A layer with weights has one place.
    """

    kind = "sequential"

    def __init__(
        self, *layers: Layer | Mapping[str, Layer], input_shape: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.input_shape = input_shape
        self._children: dict[str, Layer] = {}
        named = layers[0] if len(layers) == 1 and isinstance(layers[0], Mapping) else None
        pairs = named.items() if named is not None else ((str(i), layer) for i, layer in enumerate(layers))
        for name, layer in pairs:
            if not isinstance(layer, Layer):
                raise ArgumentError(
                    f"child {shown(name)} is {shown(layer)}; Sequential takes layers or one dict of named layers"
                )
            if not hasattr(layer, "parameters"):
                kind = type(layer).__name__
                raise ArgumentError(f"child {shown(name)} has no parameters; {kind} must call super().__init__()")
            if not isinstance(name, str) or not name or any(mark in name for mark in ".@+"):
                raise ArgumentError(
                    f"child name is {shown(name)}; it must be a non-empty string without '.', '@' and '+'"
                )
            self._children[name] = layer
        self._refuse_shared_weights()

    # -- structure -------------------------------------------------------------------------------------------------

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """(C, H, W) of one sample, or (features,), where it is known."""
        return self._input_shape

    @input_shape.setter
    def input_shape(self, shape: tuple[int, ...] | None) -> None:
        self._input_shape = None if shape is None else sample_shape(shape)

    def children(self) -> tuple[Layer, ...]:
        """The direct children, in order."""
        return tuple(self._children.values())

    def append(self, layer: Layer) -> Sequential:
        """Add a layer at the end, named by its position."""
        if not isinstance(layer, Layer):
            raise ArgumentError(f"layer is {shown(layer)}; append takes a layer")
        if self.owners:
            raise ArgumentError(f"layer is {shown(layer)}, but a trainer has the network; close that before you append")
        name = str(len(self._children))
        if name in self._children:
            raise ArgumentError(f"child {shown(name)} exists already; append to a Sequential with positional names")
        if layer is self or (isinstance(layer, Sequential) and any(inner is self for inner in layer.nested())):
            raise ArgumentError("layer is this Sequential, or has it inside; append another one")
        self._children[name] = layer
        try:
            self._refuse_shared_weights()
        except ArgumentError:
            del self._children[name]
            raise
        return self

    def nested(self) -> Iterator[Sequential]:
        """All Sequentials inside this one."""
        for child in self._children.values():
            if isinstance(child, Sequential):
                yield child
                yield from child.nested()

    def _refuse_shared_weights(self) -> None:
        """A layer that is here twice would get two gradients and two updates, one of which would be lost."""
        seen: dict[int, str] = {}
        for path, layer in self.leaves():
            if layer.parameters and id(layer) in seen:
                first = seen[id(layer)]
                raise ArgumentError(
                    f"child {shown(path)} is layer {shown(first)} again; weights cannot be shared: "
                    "make another"
                )
            seen[id(layer)] = path

    @overload
    def __getitem__(self, key: int | str) -> Layer: ...
    @overload
    def __getitem__(self, key: slice) -> Sequential: ...
    def __getitem__(self, key: int | str | slice) -> Layer:
        """A child by position or name; a slice is a Sequential that shares the layers."""
        if isinstance(key, slice):
            return Sequential(dict(list(self._children.items())[key]), input_shape=self.input_shape)
        try:
            return self._children[key] if isinstance(key, str) else self.children()[key]
        except (KeyError, IndexError, TypeError):
            raise ArgumentError(f"child is {shown(key)}; it must be one of {', '.join(self._children)}") from None

    def __getattr__(self, name: str) -> Layer:
        children = self.__dict__.get("_children", {})
        if name in children:
            layer: Layer = children[name]
            return layer
        raise AttributeError(f"{type(self).__name__} has no attribute or child {shown(name)}")

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.children())

    @property
    def owners(self) -> list[WeightOwner]:
        """The open trainers of its layers: none or one, or several where parts of it are trained apart."""
        owners = (layer.owner for layer in self.weighted())
        return list(dict.fromkeys(owner for owner in owners if owner is not None))

    def weighted(self) -> Iterator[Layer]:
        """All layers with weights, in execution order."""
        return (layer for _, layer in self.leaves() if layer.parameters)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """(path, layer) of all layers that are not Sequential, in execution order."""
        for name, child in self._children.items():
            if isinstance(child, Sequential):
                yield from child.leaves(f"{prefix}{name}.")
            else:
                _check_parameters(prefix + name, child)  # here, because a layer may get more of them at any time
                yield prefix + name, child

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Output shape; a layer that cannot take its input is named in the error."""
        for path, layer in self.leaves():
            shape = infer_at(path, layer, shape)
        return shape

    # -- parameters ------------------------------------------------------------------------------------------------

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for path, layer in self.leaves(prefix):
            yield from layer.named_parameters(path + ".")

    def initialize(self, seed: int = 0) -> Sequential:
        """Draw every weight that has no value yet from (seed, its name)."""
        seed_of(seed)
        self._refuse_shared_weights()
        for name, parameter in self.named_parameters():
            parameter.materialize(name, seed)
        return self

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights and running statistics by name, PyTorch's layout; of an open trainer the newest."""
        for owner in self.owners:
            owner.pull()
        return {name: parameter.materialize(name, 0).copy() for name, parameter in self.named_parameters()}

    def matching(self, state: Mapping[str, Any], strict: bool = True) -> dict[str, np.ndarray]:
        """What of `state` are this network's weights, by name. Raises CheckpointError for what does not fit; with
        `strict` also where a weight is missing (without, the network keeps its own), or is of no layer here."""
        strict = flag(strict, "strict")
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state is {shown(state)}; it must be a dict of arrays by name")
        own = dict(self.named_parameters())
        for name in state:
            if not isinstance(name, str):
                raise ArgumentError(f"state has the name {shown(name)}; it must be a dict of arrays by name")
        given = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        if strict and (missing or unknown):
            raise CheckpointError(
                f"weights do not fit the network: missing {missing[:4] or 'none'}, unknown {unknown[:4] or 'none'}; "
                "give those of the same network"
            )
        arrays = {name: finite_array("weight", name, given[name]) for name in own if name in given}
        for name, array in arrays.items():
            if array.shape != own[name].shape:
                raise CheckpointError(
                    f"weight {name} has shape {list(array.shape)}; expected {list(own[name].shape)}: leave it out of "
                    "the state, and with strict=False the network keeps its own"
                )
        return arrays

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take weights by name (arrays or anything np.asarray accepts). All names and shapes are checked first."""
        own, arrays = dict(self.named_parameters()), self.matching(state, strict)
        for owner in self.owners:
            if owner.net is not self or arrays.keys() != own.keys():
                owner.pull()  # it takes all of its network's weights over, also those that are not given
        for name, array in arrays.items():
            own[name].assign(array)
        for owner in self.owners:
            owner.push()

    def summary(self, batch: int = 1, input_shape: tuple[int, ...] | None = None) -> Summary:
        """Table of layers: output shape, parameters, MACs, activation bytes (fp32). Print it."""
        shape = self.input_shape if input_shape is None else input_shape
        if shape is None:
            raise ArgumentError("input_shape is None; give the (C, H, W) of one image")
        return Summary.of(self, (count(batch, "batch"), *sample_shape(shape)))

    def __repr__(self) -> str:
        lines = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self._children.items()]
        return "Sequential(\n" + "\n".join(lines) + "\n)" if lines else "Sequential()"


def infer_at(path: str, layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`layer.infer`, with the layer's path in front of what it says."""
    with calling(layer, path, "infer") as name:
        found = layer.infer(shape)
    if not isinstance(found, tuple) or not all(isinstance(n, Integral) for n in found):
        raise ShapeError(f"{name}: infer returned {shown(found)}; it must be a tuple of ints")
    return found


def _check_parameters(path: str, layer: Layer) -> None:
    """Refuse what a user's own layer has put among its parameters that is none."""
    given: object = layer.parameters
    name = f"layer {path} ({type(layer).__name__})"
    if not isinstance(given, dict):
        raise ArgumentError(f"{name}: parameters is {shown(given)}; it must be a dict of Parameter by name")
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, Parameter):
            raise ArgumentError(
                f"{name}: parameters has {shown(value)} for {shown(key)}; it must be a Parameter(shape, init) by name"
            )


def finite_array(what: str, name: str, value: object, dtype: str = "float32") -> np.ndarray:
    """A weight, or `what` else was saved, as the array that it is, or can be made: of numbers that `dtype` holds."""
    try:
        array = np.asarray(value)
        array = array if array.dtype.kind in "biuf" else array.astype(np.float32, casting="same_kind")
    except Exception as error:  # what arrays of other libraries raise is theirs to choose
        raise CheckpointError(f"{what} {name} must be an array of real numbers ({failure(error)})") from None
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(dtype, copy=False)).all()
    if not finite:
        raise CheckpointError(f"{what} {name} has values that are no finite {dtype}; use {what}s from before")
    return array


class Summary:
    """Rows of a network's table; `str()` prints it, `rows` and `total` are data."""

    def __init__(self, rows: list[dict[str, Any]], total: dict[str, int]) -> None:
        self.rows, self.total = rows, total

    @classmethod
    def of(cls, net: Sequential, shape: tuple[int, ...]) -> Summary:
        """Walk shapes through `net` from the input shape [N,C,H,W]."""
        rows: list[dict[str, Any]] = []
        for path, layer in net.leaves():
            macs_at = shape
            shape = infer_at(path, layer, shape)
            rows.append(
                {
                    "layer": path,
                    "type": type(layer).__name__,
                    "output_shape": list(shape),
                    "parameters": sum(p.size for p in layer.parameters.values() if p.role is Role.WEIGHT),
                    "macs": layer.macs(macs_at),
                    "activation_bytes": 4 * prod(shape),
                }
            )
        keys = ("parameters", "macs", "activation_bytes")
        return cls(rows, {key: sum(row[key] for row in rows) for key in keys})

    def __str__(self) -> str:
        head = ("layer", "type", "output", "parameters", "MACs", "activation MiB")
        body = [
            (r["layer"], r["type"], "x".join(map(str, r["output_shape"])), f"{r['parameters']:,}", f"{r['macs']:,}",
             f"{r['activation_bytes'] / 2**20:.1f}")
            for r in self.rows
        ]  # fmt: skip
        t = self.total
        foot = ("total", "", "", f"{t['parameters']:,}", f"{t['macs']:,}", f"{t['activation_bytes'] / 2**20:.1f}")
        lines = [head, *body, foot]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        )
