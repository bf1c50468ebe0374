"""Convolutions on the host: im2col, BLAS and col2im, one image and one band of output rows at a time.

With X [C,H,W] of one image unfolded into columns, col [C/g*R*S, pixels], and W read as a matrix [K/g, C/g*R*S]:

    forward            Y    = W @ col
    backward data      dcol = W.T @ dY,  dX = fold(dcol)
    backward filter    dW  += dY @ col.T

A band holds about a thousand pixels, so that its columns are still in the cache when BLAS reads them. All algorithms
run the same products in the same order and give equal bits; they differ in where the columns live: `gemm` asks the
caller for a workspace, `implicit` asks for none and uses a scratch buffer of the calling thread. Copies that change
layout or precision (NHWC views, bfloat16) are not workspace: they belong to the emulation, not to the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minidnn.errors import ArgumentError, ShapeError
from minidnn.ops.host_arrays import (
    Array,
    Padding,
    Pair,
    Scratch,
    load,
    quiet,
    stage,
    store,
    zero_where_dead,
)
from minidnn.ops.host_loops import add_bias, fold, unfold
from minidnn.units import round_up

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "conv2d_forward": ("gemm", "implicit"),
    "conv2d_backward_data": ("gemm", "implicit"),
    "conv2d_backward_filter": ("gemm", "implicit"),
}
"""Per convolution op the names of its algorithms, most workspace first, the one that needs none last."""

BAND_PIXELS = 1024  # enough for BLAS to run at full speed, few enough for the columns to stay in the cache
_ALIGNMENT = 64  # bytes, between the two parts of a workspace
_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The sizes of one convolution; letters as in the module's docstring."""

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    rows: int  # P
    columns: int  # Q
    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int

    @property
    def depth(self) -> int:
        """Length of one column: C/g * R * S."""
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    @property
    def is_view(self) -> bool:
        """Whether X itself is its columns: a 1x1 kernel that visits each pixel once."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == ((0, 0), (0, 0))

    @property
    def bands(self) -> int:
        """Into how many bands of nearly equal height the output's rows are cut."""
        return -(-self.rows // min(self.rows, -(-BAND_PIXELS // self.columns)))

    @property
    def band_rows(self) -> int:
        """Height of the tallest band."""
        return -(-self.rows // self.bands)

    def spans(self) -> Iterator[Pair]:
        """First and one past the last output row of each band."""
        for first in range(0, self.rows, self.band_rows):
            yield first, min(self.rows, first + self.band_rows)

    @property
    def window(self) -> tuple[int, ...]:
        """What the compiled loops need to know."""
        return (*self.kernel, *self.stride, self.padding[0][0], self.padding[1][0], *self.dilation, self.columns)

    def column_items(self) -> int:
        """Elements of the tallest band's columns."""
        return 0 if self.is_view else self.groups * self.depth * self.band_rows * self.columns

    def partial_items(self) -> int:
        """Elements of one band's contribution to dW, where there is more than one."""
        return 0 if self.batch * self.bands == 1 else self.filters * self.depth


def _geometry(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], y_shape: tuple[int, ...],
    stride: Pair, padding: Padding, dilation: Pair, groups: int,
) -> _Geometry:  # fmt: skip
    """Check that the shapes belong together (compiled loops do not) and name the sizes."""
    (n, c, h, w), (k, depth, r, s) = x_shape, w_shape
    p, q = (
        (size + sum(pad) - d * (extent - 1) - 1) // step + 1
        for size, pad, d, extent, step in zip((h, w), padding, dilation, (r, s), stride, strict=True)
    )
    if c != depth * groups or k % groups or tuple(y_shape) != (n, k, p, q) or min(p, q) < 1:
        raise ShapeError(
            f"convolution of x {list(x_shape)} with w {list(w_shape)}, groups {groups}, has y {list(y_shape)}; "
            f"expected w [K, {c // groups}, R, S] and y {[n, k, p, q]}"
        )
    return _Geometry(n, c, h, w, k, p, q, (r, s), stride, padding, dilation, groups)


def _items(geometry: _Geometry, function: str) -> Pair:
    """Elements of the columns and of the partial dW that `function` needs."""
    return geometry.column_items(), geometry.partial_items() if function == "conv2d_backward_filter" else 0


def workspace_bytes(
    function: str, algorithm: str, *, x_shape: tuple[int, ...], w_shape: tuple[int, ...], y_shape: tuple[int, ...],
    stride: Pair, padding: Padding, dilation: Pair, groups: int, itemsize: int,
) -> int:  # fmt: skip
    """Bytes of workspace that `function` (a key of ALGORITHMS) needs with `algorithm`.

    Shapes are X [N,C,H,W], W [K,C/groups,R,S] and Y [N,K,P,Q]; `itemsize` is that of the compute type: 8 for
    float64, else 4.
    """
    if algorithm not in ALGORITHMS.get(function, ()):
        raise ArgumentError(
            f"algorithm is {algorithm!r}; "
            f"it must be one of {ALGORITHMS.get(function, ())} for {function}"
        )
    if algorithm == "implicit":
        return 0
    columns, partial = _items(_geometry(x_shape, w_shape, y_shape, stride, padding, dilation, groups), function)
    return round_up(columns * itemsize, _ALIGNMENT) + partial * itemsize


def _buffers(
    geometry: _Geometry, function: str, algorithm: str, workspace: Array | None, dtype: np.dtype[np.generic]
) -> tuple[Array, Array]:
    """Flat arrays for a band's columns and for a partial dW, in the workspace or in the thread's scratch."""
    columns, partial = _items(geometry, function)
    start = round_up(columns * dtype.itemsize, _ALIGNMENT)
    needed = start + partial * dtype.itemsize
    if algorithm == "implicit":
        workspace = _scratch.take(needed)
    elif algorithm not in ALGORITHMS[function]:
        raise ArgumentError(f"algorithm is {algorithm!r}; it must be one of {ALGORITHMS[function]} for {function}")
    elif workspace is None:
        workspace = np.empty(0, np.uint8)
    if workspace.nbytes < needed:
        raise ArgumentError(f"workspace has {workspace.nbytes} bytes; {function} with {algorithm!r} needs {needed}")
    return workspace[: columns * dtype.itemsize].view(dtype), workspace[start:needed].view(dtype)


def _columns(geometry: _Geometry, image: Array, buffer: Array, span: Pair) -> Array:
    """The columns of a band, [groups, depth, pixels]: unfolded into `buffer`, or a view of the image."""
    g, (first, last), q = geometry, span, geometry.columns
    if g.is_view:
        return image.reshape(g.groups, g.depth, -1)[:, :, first * q : last * q]
    col = _empty_columns(g, buffer, span)
    unfold(image, col.reshape(-1), first, last, g.window)
    return col


def _empty_columns(geometry: _Geometry, buffer: Array, span: Pair) -> Array:
    g, pixels = geometry, (span[1] - span[0]) * geometry.columns
    return buffer[: g.groups * g.depth * pixels].reshape(g.groups, g.depth, pixels)


@quiet
def conv2d_forward(
    *, x: Array, w: Array, y: Array, b: Array | None = None, stride: Pair, padding: Padding, dilation: Pair,
    groups: int, relu: bool = False, algorithm: str, workspace: Array | None = None,
) -> None:  # fmt: skip
    """y[N,K,P,Q] = x[N,C,H,W] * w[K,C/groups,R,S] + b[K], then ReLU where `relu` is set."""
    g = _geometry(x.shape, w.shape, y.shape, stride, padding, dilation, groups)
    weights = load(w).reshape(groups, g.filters // groups, g.depth)
    bias = np.zeros(g.filters, weights.dtype) if b is None else load(b)
    buffer, _ = _buffers(g, "conv2d_forward", algorithm, workspace, weights.dtype)
    for source, out in zip(x, y, strict=True):
        image, result = load(source), stage(out)
        pixels = result.reshape(groups, g.filters // groups, -1)
        for span in g.spans():
            start, stop = span[0] * g.columns, span[1] * g.columns
            np.matmul(weights, _columns(g, image, buffer, span), out=pixels[:, :, start:stop])
            if b is not None or relu:
                add_bias(result.reshape(g.filters, -1), bias, start, stop, relu)
        store(result, out)


@quiet
def conv2d_backward_data(
    *, dy: Array, w: Array, dx: Array, mask: Array | None = None, stride: Pair, padding: Padding, dilation: Pair,
    groups: int, algorithm: str, workspace: Array | None = None,
) -> None:  # fmt: skip
    """dx[N,C,H,W] from dy[N,K,P,Q] and w[K,C/groups,R,S]; zero where `mask`, the ReLU output of dx's shape, is <= 0."""
    g = _geometry(dx.shape, w.shape, dy.shape, stride, padding, dilation, groups)
    weights = load(w).reshape(groups, g.filters // groups, g.depth).transpose(0, 2, 1)
    buffer, _ = _buffers(g, "conv2d_backward_data", algorithm, workspace, weights.dtype)
    # Depthwise: the sums have one term each, for which BLAS is slow.
    product = np.multiply if g.filters == groups else np.matmul
    for n, (source, out) in enumerate(zip(dy, dx, strict=True)):
        gradient, result = load(source).reshape(groups, g.filters // groups, -1), stage(out)
        if not g.is_view:
            result.fill(0)
        for span in g.spans():
            start, stop = span[0] * g.columns, span[1] * g.columns
            if g.is_view:
                col = result.reshape(groups, g.depth, -1)[:, :, start:stop]
            else:
                col = _empty_columns(g, buffer, span)
            product(weights, gradient[:, :, start:stop], out=col)
            if not g.is_view:
                fold(col.reshape(-1), result, *span, g.window)
        if mask is not None:
            zero_where_dead(result, mask[n])
        store(result, out)


@quiet
def conv2d_backward_filter(
    *, x: Array, dy: Array, dw: Array, stride: Pair, padding: Padding, dilation: Pair, groups: int, algorithm: str,
    workspace: Array | None = None,
) -> None:  # fmt: skip
    """dw[K,C/groups,R,S] from x[N,C,H,W] and dy[N,K,P,Q], summed over the images in order."""
    g = _geometry(x.shape, dw.shape, dy.shape, stride, padding, dilation, groups)
    result = stage(dw)
    total = result.reshape(groups, g.filters // groups, g.depth)
    buffer, partial = _buffers(g, "conv2d_backward_filter", algorithm, workspace, total.dtype)
    for n in range(g.batch):
        image, gradient = load(x[n]), load(dy[n]).reshape(groups, g.filters // groups, -1)
        for span in g.spans():
            col = _columns(g, image, buffer, span)
            # The first product overwrites what dw held; BLAS as NumPy offers it cannot add to a matrix.
            target = total if n == 0 and span[0] == 0 else partial.reshape(total.shape)
            band = gradient[:, :, span[0] * g.columns : span[1] * g.columns]
            np.matmul(band, col.transpose(0, 2, 1), out=target)
            if target is not total:
                np.add(total, target, out=total)
    store(result, dw)
