"""Pooling on the host: maximum over windows, average over windows, adaptive average."""

from __future__ import annotations

import numpy as np

from minidnn.errors import ArgumentError
from minidnn.ops.host_arrays import Array, Padding, Pair, load, quiet, stage, store, zero_where_dead
from minidnn.ops.host_loops import average, find_again, find_maximum, scatter, spread


def _window(kernel_size: Pair, stride: Pair, padding: Padding, dilation: Pair) -> tuple[int, ...]:
    return (*kernel_size, *stride, padding[0][0], padding[1][0], *dilation)


@quiet
def max_pool2d_forward(
    *, x: Array, y: Array, index: Array | None = None, kernel: Pair, stride: Pair, padding: Padding, dilation: Pair,
    relu: bool = False,
) -> None:  # fmt: skip
    """y[N,C,P,Q] = the maximum of each window of x[N,C,H,W], or of ReLU(x) where `relu` is set. y's shape is what
    ceil_mode made it.

    index[N,C,P,Q] (int8) = r * S + s of the first maximum in the window, or of its last NaN, as PyTorch finds it;
    -1 where no gradient flows back: `relu` is set and y <= 0, or the window holds padding only (y is -inf then).
    """
    if index is not None and kernel[0] * kernel[1] > 127:
        raise ArgumentError(f"kernel is {kernel}; an int8 index needs a window of at most 127 positions")
    window = _window(kernel, stride, padding, dilation)
    for n in range(len(x)):
        out, place = y[n], np.empty(y.shape[1:], np.int32) if index is None else index[n]
        result, found = stage(out), stage(place)
        find_maximum(load(x[n]), result, found, window, relu)
        store(result, out)
        store(found, place)


@quiet
def max_pool2d_backward(
    *, dy: Array, dx: Array, index: Array | None = None, x: Array | None = None, y: Array | None = None,
    kernel: Pair, stride: Pair, padding: Padding, dilation: Pair,
) -> None:  # fmt: skip
    """dx[N,C,H,W] = dy[N,C,P,Q] at each window's maximum, which comes from `index` or is found again from x and y."""
    window = _window(kernel, stride, padding, dilation)
    for n, out in enumerate(dx):
        if index is not None:
            positions = load(index[n])
        elif x is not None and y is not None:
            positions = np.empty(y.shape[1:], np.int32)
            find_again(load(x[n]), load(y[n]), positions, window)
        else:
            raise ArgumentError("max_pool2d_backward got neither index nor both x and y; it needs one or the other")
        result = stage(out)
        result.fill(0)
        scatter(load(dy[n]), positions, result, window)
        store(result, out)


def _boxes(size: int, count: int, kernel_size: int, stride: int, padding: Pair, count_padding: bool) -> Array:
    """Per output position its first input position, one past its last, and its share of the divisor: int64 [count, 3].

    A window is clipped to the padded image before padding is counted, as PyTorch does under ceil_mode.
    """
    first = np.arange(count) * stride - padding[0]
    last = np.minimum(first + kernel_size, size + padding[1])
    clipped = np.maximum(first, 0), np.minimum(last, size)
    return np.stack([*clipped, last - first if count_padding else clipped[1] - clipped[0]], axis=1)


def _adaptive_boxes(size: int, count: int) -> Array:
    """Boxes of an adaptive pooling: position i covers floor(i * size / count) .. ceil((i + 1) * size / count) - 1."""
    i = np.arange(count)
    first, last = i * size // count, -(-(i + 1) * size // count)
    return np.stack([first, last, last - first], axis=1)


def _average_forward(x: Array, y: Array, rows: Array, columns: Array) -> None:
    for image, out in zip(x, y, strict=True):
        result = stage(out)
        average(load(image), result, rows, columns)
        store(result, out)


def _average_backward(dy: Array, dx: Array, mask: Array | None, rows: Array, columns: Array) -> None:
    for n, out in enumerate(dx):
        result = stage(out)
        result.fill(0)
        spread(load(dy[n]), result, rows, columns)
        if mask is not None:
            zero_where_dead(result, mask[n])
        store(result, out)


def _fixed_boxes(
    x_shape: tuple[int, ...], y_shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Padding, count: bool
) -> tuple[Array, Array]:
    high, wide = (
        _boxes(x_shape[2 + i], y_shape[2 + i], kernel[i], stride[i], padding[i], count) for i in range(2)
    )
    return high, wide


@quiet
def avg_pool2d_forward(
    *, x: Array, y: Array, kernel: Pair, stride: Pair, padding: Padding, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> None:  # fmt: skip
    """y[N,C,P,Q] = the mean of each window of x[N,C,H,W], with padding counted as zeros or not. y's shape is what
    `ceil_mode` made it."""
    _average_forward(x, y, *_fixed_boxes(x.shape, y.shape, kernel, stride, padding, count_include_pad))


@quiet
def avg_pool2d_backward(
    *, dy: Array, dx: Array, mask: Array | None = None, kernel: Pair, stride: Pair, padding: Padding,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> None:  # fmt: skip
    """dx[N,C,H,W] from dy[N,C,P,Q]; zero where `mask`, the ReLU output of dx's shape, is <= 0."""
    _average_backward(dy, dx, mask, *_fixed_boxes(dx.shape, dy.shape, kernel, stride, padding, count_include_pad))


@quiet
def adaptive_avg_pool2d_forward(*, x: Array, y: Array) -> None:
    """y[N,C,P,Q] = the mean of x[N,C,H,W] over P x Q boxes of nearly equal size that cover it."""
    _average_forward(x, y, *(_adaptive_boxes(x.shape[i], y.shape[i]) for i in (2, 3)))


@quiet
def adaptive_avg_pool2d_backward(*, dy: Array, dx: Array, mask: Array | None = None) -> None:
    """dx[N,C,H,W] from dy[N,C,P,Q]; zero where `mask`, the ReLU output of dx's shape, is <= 0."""
    _average_backward(dy, dx, mask, *(_adaptive_boxes(dx.shape[i], dy.shape[i]) for i in (2, 3)))
