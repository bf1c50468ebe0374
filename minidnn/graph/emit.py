"""How a layer writes itself into a graph: `Writer` collects ops and tensors, a `Scope` is one layer's pen.

A layer never sees another layer: its scope says what its input is, whether a ReLU is fused behind it, and whether
the gradient that it makes must be masked for the ReLU in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minidnn.graph.graph import Target
from minidnn.graph.op import Op
from minidnn.graph.tensor import Role, Tensor


@dataclass(slots=True)
class Writer:
    """Collects the ops and tensors of one iteration. `accumulate`: gradients are added to those of earlier
    micro-batches instead of replacing them. `in_place`: the loss may overwrite the logits."""

    target: Target
    training: bool = True
    accumulate: bool = False
    in_place: bool = True
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    backward: bool = False

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str, role: Role, layout: str = "NCHW") -> Tensor:
        """The tensor of that name, made at first mention."""
        if name not in self.tensors:
            self.tensors[name] = Tensor(name, shape, dtype, role, layout)
        return self.tensors[name]

    def op(
        self, name: str, kind: str, function: str, layer: int,
        reads: list[tuple[str, Tensor | None]], writes: list[tuple[str, Tensor | None]],
        flops: int = 0, /, **attributes: Any,
    ) -> None:  # fmt: skip
        """Append an op; operands that are None are left out."""
        self.ops.append(
            Op(
                name, kind, function,
                tuple((arg, t.name) for arg, t in reads if t is not None),
                tuple((arg, t.name) for arg, t in writes if t is not None),
                tuple(attributes.items()), layer, flops, not self.backward,
            )
        )  # fmt: skip


@dataclass(slots=True)
class Scope:
    """One layer's view while it writes its ops.

    `index` counts layers that own ops, `leaf` all of the network's, whatever the target makes of them. `shape` is the
    logical shape of the input (a flattened view keeps its tensor), `x` the input tensor, `y` the
    output once the forward op is written. `relu`: a ReLU is fused behind the layer. `dy_masked`: the gradient
    that arrives is already zero where y <= 0. `mask_dx`: the gradient that the layer makes must be zero where x <= 0.
    """

    writer: Writer
    path: str
    index: int
    leaf: int
    shape: tuple[int, ...]
    x: Tensor
    y: Tensor
    relu: bool = False
    dy_masked: bool = False
    mask_dx: bool = False
    needs_dx: bool = True

    @property
    def target(self) -> Target:
        """The target that the graph is built for."""
        return self.writer.target

    @property
    def training(self) -> bool:
        """Whether backward and update follow."""
        return self.writer.training

    def activation(self, shape: tuple[int, ...], layout: str | None = None) -> Tensor:
        """The layer's output tensor."""
        dtype = self.target.activation_dtype
        return self.writer.tensor(f"{self.path}.y", shape, dtype, Role.ACTIVATION, layout or self.target.layout)

    def saved(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Something forward leaves for backward: an index, batch statistics, a scale."""
        return self.writer.tensor(f"{self.path}.{name}", shape, dtype, Role.MASK, self.target.layout)

    def parameter(self, name: str, shape: tuple[int, ...], role: Role = Role.WEIGHT) -> Tensor:
        """A weight or running statistic as it is stored: full precision."""
        return self.writer.tensor(f"{self.path}.{name}", shape, self.target.weight_dtype, role, self.target.layout)

    def compute_weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight as matrix units read it: a bf16 copy, refreshed by the update, where activations are bf16."""
        stored = self.parameter(name, shape)
        if self.target.activation_dtype != "bfloat16":
            return stored
        return self.writer.tensor(f"{stored.name}@bf16", shape, "bfloat16", Role.WEIGHT, self.target.layout)

    def weight_gradient(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Where the layer writes the gradient of its weight `name`."""
        dtype = self.target.weight_dtype
        total = self.writer.tensor(f"{self.path}.d{name}", shape, dtype, Role.WEIGHT_GRADIENT, self.target.layout)
        if not self.writer.accumulate:
            return total
        return self.writer.tensor(f"{self.path}.d{name}@micro", shape, dtype, Role.GRADIENT, self.target.layout)

    def dx(self) -> Tensor:
        """The gradient of the input: d of the tensor that came in."""
        x = self.x
        return self.writer.tensor(gradient_name(x.name), x.shape, self.target.activation_dtype, Role.GRADIENT, x.layout)

    def scalars(self) -> Tensor:
        """The step scalars."""
        return scalars_tensor(self.writer)

    def emit(
        self, kind: str, function: str, reads: list[tuple[str, Tensor | None]],
        writes: list[tuple[str, Tensor | None]], flops: int = 0, /, **attributes: Any,
    ) -> None:  # fmt: skip
        """Append one op of this layer."""
        self.writer.op(f"{self.path}:{kind}", kind, function, self.index, reads, writes, flops, **attributes)


def gradient_name(name: str) -> str:
    """Name of the gradient of an activation: `features.0.y` -> `features.0.dy`."""
    head, _, tail = name.rpartition(".")
    return f"{head}.d{tail}" if head else f"d{tail}"


def scalars_tensor(writer: Writer) -> Tensor:
    """The one buffer of step scalars (learning rate, step number, seed, ...)."""
    from minidnn.graph.op import SCALARS_LENGTH

    return writer.tensor("scalars", (SCALARS_LENGTH,), "float64", Role.SCALARS)
