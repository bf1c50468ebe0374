"""Element-wise ops, layout, dropout, softmax, losses and updates on CUDA.

Every function binds one op: same names and arguments as in `numpy_ops`, and it returns the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from dataclasses import replace
from math import floor

from minidnn.errors import ShapeError
from minidnn.ops.array import Array, common_layout, suffix, vector
from minidnn.ops.context import Context
from minidnn.ops.kernels import BLOCK, THREADS, FastDiv, Grid, Launcher, Split, blocks, i64, image_grid, sequence, u32
from minidnn.ops.norm_ops import pack_count, pixel_width

# -- element-wise ------------------------------------------------------------------------------------------------------


def _map(on: Context, function: str, name: str, arrays: tuple[Array, ...], slope: float = 0.0) -> Launcher:
    """An element-wise kernel over arrays of one layout; the last one is the output."""
    common_layout(function, *arrays)
    x = arrays[0]
    width = 16 // x.itemsize if all(a.aligned(16 // x.itemsize) for a in arrays) else 1
    grid = (blocks(blocks(x.size, width)), 1, 1)
    return on.bind("elementwise", f"{name}_{suffix(x.code, width)}", grid, BLOCK, *arrays, i64(x.size), float(slope))


def relu_backward(on: Context, *, y: Array, dy: Array, dx: Array) -> Launcher:
    """dX = dY where Y > 0 (or NaN), else 0; dX may be dY."""
    return _map(on, "relu_backward", "relu_backward", (y, dy, dx))


def activation_forward(on: Context, *, x: Array, y: Array, function: str, negative_slope: float = 0.0) -> Launcher:
    """Y = function(X)."""
    return _map(on, "activation_forward", f"{function}_forward", (x, y), negative_slope)


def activation_backward(
    on: Context, *, saved: Array, dy: Array, dx: Array, function: str, negative_slope: float = 0.0
) -> Launcher:
    """dX = dY * function'; dX may be dY."""
    return _map(on, "activation_backward", f"{function}_backward", (saved, dy, dx), negative_slope)


def add(on: Context, *, a: Array, b: Array, y: Array) -> Launcher:
    """Y = A + B."""
    return _map(on, "add", "add", (a, b, y))


