"""Conv2d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minidnn.arguments import count, flag, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.nn.init import default_bias, default_weight
from minidnn.nn.layer import Layer, Parameter, expect_rank, pair

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor

Padding = tuple[tuple[int, int], tuple[int, int]]


class Conv2d(Layer):
    """2-d convolution (cross-correlation), X [N,C,H,W] -> Y [N,K,P,Q], weight [K,C/groups,R,S], bias [K].

    Arguments and defaults are PyTorch's; `padding` is an int, a pair, `"same"` (stride 1) or `"valid"`.
    """

    kind = "conv"
    fuses_relu = True
    masks = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1, groups: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels = count(in_channels, "in_channels")
        self.out_channels = count(out_channels, "out_channels")
        self.kernel = pair(kernel_size, "kernel_size", 1)
        self.stride = pair(stride, "stride", 1)
        self.dilation = pair(dilation, "dilation", 1)
        self.groups = count(groups, "groups")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ArgumentError(
                f"groups is {groups}; it must divide in_channels {in_channels} and out_channels {out_channels}"
            )
        self.padding = self._resolve(padding)
        weight = (self.out_channels, self.in_channels // self.groups, *self.kernel)
        self.parameters["weight"] = Parameter(weight, default_weight())
        if flag(bias, "bias"):
            fan_in = weight[1] * weight[2] * weight[3]
            self.parameters["bias"] = Parameter((self.out_channels,), default_bias(fan_in))

    def _resolve(self, padding: int | tuple[int, int] | str) -> Padding:
        if isinstance(padding, str):
            if padding == "valid":
                return (0, 0), (0, 0)
            if padding != "same":
                raise ArgumentError(f"padding is {shown(padding)}; it must be an int, a pair, 'same' or 'valid'")
            if self.stride != (1, 1):
                raise ArgumentError(f"padding is 'same' with stride {self.stride}; 'same' needs stride 1")
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            return (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
        high, wide = pair(padding, "padding", 0)
        return (high, high), (wide, wide)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        expect_rank(shape, 4, "N, C, H, W")
        if shape[1] != self.in_channels:
            raise ShapeError(f"input has shape {list(shape)}; expected {self.in_channels} channels, got {shape[1]}")
        out = [
            (size + sum(pad) - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        if min(out) < 1:
            raise ShapeError(
                f"input has shape {list(shape)}; kernel {self.kernel} with padding {self.padding} and dilation "
                f"{self.dilation} needs a larger image"
            )
        return shape[0], self.out_channels, out[0], out[1]

    def _attributes(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def macs(self, shape: tuple[int, ...]) -> int:
        n, k, p, q = self.infer(shape)
        return n * k * p * q * self.parameters["weight"].size // self.out_channels

    def _bias(self, scope: Scope) -> Tensor | None:
        return scope.parameter("bias", (self.out_channels,)) if "bias" in self.parameters else None

    def forward(self, scope: Scope) -> Tensor:
        y = scope.activation(self.infer(scope.shape))
        w = scope.compute_weight("weight", self.parameters["weight"].shape)
        scope.emit(
            "forward", "conv2d_forward", [("x", scope.x), ("w", w), ("b", self._bias(scope))], [("y", y)],
            2 * self.macs(scope.shape), relu=scope.relu, **self._attributes(),
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
                "backward_data", "conv2d_backward_data", [("dy", dy), ("w", w), ("mask", mask)], [("dx", dx)],
                flops, **self._attributes(),
            )  # fmt: skip
        dw = scope.weight_gradient("weight", self.parameters["weight"].shape)
        scope.emit(
            "backward_filter", "conv2d_backward_filter", [("x", scope.x), ("dy", dy)], [("dw", dw)],
            flops, **self._attributes(),
        )  # fmt: skip
        if "bias" in self.parameters:
            db = scope.weight_gradient("bias", (self.out_channels,))
            scope.emit("backward_bias", "bias_backward", [("dy", dy)], [("db", db)])
        return dx

    def extra(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={'bias' in self.parameters}"
        )
