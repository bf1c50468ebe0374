"""Channel sums on CUDA and what is made of them: the bias gradient, batch-norm, and local response normalization.

Every function binds one op: same names and arguments as in `numpy_ops`, and it returns the launch.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32

from minidnn.errors import ShapeError
from minidnn.ops.array import Array, common_layout, suffix, vector
from minidnn.ops.context import Context
from minidnn.ops.kernels import BLOCK, THREADS, FastDiv, Grid, Launcher, blocks, i64, image_grid, sequence, u32

PARTS = 528
"""Blocks that a sum is divided into, four per multiprocessor of the largest cards; the same on every card, so that the
order of additions is too."""
FETCHES = 4
"""Loads that a thread of reduction.cu has in flight."""
FORWARD_PACKS, BACKWARD_PACKS = 4, 2
"""Packs that a thread of norm.cu normalizes."""
LRN_RUN, LRN_RUN_BACK = 8, 32
"""Channels that a thread of lrn.cu takes of a pixel, forward and backward."""


class Channels(ctypes.Structure):
    """Where a pack's channel comes from, as in norm.cu."""

    _fields_ = (("channels", FastDiv), ("pixel_packs", FastDiv))


class Lrn(ctypes.Structure):
    """Arguments of local response normalization, as in lrn.cu."""

    _fields_ = (
        *((n, c_int32) for n in ("C", "pixels", "size")), *((n, c_float) for n in ("alpha_over_size", "beta", "k"))
    )  # fmt: skip


def pixel_width(layout: str, first: Array, *others: Array | None) -> int:
    """Elements per access: along the channels in NHWC, along an image's pixels in NCHW."""
    _, c, h, w = first.shape4
    return vector(c if layout == "nhwc" else h * w, first, *others)


def pack_count(x: Array, width: int) -> int:
    """Accesses of `width` elements in X. Raises ShapeError where they are more than a kernel's index counts."""
    packs = x.size // width
    if packs >= 2**31:
        raise ShapeError(f"an operand of shape {list(x.shape)} is too large; use a smaller batch")
    return packs


def _normalized_width(layout: str, arrays: tuple[Array | None, ...], channels: tuple[Array | None, ...]) -> int:
    """Elements per access of arrays like X, the first of them, where what there is per channel can be read so too."""
    first, *others = arrays
    assert first is not None
    width = pixel_width(layout, first, *others)
    return width if layout == "nchw" or all(a.aligned(4) for a in channels if a is not None) else 1


