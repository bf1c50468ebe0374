"""Max, average and adaptive average pooling on CUDA: which kernel serves which window, layout and type.

Every function binds one op: same names and arguments as in `numpy_ops`, and it returns the launch.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32

from minidnn.errors import DeviceError, ShapeError
from minidnn.ops.array import Array, common_layout, suffix, vector
from minidnn.ops.context import Context
from minidnn.ops.kernels import BLOCK, THREADS, FastDiv, Launcher, Split, Strides, blocks, i64, image_grid, u32

LARGE, SHARED = 64, 1024
"""From so many taps on, a window is searched by the lanes of a warp together, and by all warps of a block; in NHWC of
PACKS packs of channels."""
PACKS, WARPS = 4, THREADS // 32
MOST = 2**31 - 2**15
"""Values of an image: kernels count them in 32 bits, and look so far ahead."""
PLANES_BYTES, MANY_BLOCKS = 24576, 4096
"""Shared memory of a block that takes whole planes, as in pooling_planes.cu, and how many blocks are plenty."""
Pair = tuple[int, int]
Padding = tuple[Pair, Pair]
_SIZES = ("C", "H", "W", "P", "Q", "R", "S", "stride_h", "stride_w", "pad_h", "pad_w")


class Pool(ctypes.Structure):
    """Geometry of max-pooling, as in pooling.cuh."""

    _fields_ = tuple((name, c_int32) for name in (*_SIZES, "dilation_h", "dilation_w"))


class Average(ctypes.Structure):
    """Geometry of average pooling, as in average.cu."""

    _fields_ = (
        *((name, c_int32) for name in (*_SIZES, "end_h", "end_w", "adaptive", "include_pad")),
        *((name, FastDiv) for name in ("by_H", "by_W", "by_P", "by_Q", "by_stride_h", "by_stride_w")),
    )


def _geometry(x: Array, y: Array, kernel: Pair, stride: Pair, padding: Padding, dilation: Pair) -> Pool:
    _, c, h, w = x.shape4
    _, _, p, q = y.shape4
    if c * h * w > MOST:
        raise DeviceError(f"an image has {c * h * w} values; max-pooling on the GPU takes at most {MOST}")
    return Pool(c, h, w, p, q, *kernel, *stride, padding[0][0], padding[1][0], *dilation)


def _window(kernel: Pair, stride: Pair, dilation: Pair) -> str:
    """The variant for a window that kernels know at compile time, else empty."""
    if stride == (2, 2) and dilation == (1, 1) and kernel in ((2, 2), (3, 3)):
        return f"_k{kernel[0]}s2"
    return ""


def _pairs(
    x: Array, y: Array, saved: Array, kernel: Pair, stride: Pair, padding: Padding, dilation: Pair, widest: int = 4
) -> int:
    """How many neighbouring 2 x 2 windows one thread can take in NCHW memory; 0: the shape does not allow it."""
    _, _, h, w = x.shape4
    _, _, p, q = y.shape4
    if kernel != (2, 2) or stride != (2, 2) or dilation != (1, 1) or padding != ((0, 0), (0, 0)):
        return 0
    if 2 * p > h or 2 * q > w:
        return 0
    for width in (4, 2, 1):
        aligned = all(a.aligned(2 * width if a.shape4 == x.shape4 else width) for a in (x, y, saved))
        if width <= widest and q % width == 0 and w % (2 * width) == 0 and aligned:
            return width
    return 0


def _split(layout: str, width: int, c: int, h: int, w: int) -> tuple[Split, int]:
    """The decoding of an image's flat index, and how many indices there are."""
    if layout == "nhwc":
        return Split(c // width, w), c // width * w * h
    return Split(w, h), c * h * w


def _large(layout: str, width: int, c: int, p: int, q: int, taps: int) -> tuple[Split, int, int]:
    """As `_split`, of windows that warps search; how many an image has; and how many warps share one: all of a block
    where each finds enough to do."""
    packs = blocks(c // width, PACKS) if layout == "nhwc" else c
    team = WARPS if taps >= SHARED else 1
    return (Split(packs, q) if layout == "nhwc" else Split(q, p)), packs * p * q, team


def _planes_per_block(planes: int, nbytes: int, items: int) -> int:
    """How many NCHW planes of `nbytes` a block takes, a thread one of their items at a time; 0: none fits.

    At most what leaves MANY_BLOCKS blocks, or gives each thread one item. Of that many down to half as many, what keeps
    the most threads busy in the last round.
    """
    fit = (PLANES_BYTES - 96) // nbytes  # three spans, each of which begins and ends within a word of 16 bytes
    most = min(fit, planes, max(1, THREADS // items, planes // MANY_BLOCKS))
    return max(range(most // 2 + 1, most + 1), key=lambda k: (k * items / blocks(k * items), k), default=0)


def max_pool2d_forward(
    on: Context, *, x: Array, y: Array, index: Array | None = None,
    kernel: Pair, stride: Pair, padding: Padding, dilation: Pair, relu: bool = False,
) -> Launcher:  # fmt: skip
    """Y [N,C,P,Q] = maximum of each window of X [N,C,H,W]; index int8 like Y: see pooling.cuh."""
    if index is not None and kernel[0] * kernel[1] > 127:
        raise ShapeError(f"kernel is {kernel}; a window whose index is saved must have at most 127 values")
    n, c, _, _ = x.shape4
    _, _, p, q = y.shape4
    geometry = _geometry(x, y, kernel, stride, padding, dilation)
    layout = common_layout("max_pool2d_forward", x, y, index)
    if layout == "nchw":
        pairs = _pairs(x, y, index or y, kernel, stride, padding, dilation)
        if pairs:
            return on.bind(
                "pooling", f"max_pool_forward_pairs_{suffix(x.code, pairs)}", image_grid(c * p * q // pairs, n), BLOCK,
                x, y, index, n, Split(q // pairs, p), u32(c * p * q // pairs), Strides(x), Strides(y), relu,
            )  # fmt: skip
    width = vector(c, x, y) if layout == "nhwc" and (index is None or index.aligned(16 // x.itemsize)) else 1
    if kernel[0] * kernel[1] >= LARGE:
        split, count, team = _large(layout, width, c, p, q, kernel[0] * kernel[1])
        return on.bind(
            "pooling_large", f"max_pool_forward_large_{layout}_{suffix(x.code, width)}",
            image_grid(count, n, WARPS // team), BLOCK,
            x, y, index, n, geometry, split, u32(count), team, Strides(x), Strides(y), relu,
        )  # fmt: skip
    window = _window(kernel, stride, dilation) if layout == "nchw" or width > 1 else ""
    split, count = _split(layout, width, c, p, q)
    return on.bind(
        "pooling", f"max_pool_forward_{layout}_{suffix(x.code, width)}{window}", image_grid(count, n), BLOCK,
        x, y, index, n, geometry, split, u32(count), Strides(x), Strides(y), relu,
    )  # fmt: skip


def _planes(
    on: Context, dy: Array, saved: Array, dx: Array, geometry: Pool, again: str, window: str, tiles: Split, count: int
) -> Launcher | None:
    """The gradient of whole NCHW planes at a time, each of `count` tiles; None where a plane does not fit into shared
    memory or an array begins inside a word of 16 bytes."""
    n, c, h, w = dx.shape4
    _, _, p, q = dy.shape4
    planes = _planes_per_block(n * c, h * w * dx.itemsize + p * q * (dy.itemsize + 1), count)
    if not planes or not all(a.aligned(16 // a.itemsize) for a in (dy, saved, dx)):
        return None
    return on.bind(
        "pooling_planes", f"max_pool_backward_planes_{again}{dy.code}{window}", (blocks(n * c, planes), 1, 1), BLOCK,
        dy, saved, dx, geometry, tiles, Split(q, p), planes, i64(n * c),
    )  # fmt: skip


def max_pool2d_backward(
    on: Context, *, dy: Array, dx: Array, index: Array | None = None, x: Array | None = None, y: Array | None = None,
    kernel: Pair, stride: Pair, padding: Padding, dilation: Pair,
) -> Launcher:  # fmt: skip
    """dX from dY and the saved index; without an index from X and Y: the first of equal maxima, or the last NaN. Y then
    is the maximum of X, without a ReLU: what one would stop, the index alone tells."""
    if index is None and (x is None or y is None):
        raise ShapeError("max_pool2d_backward got neither an index nor both X and Y; it needs one or the other")
    n, c, h, w = dx.shape4
    _, _, p, q = dy.shape4
    geometry = _geometry(dx, dy, kernel, stride, padding, dilation)
    saved, again = (index, "") if index is not None else (x, "again_")
    assert saved is not None
    layout = common_layout("max_pool2d_backward", dx, saved, dy, y)
    if layout == "nchw" and (h, w) == (2 * p, 2 * q):
        # A thread's rows of 2 V values are one access each: neighbours' stores then fill whole sectors.
        pairs = _pairs(dx, dy, saved, kernel, stride, padding, dilation, 8 // dy.itemsize)
        if pairs:
            return on.bind(
                "pooling", f"max_pool_backward_pairs_{again}{suffix(dy.code, pairs)}",
                image_grid(c * p * q // pairs, n), BLOCK,
                dy, saved, dx, n, Split(q // pairs, p), u32(c * p * q // pairs), Strides(dx), Strides(dy),
            )  # fmt: skip
    width = vector(c, dy, dx) if layout == "nhwc" and saved.aligned(16 // dy.itemsize) else 1
    code = f"{layout}_{suffix(dy.code, width)}"
    window = _window(kernel, stride, dilation) if layout == "nchw" or width > 1 else ""
    if window:  # a thread takes the 2 x 2 pixels that begin with its window's first one
        rows, columns = (h + padding[0][0] + 1) // 2, (w + padding[1][0] + 1) // 2
        tiles = Split(columns, rows)
        if layout == "nchw" and (planes := _planes(on, dy, saved, dx, geometry, again, window, tiles, rows * columns)):
            return planes
        split, count = _split(layout, width, c, rows, columns)
        return on.bind(
            "pooling", f"max_pool_backward_tile_{again}{code}{window}", image_grid(count, n), BLOCK,
            dy, saved, dx, n, geometry, split, u32(count), Strides(dx), Strides(dy),
        )  # fmt: skip
    side_by_side = dilation == (1, 1) and kernel[0] <= stride[0] and kernel[1] <= stride[1]
    if index is None and side_by_side and kernel[0] * kernel[1] >= LARGE:
        split, count, team = _large(layout, width, c, p, q, kernel[0] * kernel[1])
        return on.bind(
            "pooling_large", f"max_pool_backward_large_{code}", image_grid(count, n, WARPS // team), BLOCK,
            dy, x, dx, n, geometry, split, u32(count), team, Strides(dx), Strides(dy),
        )  # fmt: skip
    if index is None:
        split, count = _split(layout, 1, c, h, w)
        return on.bind(
            "pooling", f"max_pool_backward_again_{layout}_{dy.code}", image_grid(count, n), BLOCK,
            dy, x, y, dx, n, geometry, split, u32(count), Strides(dx), Strides(dy),
        )  # fmt: skip
    split, count = _split(layout, width, c, h, w)
    return on.bind(
        "pooling", f"max_pool_backward_{code}", image_grid(count, n), BLOCK,
        dy, index, dx, n, geometry, split, u32(count), Strides(dx), Strides(dy),
    )  # fmt: skip


def _average(
    x: Array, y: Array, kernel: Pair, stride: Pair, padding: Padding, include_pad: bool, adaptive: bool
) -> Average:
    _, c, h, w = x.shape4
    _, _, p, q = y.shape4
    if max(h * p, w * q) >= 2**30:
        raise ShapeError(f"adaptive pooling from {h} x {w} to {p} x {q} pixels is too large; use a smaller image")
    return Average(
        c, h, w, p, q, *kernel, *stride, padding[0][0], padding[1][0], h + padding[0][1], w + padding[1][1],
        adaptive, include_pad, *(FastDiv(d) for d in (h, w, p, q, *stride)),
    )  # fmt: skip


def _average_window(geometry: Average) -> str:
    """The variant for a window that kernels know at compile time, else empty."""
    window = (geometry.R, geometry.S, geometry.stride_h, geometry.stride_w)
    return "_k2s2" if window == (2, 2, 2, 2) and not geometry.adaptive else ""


def _box(
    on: Context, source: Array, mask: Array | None, target: Array, geometry: Average, layout: str, backward: bool
) -> Launcher | None:
    """Either direction of a 3 x 3 window of stride 1 that keeps the image's size; None for other windows."""
    n, c, h, w = source.shape4
    strips = blocks(h, 4)  # of as many rows as the kernel says
    window = (geometry.R, geometry.S, geometry.stride_h, geometry.stride_w, geometry.pad_h, geometry.pad_w)
    if geometry.adaptive or window != (3, 3, 1, 1, 1, 1) or target.shape4[2:] != (h, w) or strips > 65535:
        return None
    if layout == "nhwc":
        width = vector(c, source, mask, target)
        packs = c // width
        split, count = Split(16 if packs % 16 == 0 else packs, w), packs * w
    else:
        width = 4 if w % 4 == 0 and all(a.aligned(4) for a in (source, mask, target) if a) else 1
        split, count = Split(w // width, c), c * w // width
    return on.bind(
        "average", f"avg_pool_box_{layout}_{suffix(source.code, width)}", (blocks(count), strips, min(n, 65535)), BLOCK,
        source, mask, target, n, geometry, split, u32(count), Strides(source), Strides(target), backward,
    )  # fmt: skip


def _avg_forward(on: Context, x: Array, y: Array, geometry: Average) -> Launcher:
    n, c, h, w = x.shape4
    _, _, p, q = y.shape4
    layout = common_layout("average pooling", x, y)
    if layout == "nchw" and h * w >= 16 * p * q:  # large windows: some lanes each
        lanes = 8 if h * w < 256 * p * q else 32
        return on.bind(
            "average", f"avg_pool_forward_lanes_{x.code}_{lanes}", image_grid(c * p * q, n, THREADS // lanes), BLOCK,
            x, y, n, geometry, Split(q, p), u32(c * p * q), Strides(x), Strides(y),
        )  # fmt: skip
    if box := _box(on, x, None, y, geometry, layout, backward=False):
        return box
    width = vector(c, x, y) if layout == "nhwc" else 1
    split, count = _split(layout, width, c, p, q)
    return on.bind(
        "average", f"avg_pool_forward_{layout}_{suffix(x.code, width)}{_average_window(geometry)}",
        image_grid(count, n), BLOCK, x, y, n, geometry, split, u32(count), Strides(x), Strides(y),
    )  # fmt: skip


def _avg_backward(on: Context, dy: Array, mask: Array | None, dx: Array, geometry: Average) -> Launcher:
    n, c, h, w = dx.shape4
    layout = common_layout("average pooling", dx, dy, mask)
    window = (geometry.R, geometry.S, geometry.end_h, geometry.end_w)
    if dy.shape4[2:] == (1, 1) and (geometry.adaptive or window == (h, w, h, w)) and dx.size < 2**31:
        return _avg_backward_global(on, dy, mask, dx, layout)
    if box := _box(on, dy, mask, dx, geometry, layout, backward=True):
        return box
    width = vector(c, dx, dy, mask) if layout == "nhwc" else 1
    split, count = _split(layout, width, c, h, w)
    return on.bind(
        "average", f"avg_pool_backward_{layout}_{suffix(dy.code, width)}{_average_window(geometry)}",
        image_grid(count, n), BLOCK, dy, mask, dx, n, geometry, split, u32(count), Strides(dx), Strides(dy),
    )  # fmt: skip


def _avg_backward_global(on: Context, dy: Array, mask: Array | None, dx: Array, layout: str) -> Launcher:
    """The gradient of the mean of a whole image."""
    _, c, h, w = dx.shape4
    width = vector(c, dx, dy, mask) if layout == "nhwc" else vector(dx.size, dx, mask)
    inner, outer = (c // width, h * w) if layout == "nhwc" else (h * w, 1)
    packs = dx.size // width
    return on.bind(
        "average", f"avg_pool_backward_global_{layout}_{suffix(dy.code, width)}", (blocks(packs), 1, 1), BLOCK,
        dy, mask, dx, u32(packs), FastDiv(inner), FastDiv(outer), 1.0 / (h * w),
    )  # fmt: skip


def avg_pool2d_forward(
    on: Context, *, x: Array, y: Array, kernel: Pair, stride: Pair, padding: Padding,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> Launcher:  # fmt: skip
    """Y = mean of each window of X; Y's shape says whether `ceil_mode` added windows."""
    return _avg_forward(on, x, y, _average(x, y, kernel, stride, padding, count_include_pad, adaptive=False))


def avg_pool2d_backward(
    on: Context, *, dy: Array, dx: Array, mask: Array | None = None, kernel: Pair, stride: Pair, padding: Padding,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> Launcher:  # fmt: skip
    """dX from dY, zero where mask <= 0."""
    geometry = _average(dx, dy, kernel, stride, padding, count_include_pad, adaptive=False)
    return _avg_backward(on, dy, mask, dx, geometry)


def adaptive_avg_pool2d_forward(on: Context, *, x: Array, y: Array) -> Launcher:
    """Y [N,C,P,Q] = means of the windows that divide X [N,C,H,W] into P x Q."""
    return _avg_forward(on, x, y, _average(x, y, (1, 1), (1, 1), ((0, 0), (0, 0)), False, adaptive=True))


def adaptive_avg_pool2d_backward(on: Context, *, dy: Array, dx: Array, mask: Array | None = None) -> Launcher:
    """dX from dY, zero where mask <= 0."""
    geometry = _average(dx, dy, (1, 1), (1, 1), ((0, 0), (0, 0)), False, adaptive=True)
    return _avg_backward(on, dy, mask, dx, geometry)
