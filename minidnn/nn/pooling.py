"""MaxPool2d, AvgPool2d, AdaptiveAvgPool2d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minidnn.arguments import flag, is_count, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.nn.layer import Layer, expect_rank, pair

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor


class _Pool2d(Layer):
    kind = "pool"
    masks = True

    def __init__(
        self, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None,
        padding: int | tuple[int, int], dilation: int | tuple[int, int], ceil_mode: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel = pair(kernel_size, "kernel_size", 1)
        self.stride = self.kernel if stride is None else pair(stride, "stride", 1)
        pads = pair(padding, "padding", 0)
        if any(2 * p > k for p, k in zip(pads, self.kernel, strict=True)):
            raise ArgumentError(f"padding is {shown(padding)}; it must be at most half of kernel_size {self.kernel}")
        self.padding = ((pads[0], pads[0]), (pads[1], pads[1]))
        self.dilation = pair(dilation, "dilation", 1)
        self.ceil_mode = flag(ceil_mode, "ceil_mode")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        expect_rank(shape, 4, "N, C, H, W")
        out = []
        for size, (pad, _), dilation, kernel, stride in zip(
            shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
        ):
            span = size + 2 * pad - dilation * (kernel - 1) - 1
            steps = -(-span // stride) if self.ceil_mode else span // stride
            if self.ceil_mode and steps * stride >= size + pad:
                steps -= 1  # PyTorch: the last window must start inside the image or its left padding
            out.append(steps + 1)
        if min(out) < 1:
            raise ShapeError(f"input has shape {list(shape)}; pooling window {self.kernel} needs a larger image")
        return shape[0], shape[1], out[0], out[1]

    def extra(self) -> str:
        pads = (self.padding[0][0], self.padding[1][0])
        return f"kernel_size={self.kernel}, stride={self.stride}, padding={pads}, ceil_mode={self.ceil_mode}"


class MaxPool2d(_Pool2d):
    """Maximum over windows, X [N,C,H,W] -> Y [N,C,P,Q].

    The paper's graph saves X and Y; the native one an int8 index of the window's first maximum (-1 where a ReLU in
    front kills the gradient), so that X may go right after forward.
    """

    def __init__(
        self, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0, dilation: int | tuple[int, int] = 1, ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode)
        self.masks = self.kernel[0] * self.kernel[1] <= 127  # window positions are int8

    def _attributes(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def _index(self, scope: Scope, shape: tuple[int, ...]) -> Tensor | None:
        wanted = scope.target.fuses_backward and scope.training and self.masks
        return scope.saved("index", shape, "int8") if wanted else None

    def forward(self, scope: Scope) -> Tensor:
        shape = self.infer(scope.shape)
        y = scope.activation(shape)
        scope.emit(
            "forward", "max_pool2d_forward", [("x", scope.x)], [("y", y), ("index", self._index(scope, shape))],
            relu=scope.mask_dx, **self._attributes(),
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx, index = scope.dx(), self._index(scope, scope.y.shape)
        saved: list[tuple[str, Tensor | None]] = [("x", scope.x), ("y", scope.y)]
        scope.emit(
            "backward_data", "max_pool2d_backward", [("dy", dy), *([("index", index)] if index else saved)],
            [("dx", dx)], **self._attributes(),
        )  # fmt: skip
        return dx


class AvgPool2d(_Pool2d):
    """Mean over windows; `count_include_pad` as in PyTorch."""

    kind = "avg_pool"

    def __init__(
        self, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, 1, ceil_mode)
        self.count_include_pad = flag(count_include_pad, "count_include_pad")

    def _attributes(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel, "stride": self.stride, "padding": self.padding,
            "ceil_mode": self.ceil_mode, "count_include_pad": self.count_include_pad,
        }  # fmt: skip

    def forward(self, scope: Scope) -> Tensor:
        y = scope.activation(self.infer(scope.shape))
        scope.emit("forward", "avg_pool2d_forward", [("x", scope.x)], [("y", y)], **self._attributes())
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx, mask = scope.dx(), scope.x if scope.mask_dx else None
        scope.emit(
            "backward_data", "avg_pool2d_backward", [("dy", dy), ("mask", mask)], [("dx", dx)], **self._attributes()
        )
        return dx


class AdaptiveAvgPool2d(Layer):
    """Mean over windows chosen so that the output has `output_size` pixels. Of equal size it is no op."""

    kind = "avg_pool"
    masks = True

    def __init__(self, output_size: int | tuple[int | None, int | None]) -> None:
        super().__init__()
        sizes = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size, output_size)
        if len(sizes) != 2 or not all(is_count(s) or (s is None and output_size is not None) for s in sizes):
            shape = shown(output_size)
            raise ArgumentError(f"output_size is {shape}; it must be an int or a pair, each 1 or more or None")
        self.output_size = sizes

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        expect_rank(shape, 4, "N, C, H, W")
        high, wide = (want or size for want, size in zip(self.output_size, shape[2:], strict=True))
        return shape[0], shape[1], high, wide

    def forward(self, scope: Scope) -> Tensor:
        shape = self.infer(scope.shape)
        if shape == scope.shape:
            return scope.x
        y = scope.activation(shape)
        scope.emit("forward", "adaptive_avg_pool2d_forward", [("x", scope.x)], [("y", y)])
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx, mask = scope.dx(), scope.x if scope.mask_dx else None
        scope.emit("backward_data", "adaptive_avg_pool2d_backward", [("dy", dy), ("mask", mask)], [("dx", dx)])
        return dx

    def extra(self) -> str:
        return f"output_size={self.output_size}"