def _sums(
    on: Context, term: str, layout: str, arrays: tuple[Array | None, ...], sums: int
) -> tuple[Launcher, Array, int]:
    """Bind the first stage: (launch, where the parts lie, how many). `arrays`: the term's operands, tensor first."""
    x = arrays[0]
    assert x is not None
    n, c, h, w = x.shape4
    width = pixel_width(layout, x, *(a for a in arrays[1:] if a is not None and len(a.shape) > 1))
    name = f"{term}_sums_{layout}_{suffix(x.code, width)}"
    if layout == "nhwc":
        lanes = 1
        while lanes < min(c // width, 32):
            lanes *= 2
        rows, columns = n * h * w, blocks(c // width, lanes)
        count = max(1, min(blocks(rows, THREADS // lanes * FETCHES), PARTS // columns))
        parts = on.floats(count * sums * c)
        grid: Grid = (columns, count, 1)
        launch = on.bind("reduction", name, grid, (lanes, THREADS // lanes, 1), *arrays, parts, i64(rows), c)
    else:
        images = max(blocks(n, max(1, blocks(PARTS, c))), 1)
        packs = h * w // width
        while images > 1 and images * packs >= 2**31:
            images //= 2
        count = blocks(n, images)
        parts = on.floats(count * sums * c)
        launch = on.bind(
            "reduction", name, (c, count, 1), BLOCK, *arrays, parts, n, c, h * w, FastDiv(packs), images
        )  # fmt: skip
    return launch, parts, count


def _finish_grid(c: int) -> tuple[Grid, Grid]:
    return (blocks(c, 32), 1, 1), (32, 32, 1)


def bias_backward(on: Context, *, dy: Array, db: Array) -> Launcher:
    """db [C] = sum of dY over everything but axis 1."""
    layout = common_layout("bias_backward", dy)
    launch, parts, count = _sums(on, "bias", layout, (dy,), 1)
    c = dy.shape4[1]
    return sequence(launch, on.bind("reduction", "finish_bias", *_finish_grid(c), parts, count, c, db))


def _apply(layout: str, x: Array, width: int, packs_per_thread: int) -> tuple[Grid, object, Channels]:
    """Grid, number of packs and channel decoding of an element-wise kernel over X."""
    _, c, h, w = x.shape4
    packs = pack_count(x, width)
    inner = c // width if layout == "nhwc" else c
    channels = Channels(FastDiv(inner), FastDiv(max(1, h * w // width)))
    return (blocks(packs, packs_per_thread * THREADS), 1, 1), u32(packs), channels


def batch_norm_forward(
    on: Context, *, x: Array, y: Array, mean: Array, invstd: Array, w: Array | None = None, b: Array | None = None,
    running_mean: Array | None = None, running_var: Array | None = None, momentum: float, eps: float,
    relu: bool = False,
) -> Launcher:  # fmt: skip
    """Training: batch statistics to `mean` and `invstd` [C], running statistics updated, Y normalized."""
    layout = common_layout("batch_norm_forward", x, y)
    sums, parts, count = _sums(on, "statistics", layout, (x,), 2)
    n, c, h, pixels = x.shape4
    finish = on.bind(
        "reduction", f"finish_statistics_{x.code}", *_finish_grid(c), parts, count, c, x,
        i64(1 if layout == "nhwc" else h * pixels), i64(n * h * pixels), running_mean, running_var, mean, invstd,
        float(momentum), float(eps),
    )  # fmt: skip
    width = _normalized_width(layout, (x, y), (mean, invstd, w, b))
    grid, packs, channels = _apply(layout, x, width, FORWARD_PACKS)
    apply = on.bind(
        "norm", f"batch_norm_forward_{layout}_{suffix(x.code, width)}", grid, BLOCK,
        x, y, mean, invstd, w, b, packs, channels, -1.0, relu,
    )  # fmt: skip
    return sequence(sums, finish, apply)


def batch_norm_inference(
    on: Context, *, x: Array, running_mean: Array, running_var: Array, y: Array, w: Array | None = None,
    b: Array | None = None, eps: float, relu: bool = False,
) -> Launcher:  # fmt: skip
    """Y normalized by the running statistics."""
    layout = common_layout("batch_norm_inference", x, y)
    width = _normalized_width(layout, (x, y), (running_mean, running_var, w, b))
    grid, packs, channels = _apply(layout, x, width, FORWARD_PACKS)
    return on.bind(
        "norm", f"batch_norm_forward_{layout}_{suffix(x.code, width)}", grid, BLOCK,
        x, y, running_mean, running_var, w, b, packs, channels, float(eps), relu,
    )  # fmt: skip


def batch_norm_backward(
    on: Context, *, x: Array, dy: Array, mean: Array, invstd: Array, dx: Array | None = None,
    w: Array | None = None, y: Array | None = None, dw: Array | None = None, db: Array | None = None,
    relu: bool = False,
) -> Launcher:  # fmt: skip
    """dX, dW, db from dY, each only where it is given; with `relu` dY counts where Y > 0."""
    if relu and y is None:
        raise ShapeError("batch_norm_backward: relu needs Y")
    gate = y if relu else None
    layout = common_layout("batch_norm_backward", x, dy, dx, gate)
    sums, parts, count = _sums(on, "gradient", layout, (x, dy, gate, mean), 2)
    n, c, h, pixels = x.shape4
    means = on.floats(2 * c, offset=parts.size)
    finish = on.bind(
        "reduction", "finish_gradient", *_finish_grid(c), parts, count, c, i64(n * h * pixels), invstd, dw, db, means
    )
    if dx is None:
        return sequence(sums, finish)
    width = _normalized_width(layout, (x, dy, dx, gate), (mean, invstd, w, means))
    grid, packs, channels = _apply(layout, x, width, BACKWARD_PACKS)
    apply = on.bind(
        "norm", f"batch_norm_backward_{layout}_{suffix(x.code, width)}", grid, BLOCK,
        x, dy, gate, dx, mean, invstd, w, means, c, packs, channels,
    )  # fmt: skip
    return sequence(sums, finish, apply)


def _lrn(function: str, x: Array, layout: str, size: int, alpha: float, beta: float, k: float) -> tuple[Lrn, Grid]:
    n, c, h, w = x.shape4
    if not 1 <= size <= 33:
        raise ShapeError(f"{function}: size is {size}; on CUDA it must be 1 to 33 channels")
    return Lrn(c, h * w, size, alpha / size, beta, k), (blocks(h * w, 64), blocks(c, 32), min(n, 65535))


def _lrn5(layout: str, size: int, run: int, *arrays: Array) -> tuple[str, Grid, tuple[object, ...]] | None:
    """(variant, grid, how many there are of what) of the kernels for windows of 5; None where they do not fit.
    In NCHW a thread takes `run` channels of a pixel."""
    x = arrays[0]
    n, c, h, w = x.shape4
    if size != 5:
        return None
    if layout == "nchw":
        count = blocks(c, run) * h * w
        return f"nchw_{x.code}", image_grid(count, n), (n, u32(count), FastDiv(h * w))
    width = 16 // x.itemsize
    packs = x.size // width
    if c % width or packs >= 2**31 or not all(a.aligned(width) for a in arrays):
        return None
    return f"nhwc_{suffix(x.code, width)}", (blocks(packs), 1, 1), (u32(packs), FastDiv(c // width))


def local_response_norm_forward(
    on: Context, *, x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float
) -> Launcher:
    """Y = X * scale^-beta; scale (float32, saved) = k + alpha / size * sum of X^2 over `size` channels."""
    layout = common_layout("local_response_norm_forward", x, y, scale)
    geometry, grid = _lrn("local_response_norm_forward", x, layout, size, alpha, beta, k)
    usual = _lrn5(layout, size, LRN_RUN, x, y, scale)
    if usual:
        variant, grid, counts = usual
        return on.bind("lrn", f"lrn5_forward_{variant}", grid, BLOCK, x, y, scale, *counts, geometry)
    return on.bind("lrn", f"lrn_forward_{layout}_{x.code}", grid, BLOCK, x, y, scale, x.shape4[0], geometry)


def local_response_norm_backward(
    on: Context, *, x: Array, y: Array, scale: Array, dy: Array, dx: Array,
    size: int, alpha: float, beta: float, k: float,
) -> Launcher:  # fmt: skip
    """dX from dY and what forward saved."""
    layout = common_layout("local_response_norm_backward", x, y, scale, dy, dx)
    geometry, grid = _lrn("local_response_norm_backward", x, layout, size, alpha, beta, k)
    usual = _lrn5(layout, size, LRN_RUN_BACK, x, y, scale, dy, dx)
    if usual:
        variant, grid, counts = usual
        return on.bind("lrn", f"lrn5_backward_{variant}", grid, BLOCK, x, y, scale, dy, dx, *counts, geometry)
    return on.bind("lrn", f"lrn_backward_{layout}_{x.code}", grid, BLOCK, x, y, scale, dy, dx, x.shape4[0], geometry)