def bias_relu(on: Context, *, y: Array, b: Array, relu: bool) -> Launcher:
    """Y += b over axis 1, then ReLU, in place."""
    layout = common_layout("bias_relu", y)
    _, c, h, w = y.shape4
    width = pixel_width(layout, y)
    packs = pack_count(y, width)
    channels = FastDiv(c // width if layout == "nhwc" else c)
    return on.bind(
        "elementwise", f"bias_relu_{layout}_{suffix(y.code, width)}", (blocks(packs), 1, 1), BLOCK,
        y, b, u32(packs), channels, FastDiv(max(1, h * w // width)), relu,
    )  # fmt: skip


# -- layout and type ---------------------------------------------------------------------------------------------------


class Copy(ctypes.Structure):
    """Strides of both sides, as in layout.cu."""

    _fields_ = (
        ("x_outer", c_int64), ("y_outer", c_int64), *((name, c_int32) for name in ("x0", "x1", "x2", "y0", "y1", "y2"))
    )  # fmt: skip


def layout(on: Context, *, x: Array, y: Array) -> Launcher:
    """Y = X, whatever the layouts and types of the two."""
    both = f"{x.code}_{y.code}"
    n, c, h, w = x.shape4
    if x.layouts & y.layouts:
        return _same_layout(on, x, y)
    if c == 3 and x.dtype == "float32" and "nchw" in x.layouts and "nhwc" in y.layouts:  # a batch of images
        width = 16 // y.itemsize
        width = width if h * w % width == 0 and x.aligned(4) and y.aligned(width) else 1
        name = f"interleave_{x.code}_{suffix(y.code, width)}"
        return on.bind("layout", name, image_grid(h * w // width, n), BLOCK, x, y, n, u32(h * w))
    if min(c, h * w) >= 16:
        a, b = (c, h * w) if "nchw" in x.layouts else (h * w, c)
        grid = (blocks(b, 64), blocks(a, 64), min(n, 65535))
        if grid[1] <= 65535:
            loaded = 2 if b % 2 == 0 and x.aligned(2) else 1
            stored = 2 if y.itemsize == 2 and a % 2 == 0 and y.aligned(2) else 1  # never more than 4 bytes
            name = f"transpose_{suffix(x.code, loaded)}_{suffix(y.code, stored)}"
            return on.bind("layout", name, grid, BLOCK, x, y, n, a, b)
    order = sorted((1, 2, 3), key=lambda axis: (y.strides4[axis], -axis))
    sizes = [x.shape4[axis] for axis in order]
    strides = Copy(
        x.strides4[0], y.strides4[0], *(x.strides4[axis] for axis in order), *(y.strides4[axis] for axis in order)
    )
    count = c * h * w
    return on.bind(
        "layout", f"strided_copy_{both}", image_grid(count, n, 4 * THREADS), BLOCK,
        x, y, n, strides, Split(sizes[0], sizes[1]), u32(count),
    )  # fmt: skip


def _same_layout(on: Context, x: Array, y: Array) -> Launcher:
    if x.dtype == y.dtype and x.nbytes % 16 == x.address % 16 == y.address % 16 == 0:
        count = x.nbytes // 16
        return on.bind("layout", "copy", (blocks(count, 4 * THREADS), 1, 1), BLOCK, x, y, i64(count))
    if x.dtype == y.dtype:
        ones = Copy(0, 0, 1, 0, 0, 1, 0, 0)
        return on.bind(
            "layout", f"strided_copy_{x.code}_{y.code}", image_grid(x.size, 1, 4 * THREADS), BLOCK,
            x, y, 1, ones, Split(x.size, 1), u32(x.size),
        )  # fmt: skip
    width = 8 if x.aligned(8) and y.aligned(8) else 1
    return on.bind(
        "elementwise", f"cast_{x.code}_{suffix(y.code, width)}", (blocks(blocks(x.size, width)), 1, 1), BLOCK,
        x, y, i64(x.size), 0.0,
    )  # fmt: skip


cast = layout


# -- dropout -----------------------------------------------------------------------------------------------------------


def _dropout(on: Context, x: Array, y: Array, scalars: Array, p: float, op: int) -> Launcher:
    memory = common_layout("dropout", x, y)
    n, c, h, w = x.shape4
    threshold, scale = u32(floor(p * 2**32)), 1.0 / (1.0 - p)
    if "nchw" in x.layouts and "nchw" in y.layouts:  # memory order is logical order
        width = 16 // x.itemsize
        if not (x.aligned(width) and y.aligned(width)):
            raise ShapeError("dropout: operands must lie at multiples of 16 bytes")
        return on.bind(
            "dropout", f"dropout_{suffix(x.code, width)}", (blocks(blocks(x.size, width)), 1, 1), BLOCK,
            x, y, scalars, i64(x.size), threshold, scale, u32(op),
        )  # fmt: skip
    assert memory == "nhwc"
    grouped = h * w % 4 == 0 and c % 4 == 0 and x.aligned(4) and y.aligned(4)
    width, group = (4, 4) if grouped else (1, 1)
    count = c // width * (h * w // group)
    return on.bind(
        "dropout", f"dropout_nhwc_{suffix(x.code, width)}{'_g4' if grouped else ''}", image_grid(count, n), BLOCK,
        x, y, scalars, n, c, h * w, FastDiv(c // width), u32(count), threshold, scale, u32(op),
    )  # fmt: skip


def dropout_forward(on: Context, *, x: Array, y: Array, scalars: Array, p: float, op: int) -> Launcher:
    """Y = X * keep / (1 - p); Y may be X."""
    return _dropout(on, x, y, scalars, p, op)


def dropout_backward(on: Context, *, dy: Array, dx: Array, scalars: Array, p: float, op: int) -> Launcher:
    """dX = dY * the same keep / (1 - p); dX may be dY."""
    return _dropout(on, dy, dx, scalars, p, op)


# -- softmax and losses ------------------------------------------------------------------------------------------------


class Rows(ctypes.Structure):
    """Where the rows of a softmax lie, as in softmax.cu."""

    _fields_ = (
        ("outer_step", c_int64), ("step", c_int64), ("inner_step", c_int64), ("inner", c_int32), ("C", c_int32)
    )  # fmt: skip


def _rows(x: Array) -> tuple[Rows, int]:
    n, c, h, w = x.shape4
    inner_step = 1 if "nchw" in x.layouts else c
    return Rows(x.strides4[0], x.strides4[1], inner_step, h * w, c), n * h * w


MANY_ROWS = 4096
"""From so many rows on a warp takes one, where its lanes can hold it; fewer leave most of the card idle so."""
LANE = 32
"""Values that a lane holds, as in softmax.cu."""
ROW_BLOCKS = 8192
"""Blocks that share many rows: starting a block for each costs more than a row."""


FINISHERS: Grid = (1024, 1, 1)
"""The block that adds up a loss, as in softmax.cu."""


def _row_width(rows: Rows, *arrays: Array) -> int:
    """Elements per access of rows: more than one where their values lie one behind the other."""
    return vector(rows.C, *arrays) if rows.step == 1 else 1


def _softmax_rows(
    on: Context, x: Array, y: Array, labels: Array | None, class_weight: Array | None, label_smoothing: float
) -> tuple[Launcher, Array | None, int]:
    """Bind the kernel that takes rows side by side: (launch, where the blocks leave losses and hits, blocks)."""
    rows, count = _rows(x)
    if count >= MANY_ROWS and rows.C <= 32 * LANE:
        parts, name = blocks(count, THREADS // 32), f"softmax_warp_{suffix(x.code, _row_width(rows, x, y))}"
    else:
        parts, name = count, f"softmax_row_{x.code}"
    losses = on.floats(2 * parts) if labels else None
    launch = on.bind(
        "softmax", name, (parts, 1, 1), BLOCK, x, y, labels, class_weight, losses, count, rows, label_smoothing
    )
    return launch, losses, parts


def softmax_forward(on: Context, *, x: Array, y: Array) -> Launcher:
    """Y = softmax of X over axis 1."""
    common_layout("softmax_forward", x, y)
    rows, count = _rows(x)
    if rows.inner > 1:
        return on.bind("softmax", f"softmax_thread_{x.code}", (blocks(count), 1, 1), BLOCK, x, y, i64(count), rows)
    return _softmax_rows(on, x, y, None, None, 0.0)[0]


def softmax_backward(on: Context, *, y: Array, dy: Array, dx: Array) -> Launcher:
    """dX = Y * (dY - sum over axis 1 of Y * dY)."""
    common_layout("softmax_backward", y, dy, dx)
    rows, count = _rows(y)
    grid = (min(count, ROW_BLOCKS), 1, 1)
    return on.bind("softmax", f"softmax_row_backward_{y.code}", grid, BLOCK, y, dy, dx, i64(count), rows)


def _flat(x: Array) -> Array:
    """[N,classes], of the view of images that Flatten lets through."""
    classes = x.size // x.shape[0]
    if len(x.shape) > 2 and classes > x.shape[1] and "nchw" not in x.layouts:
        raise ShapeError(f"cross-entropy: logits {list(x.shape)} lie channels-last; they must lie as [N, {classes}]")
    return replace(x, shape=(x.shape[0], classes), strides=(classes, 1))


def cross_entropy_forward(
    on: Context, *, x: Array, labels: Array, y: Array, loss: Array, scalars: Array,
    class_weight: Array | None = None, label_smoothing: float = 0.0,
) -> Launcher:  # fmt: skip
    """Y = softmax(X) (Y may be X); loss[0] = weighted sum of losses * inverse_weight, loss[1] = correct predictions."""
    x, y = _flat(x), _flat(y)
    row, losses, parts = _softmax_rows(on, x, y, labels, class_weight, float(label_smoothing))
    corrects = on.floats(parts, offset=parts)
    finish = on.bind("softmax", "finish_loss", (1, 1, 1), FINISHERS, losses, corrects, parts, loss, scalars)
    return sequence(row, finish)


def cross_entropy_backward(
    on: Context, *, y: Array, labels: Array, dx: Array, scalars: Array, class_weight: Array | None = None,
    label_smoothing: float = 0.0,
) -> Launcher:  # fmt: skip
    """dX of the mean loss, from Y = softmax(X)."""
    y, dx = _flat(y), _flat(dx)
    rows, count = _rows(y)
    block: Grid = (32, THREADS // 32, 1) if count >= MANY_ROWS else BLOCK
    grid = (min(blocks(count, block[1]), ROW_BLOCKS), 1, 1)
    return on.bind(
        "softmax", f"cross_entropy_backward_{suffix(y.code, _row_width(rows, y, dx))}", grid, block,
        y, labels, dx, scalars, class_weight, count, rows, float(label_smoothing),
    )  # fmt: skip


def mse_forward(on: Context, *, x: Array, target: Array, loss: Array, scalars: Array) -> Launcher:
    """loss[0] = sum of (X - target)^2 * inverse_weight; loss[1] = 0."""
    common_layout("mse_forward", x, target)
    count = min(blocks(x.size), 1024)
    parts = on.floats(count)
    sums = on.bind("elementwise", f"mse_forward_{x.code}", (count, 1, 1), BLOCK, x, target, parts, i64(x.size))
    return sequence(sums, on.bind("softmax", "finish_loss", (1, 1, 1), FINISHERS, parts, None, count, loss, scalars))


def mse_backward(on: Context, *, x: Array, target: Array, dx: Array, scalars: Array) -> Launcher:
    """dX = 2 * (X - target) * inverse_weight."""
    common_layout("mse_backward", x, target, dx)
    grid = (blocks(x.size), 1, 1)
    return on.bind("elementwise", f"mse_backward_{x.code}", grid, BLOCK, x, target, dx, scalars, i64(x.size))


# -- updates -----------------------------------------------------------------------------------------------------------

PARAMETERS = 80
"""Parameters per launch, as in optimizer.cu."""
CHUNK = THREADS * 16
"""Elements per block, as in optimizer.cu."""


class Parameter(ctypes.Structure):
    """One parameter's arrays, as in optimizer.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("w", "dw", "m", "v", "copy")), ("count", c_uint32), ("first_block", c_uint32)
    )  # fmt: skip


class Parameters(ctypes.Structure):
    """The list that a launch takes, as in optimizer.cu."""

    _fields_ = (("list", Parameter * PARAMETERS), ("length", c_int32))


def _lists(function: str, **arrays: Sequence[Array] | None) -> list[tuple[Parameters, int]]:
    """(list, blocks) of each launch. Lists may be shorter than the longest: those that remain have no such array."""
    given = {name: list(values) for name, values in arrays.items() if values}
    launches = []
    length = max(len(values) for values in given.values())
    for first in range(0, length, PARAMETERS):
        table, block = Parameters(), 0
        for i in range(first, min(first + PARAMETERS, length)):
            row = {name: values[i] for name, values in given.items() if i < len(values)}
            common_layout(function, *row.values())
            size = next(iter(row.values())).size
            if size >= 2**32 - CHUNK:
                raise ShapeError(f"{function}: a parameter has {size} values; there must be at most {2**32 - CHUNK}")
            table.list[i - first] = Parameter(
                **{name: array.address for name, array in row.items()}, count=size, first_block=block
            )
            block += blocks(size, CHUNK)
        table.length = min(length - first, PARAMETERS)
        launches.append((table, block))
    return launches


def sgd_update(
    on: Context, *, w: Sequence[Array], dw: Sequence[Array], scalars: Array, momentum: Sequence[Array] | None = None,
    copy: Sequence[Array] | None = None, clip: Array | None = None, momentum_factor: float = 0.0,
    dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, maximize: bool = False,
) -> Launcher:  # fmt: skip
    """SGD over lists of parameters; copy[i] is the bf16 copy of w[i] and is refreshed."""
    launches = _lists("sgd_update", w=w, dw=dw, m=momentum, copy=copy)
    return sequence(*(
        on.bind(
            "optimizer", "sgd_update", (count, 1, 1), BLOCK, table, scalars, clip, float(momentum_factor),
            1.0 - dampening, float(weight_decay), nesterov, maximize,
        )
        for table, count in launches
    ))  # fmt: skip


def adam_update(
    on: Context, *, w: Sequence[Array], dw: Sequence[Array], m: Sequence[Array], v: Sequence[Array], scalars: Array,
    copy: Sequence[Array] | None = None, clip: Array | None = None, beta1: float, beta2: float, eps: float,
    weight_decay: float = 0.0, decoupled: bool = False,
) -> Launcher:  # fmt: skip
    """Adam, or AdamW with `decoupled`, over lists of parameters."""
    launches = _lists("adam_update", w=w, dw=dw, m=m, v=v, copy=copy)
    return sequence(*(
        on.bind(
            "optimizer", "adam_update", (count, 1, 1), BLOCK, table, scalars, clip, float(beta2), 1.0 - beta1,
            1.0 - beta2, float(eps), float(weight_decay), decoupled,
        )
        for table, count in launches
    ))  # fmt: skip


def accumulate(on: Context, *, source: Sequence[Array], total: Sequence[Array]) -> Launcher:
    """total[i] += source[i]."""
    launches = _lists("accumulate", w=total, dw=source)
    return sequence(*(on.bind("optimizer", "accumulate", (count, 1, 1), BLOCK, table) for table, count in launches))


def clip_factor(on: Context, *, dw: Sequence[Array], clip: Array, max_norm: float) -> Launcher:
    """clip[0] = min(1, max_norm / (global norm of all dW + 1e-6))."""
    steps, first = [], 0
    for table, count in _lists("clip_factor", dw=dw):
        parts = on.floats(count, offset=first)
        steps.append(on.bind("optimizer", "square_sums", (count, 1, 1), BLOCK, table, parts))
        first += count
    parts = on.floats(first)
    return sequence(
        *steps, on.bind("optimizer", "clip_factor", (1, 1, 1), (1024, 1, 1), parts, first, clip, float(max_norm))
    )
