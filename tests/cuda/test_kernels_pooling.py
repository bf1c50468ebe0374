"""Pooling kernels against the host's ops: windows of all shapes, layouts, types, NaN.

The kernels run emulated on the CPU in every test run, and on the GPU where there is one.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.errors import DeviceError, ShapeError
from minidnn.ops import pool_ops
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import FOLDER, Grid, Launcher, source
from tests.cuda.parity import BOTH, LAYOUTS, NO_PADDING, TOLERANCE, normal, parity
from tests.cuda.support import Place, tensor_of

WINDOWS = {  # (N, C, H, W), kernel, stride, padding, dilation, output
    "2x2": ((2, 16, 8, 12), (2, 2), (2, 2), NO_PADDING, (1, 1), (4, 6)),
    "2x2, pairs of 4": ((2, 3, 4, 16), (2, 2), (2, 2), NO_PADDING, (1, 1), (2, 8)),
    "2x2, odd": ((1, 5, 7, 9), (2, 2), (2, 2), NO_PADDING, (1, 1), (3, 4)),
    "2x2, ceil": ((1, 8, 7, 9), (2, 2), (2, 2), NO_PADDING, (1, 1), (4, 5)),
    "3x3 stride 2": ((2, 16, 9, 11), (3, 3), (2, 2), NO_PADDING, (1, 1), (4, 5)),
    "3x3 stride 2, padded": ((2, 8, 8, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (4, 4)),
    "3x3 stride 2, ceil": ((1, 16, 8, 8), (3, 3), (2, 2), NO_PADDING, (1, 1), (4, 4)),
    "3x3 stride 2, many planes": ((3, 15, 13, 13), (3, 3), (2, 2), NO_PADDING, (1, 1), (6, 6)),
    "3x3 stride 2, large": ((1, 8, 65, 64), (3, 3), (2, 2), NO_PADDING, (1, 1), (32, 31)),
    "3x3 stride 2, one plane a block": ((1, 5, 55, 55), (3, 3), (2, 2), NO_PADDING, (1, 1), (27, 27)),
    "3x3 stride 2, one plane": ((1, 1, 7, 6), (3, 3), (2, 2), NO_PADDING, (1, 1), (3, 2)),
    "3x3 stride 2, planes of two": ((3, 90, 1, 2), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1)),
    "3x3 stride 2, padded, many planes": ((3, 11, 14, 15), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (7, 8)),
    "3x3 stride 2, padded on one side": ((2, 17, 9, 10), (3, 3), (2, 2), ((1, 0), (0, 1)), (1, 1), (4, 5)),
    "3x3 stride 2, ceil, many planes": ((2, 9, 12, 11), (3, 3), (2, 2), NO_PADDING, (1, 1), (6, 5)),
    "3x3 stride 2, no plane fits": ((1, 2, 113, 112), (3, 3), (2, 2), NO_PADDING, (1, 1), (56, 55)),
    "2x2, odd, no plane fits": ((1, 1, 113, 113), (2, 2), (2, 2), NO_PADDING, (1, 1), (56, 56)),
    "2x2, odd, many planes": ((3, 13, 9, 11), (2, 2), (2, 2), NO_PADDING, (1, 1), (4, 5)),
    "2x2, padded to more windows": ((1, 2, 64, 64), (2, 2), (2, 2), ((1, 1), (1, 1)), (1, 1), (33, 33)),
    "3x3 stride 1": ((2, 8, 7, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (7, 6)),
    "3x3 stride 1, one row": ((2, 128, 1, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 5)),
    "3x3 stride 1, wide": ((2, 3, 18, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (18, 16)),
    "3x3 stride 1, unpadded": ((1, 16, 6, 7), (3, 3), (1, 1), NO_PADDING, (1, 1), (4, 5)),
    "3x2 stride 1": ((1, 8, 6, 5), (3, 2), (1, 1), ((1, 1), (1, 1)), (1, 1), (6, 6)),
    "dilated": ((1, 3, 9, 9), (2, 3), (2, 1), ((1, 1), (1, 1)), (3, 2), (4, 7)),
    "a row of windows holds padding only": ((1, 8, 2, 9), (2, 2), (2, 2), ((1, 1), (0, 0)), (3, 1), (1, 4)),
    "stride over window": ((1, 8, 9, 9), (2, 2), (3, 4), NO_PADDING, (1, 1), (3, 2)),
    "large, with an index": ((2, 40, 19, 20), (9, 11), (5, 9), ((4, 4), (5, 5)), (1, 1), (4, 3)),
    "large, every other row": ((1, 3, 24, 6), (11, 6), (2, 1), NO_PADDING, (2, 1), (2, 1)),
    "large, dilated": ((1, 3, 20, 20), (8, 8), (3, 1), ((2, 2), (3, 3)), (2, 2), (4, 12)),
}


@BOTH
@LAYOUTS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("relu", [False, True])
def test_max_pooling_and_its_gradient_are_the_hosts(
    place: Place, window: str, layout: str, dtype: str, relu: bool
) -> None:
    shape, kernel, stride, padding, dilation, out = WINDOWS[window]
    geometry: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    x = np.round(normal(shape), 1).astype(numpy_dtype(dtype))  # rounded, so that windows have equal maxima
    y_shape = (*shape[:2], *out)
    forward = parity(
        place, "max_pool2d_forward", {"x": x}, {"y": (y_shape, dtype), "index": (y_shape, "int8")}, layout, 0.0,
        relu=relu, **geometry,
    )  # fmt: skip
    dy = normal(y_shape, dtype, 1)
    saved = {"dy": dy, "index": forward["index"][0]}
    parity(place, "max_pool2d_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype], **geometry)
    if not relu:  # the paper's graph saves X and Y
        saved = {"dy": dy, "x": x, "y": forward["y"][0]}
        parity(place, "max_pool2d_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype], **geometry)


@LAYOUTS
@pytest.mark.parametrize("window", ["2x2", "3x3 stride 2, padded", "3x3 stride 2, many planes", "3x2 stride 1"])
def test_the_last_nan_of_a_window_is_its_maximum(place: Place, layout: str, window: str) -> None:
    shape, kernel, stride, padding, dilation, out = WINDOWS[window]
    x = normal(shape)
    x[np.random.default_rng(1).random(shape) < 0.2] = np.nan
    x[np.random.default_rng(2).random(shape) < 0.2] = -np.inf
    outputs = {"y": ((*shape[:2], *out), "float32"), "index": ((*shape[:2], *out), "int8")}
    geometry: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    parity(place, "max_pool2d_forward", {"x": x}, outputs, layout, 0.0, relu=True, **geometry)
    del outputs["index"]
    y = parity(place, "max_pool2d_forward", {"x": x}, outputs, layout, 0.0, **geometry)["y"][0]
    saved = {"dy": normal(y.shape), "x": x, "y": y}
    parity(place, "max_pool2d_backward", saved, {"dx": (shape, "float32")}, layout, 1e-6, **geometry)


def test_planes_of_a_block_fit_its_shared_memory() -> None:
    text = (FOLDER / "pooling_planes.cu").read_text()
    assert re.findall(r"#define PLANES_BYTES (\d+)", text) == [str(pool_ops.PLANES_BYTES)]
    for item, height, wider, count in product((2, 4), range(1, 120), (0, 1), (1, 100, 65536)):
        area, windows = height * (height + wider), (height // 2 + 1) ** 2
        sizes = [area * item, windows * item, windows]
        planes = pool_ops._planes_per_block(count, sum(sizes), windows)
        words = sum((planes * size + 30) // 16 for size in sizes)  # each begins and ends inside a word
        assert planes <= count
        assert words * 16 <= pool_ops.PLANES_BYTES
        assert planes or sum(sizes) > pool_ops.PLANES_BYTES - 96


def test_a_kernel_file_that_is_missing_is_not_passed_over() -> None:
    with pytest.raises(FileNotFoundError, match="poolling"):
        source("poolling")


class Names:
    """A library that only writes down what is launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def bind(self, module: str, name: str, grid: Grid, block: Grid, stream: int, *arguments: Any) -> Launcher:
        self.names.append(name)
        return lambda: None


