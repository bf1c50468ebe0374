"""Linear and Flatten."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from minidnn.arguments import count, flag, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.nn.init import default_bias, default_weight
from minidnn.nn.layer import Layer, Parameter

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor


class Linear(Layer):
    """Fully connected layer, X [N,F] -> Y [N,O], weight [O,F], bias [O]."""

    kind = "fc"
    fuses_relu = True
    masks = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = count(in_features, "in_features")
        self.out_features = count(out_features, "out_features")
        self.parameters["weight"] = Parameter((self.out_features, self.in_features), default_weight())
        if flag(bias, "bias"):
            self.parameters["bias"] = Parameter((self.out_features,), default_bias(self.in_features))

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 2:
            raise ShapeError(f"input has shape {list(shape)}; expected [N, {self.in_features}]: put a Flatten in front")
        if shape[1] != self.in_features:
            raise ShapeError(f"input has shape {list(shape)}; expected {self.in_features} features, got {shape[1]}")
        return shape[0], self.out_features

    def macs(self, shape: tuple[int, ...]) -> int:
        return shape[0] * self.in_features * self.out_features

    def forward(self, scope: Scope) -> Tensor:
        y = scope.activation(self.infer(scope.shape))
        w = scope.compute_weight("weight", self.parameters["weight"].shape)
        b = scope.parameter("bias", (self.out_features,)) if "bias" in self.parameters else None
        scope.emit(
            "forward", "linear_forward", [("x", scope.x), ("w", w), ("b", b)], [("y", y)],
            2 * self.macs(scope.shape), relu=scope.relu,
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        flops = 2 * self.macs(scope.shape)
        dx = None
        if scope.needs_dx:
            dx = scope.dx()
            w = scope.compute_weight("weight", self.parameters["weight"].shape)
            mask = scope.x if scope.mask_dx else None
            scope.emit(
                "backward_data", "linear_backward_data", [("dy", dy), ("w", w), ("mask", mask)], [("dx", dx)], flops
            )
        dw = scope.weight_gradient("weight", self.parameters["weight"].shape)
        scope.emit("backward_filter", "linear_backward_filter", [("x", scope.x), ("dy", dy)], [("dw", dw)], flops)
        if "bias" in self.parameters:
            db = scope.weight_gradient("bias", (self.out_features,))
            scope.emit("backward_bias", "bias_backward", [("dy", dy)], [("db", db)])
        return dx

    def extra(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={'bias' in self.parameters}"


class Flatten(Layer):
    """X [N,C,H,W] -> Y [N,C*H*W], a view. In NHWC memory with more than one pixel it is a layout change."""

    kind = "layout"

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        if (shown(start_dim), shown(end_dim)) != ("1", "-1"):
            raise ArgumentError(
                f"start_dim, end_dim are {shown(start_dim)}, {shown(end_dim)}; Flatten keeps the batch: use 1, -1"
            )

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], prod(shape[1:])

    def _is_view(self, x: Tensor) -> bool:
        return x.layout == "NCHW" or len(x.shape) < 4 or x.shape[2] * x.shape[3] == 1

    def forward(self, scope: Scope) -> Tensor:
        if self._is_view(scope.x):
            return scope.x
        y = scope.activation(scope.x.shape, layout="NCHW")
        scope.emit("forward", "layout", [("x", scope.x)], [("y", y)])
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx = scope.dx()
        scope.emit("backward_data", "layout", [("x", dy)], [("y", dx)])
        return dx