def whole_planes(shape: tuple[int, int, int, int], again: bool = False, moved: str | None = None) -> bool:
    """Whether backward takes planes whole, where one of the arrays begins 8 bytes behind a word."""
    n, c, h, w = shape
    out = (n, c, (h - 1) // 2, (w - 1) // 2)
    needed = ("dy", "dx", *(("x", "y") if again else ("index",)))
    arrays: dict[str, Any] = {
        name: Array.of(tensor_of(size, dtype, "NCHW"), 4096 + 8 * (name == moved))
        for name, size, dtype in (("index", out, "int8"), ("x", shape, "float32"), ("y", out, "float32"),
                                  ("dy", out, "float32"), ("dx", shape, "float32"))
        if name in needed
    }  # fmt: skip
    library = Names()
    geometry: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": NO_PADDING, "dilation": (1, 1)}
    pool_ops.max_pool2d_backward(Context(library, 0, (0, 0)), **arrays, **geometry)
    return "planes" in library.names[0]


@pytest.mark.parametrize("moved", [None, "x", "dy", "index", "dx"])
@pytest.mark.parametrize("again", [False, True])
def test_planes_are_not_taken_whole_where_an_array_begins_inside_a_word(moved: str | None, again: bool) -> None:
    needed = ("dy", "dx", "x" if again else "index")
    assert whole_planes((2, 3, 13, 13), again, moved) is (moved not in needed)


def test_planes_are_not_taken_whole_where_one_does_not_fit_with_its_gradient_and_index() -> None:
    assert whole_planes((2, 3, 68, 69))
    assert not whole_planes((2, 3, 70, 70))


LARGE = {  # what no index of one byte tells
    "whole image": ((2, 5, 24, 23), (24, 23), (24, 23), NO_PADDING, (1, 1), (1, 1)),
    "overlapping": ((1, 8, 20, 21), (12, 13), (4, 3), ((1, 1), (2, 2)), (1, 1), (3, 5)),
    "dilated": ((1, 3, 40, 41), (12, 12), (5, 4), NO_PADDING, (3, 2), (2, 5)),
    "side by side": ((2, 40, 26, 38), (12, 12), (12, 12), NO_PADDING, (1, 1), (2, 3)),
    "apart": ((1, 16, 27, 31), (12, 11), (14, 13), ((5, 5), (3, 3)), (1, 1), (2, 3)),
    "ceil": ((1, 8, 25, 30), (12, 12), (12, 13), NO_PADDING, (1, 1), (3, 3)),
    "all warps": ((2, 40, 40, 44), (36, 35), (36, 35), ((3, 3), (2, 2)), (1, 1), (1, 1)),
    "all warps, side by side": ((2, 5, 66, 71), (33, 32), (33, 32), NO_PADDING, (1, 1), (2, 2)),
    "all warps, dilated": ((1, 8, 71, 41), (33, 32), (3, 5), ((4, 4), (15, 15)), (2, 1), (5, 8)),
    "columns": ((1, 4, 30, 4), (30, 3), (30, 3), NO_PADDING, (1, 1), (1, 1)),
}


@BOTH
@LAYOUTS
@pytest.mark.parametrize("window", LARGE)
@pytest.mark.parametrize("values", ["few", "half zero", "NaN"])
def test_windows_too_large_for_an_index_are_searched_again(
    place: Place, window: str, layout: str, dtype: str, values: str
) -> None:
    shape, kernel, stride, padding, dilation, out = LARGE[window]
    geometry: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    x = np.round(normal(shape)).astype(numpy_dtype(dtype)) if values == "few" else normal(shape, dtype)
    if values == "half zero":
        x = np.minimum(x, 0).astype(x.dtype)  # the maximum is a zero in every window
    if values == "NaN":
        x[np.random.default_rng(1).random(shape) < 0.01] = np.nan
    y_shape = (*shape[:2], *out)
    y = parity(place, "max_pool2d_forward", {"x": x}, {"y": (y_shape, dtype)}, layout, 0.0, **geometry)["y"][0]
    saved = {"dy": normal(y_shape, dtype, 1), "x": x, "y": y}
    dx = parity(place, "max_pool2d_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype], **geometry)
    assert 0 < np.count_nonzero(dx["dx"][0]) <= np.prod(y_shape)


@pytest.mark.parametrize("kernel", [(2, 2), (2, 2**30)])
def test_an_image_of_too_many_values_is_refused(kernel: tuple[int, int]) -> None:
    on = Context(Names(), 0, (0, 0))
    geometry: dict[str, Any] = {"kernel": kernel, "stride": kernel, "padding": NO_PADDING, "dilation": (1, 1)}
    x = Array.of(tensor_of((1, 1, 2, 2**30 - 2**13), "bfloat16", "NCHW"), 4096)
    y = Array.of(tensor_of((1, 1, 1, max(2**30 // kernel[1], 1)), "bfloat16", "NCHW"), 4096)
    with pytest.raises(DeviceError, match="has 2147467264 values; max-pooling on the GPU takes at most 2147450880"):
        pool_ops.max_pool2d_forward(on, x=x, y=y, **geometry)
    with pytest.raises(DeviceError, match="an image has 2147467264 values"):
        pool_ops.max_pool2d_backward(on, dy=y, x=x, y=y, dx=x, **geometry)


def test_a_window_too_large_for_an_index_is_refused(place: Place) -> None:
    x, y = place.empty((1, 1, 12, 12), "float32"), place.empty((1, 1, 1, 1), "float32")
    index = place.empty((1, 1, 1, 1), "int8")
    with pytest.raises(ShapeError, match=r"kernel is \(12, 12\).*at most 127"):
        pool_ops.max_pool2d_forward(
            place.context, x=x, y=y, index=index, kernel=(12, 12), stride=(1, 1), padding=NO_PADDING, dilation=(1, 1)
        )


@BOTH
@LAYOUTS
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("window", [w for w, form in WINDOWS.items() if form[4] == (1, 1)] + ["whole image"])
def test_average_pooling_and_its_gradient_are_the_hosts(
    place: Place, window: str, layout: str, dtype: str, include_pad: bool
) -> None:
    if window == "whole image":
        shape, kernel, stride, padding, out = (2, 8, 9, 7), (9, 7), (9, 7), NO_PADDING, (1, 1)
    else:
        shape, kernel, stride, padding, _, out = WINDOWS[window]
    geometry: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
    geometry["count_include_pad"] = include_pad
    y_shape, tolerance = (*shape[:2], *out), TOLERANCE[dtype]
    x = {"x": normal(shape, dtype)}
    parity(place, "avg_pool2d_forward", x, {"y": (y_shape, dtype)}, layout, tolerance, **geometry)
    gradient = {"dy": normal(y_shape, dtype), "mask": normal(shape, dtype, 3)}
    parity(place, "avg_pool2d_backward", gradient, {"dx": (shape, dtype)}, layout, tolerance, **geometry)
    del gradient["mask"]
    parity(place, "avg_pool2d_backward", gradient, {"dx": (shape, dtype)}, layout, tolerance, **geometry)


@BOTH
@LAYOUTS
@pytest.mark.parametrize(
    "sizes", [((7, 7), (1, 1)), ((9, 10), (7, 7)), ((3, 5), (7, 6)), ((14, 13), (6, 6)), ((40, 41), (2, 1))]
)
def test_adaptive_average_pooling_is_the_hosts(
    place: Place, sizes: tuple[tuple[int, int], tuple[int, int]], layout: str, dtype: str
) -> None:
    x_shape, y_shape = (2, 8, *sizes[0]), (2, 8, *sizes[1])
    outputs = {"y": (y_shape, dtype)}
    parity(place, "adaptive_avg_pool2d_forward", {"x": normal(x_shape, dtype)}, outputs, layout, TOLERANCE[dtype])
    gradient = {"dy": normal(y_shape, dtype), "mask": normal(x_shape, dtype, 3)}
    parity(place, "adaptive_avg_pool2d_backward", gradient, {"dx": (x_shape, dtype)}, layout, TOLERANCE[dtype])
