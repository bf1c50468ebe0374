"""Convolutions on the host agree with PyTorch, and give the same bits with every algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError, ShapeError
from minidnn.ops import host_conv
from minidnn.ops.numpy_ops import ALGORITHMS, workspace_bytes
from tests.host.ops_support import Array, Maker, assert_close, bits, dtypes, layouts, run, seeds, sums, tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One convolution."""

    batch: int
    groups: int
    channels: int  # per group
    filters: int  # per group
    image: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.batch, self.groups * self.channels, *self.image)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.groups * self.filters, self.channels, *self.kernel)

    @property
    def y_shape(self) -> tuple[int, ...]:
        sizes = [
            (self.image[i] + sum(self.padding[i]) - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        ]
        return (self.batch, self.groups * self.filters, *sizes)

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups,
        }  # fmt: skip

    def workspace(self, function: str, algorithm: str, dtype: str) -> Array:
        """A workspace of exactly the size that the op asks for."""
        nbytes = workspace_bytes(
            function, algorithm, x_shape=self.x_shape, w_shape=self.w_shape, y_shape=self.y_shape,
            itemsize=8 if dtype == "float64" else 4, **self.attributes,
        )  # fmt: skip
        return np.full(nbytes, 0xFF, np.uint8)

    def convolve(self, x: Any, w: Any, b: Any) -> Any:
        """PyTorch's result."""
        (top, bottom), (left, right) = self.padding
        padded = F.pad(x, (left, right, top, bottom))
        return F.conv2d(padded, w, b, self.stride, 0, self.dilation, self.groups)


def run_conv(function: str, case: Case, dtype: str, algorithm: str, **arguments: Any) -> None:
    workspace = case.workspace(function, algorithm, dtype)
    run(function, algorithm=algorithm, workspace=workspace, **arguments, **case.attributes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    small, few = st.integers(1, 3), st.integers(1, 4)
    kernel, dilation = (draw(few), draw(few)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    pads = st.tuples(st.integers(0, 3), st.integers(0, 3))
    padding = (draw(pads), draw(pads))
    need = [max(1, dilation[i] * (kernel[i] - 1) + 1 - sum(padding[i])) for i in range(2)]
    image = (need[0] + draw(st.integers(0, 9)), need[1] + draw(st.integers(0, 9)))
    return Case(
        draw(small), draw(few), draw(few), draw(few), image, kernel, (draw(small), draw(small)), padding, dilation
    )


@given(case=cases(), dtype=dtypes, layout=layouts, bias=st.booleans(), relu=st.booleans(),
       band=st.sampled_from([5, 1024]), seed=seeds)  # fmt: skip
def test_convolution_and_its_gradients_agree_with_torch(
    case: Case, dtype: str, layout: str, bias: bool, relu: bool, band: int, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x, w, dy = make.normal(*case.x_shape), make.normal(*case.w_shape), make.normal(*case.y_shape)
    b = make.normal(case.y_shape[1], dtype=make.stored) if bias else None
    mask = np.maximum(make.normal(*case.x_shape), 0) if relu else None
    expected, terms = sums(case.convolve, x, w, b, dy)
    with mock.patch.object(host_conv, "BAND_PIXELS", band):
        results = []
        for algorithm in ALGORITHMS["conv2d_forward"]:
            y, dx = make.blank(case.y_shape), make.blank(case.x_shape)
            dw = make.blank(case.w_shape, make.stored)
            optional = {} if b is None else {"b": b}
            run_conv("conv2d_forward", case, dtype, algorithm, x=x, w=w, y=y, relu=relu, **optional)
            optional = {} if mask is None else {"mask": mask}
            run_conv("conv2d_backward_data", case, dtype, algorithm, dy=dy, w=w, dx=dx, **optional)
            run_conv("conv2d_backward_filter", case, dtype, algorithm, x=x, dy=dy, dw=dw)
            results.append((bits(y), bits(dx), bits(dw)))
    assert_close(y, expected.y.relu() if relu else expected.y, dtype, terms.y)
    assert_close(dx, expected.dx if mask is None else expected.dx * (tensor(mask) > 0), dtype, terms.dx)
    assert_close(dw, expected.dw, make.stored, terms.dw)
    assert results[0] == results[1]  # where the columns lie does not change a bit


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 3, 64, (67, 67), (11, 11), (4, 4)),
        Case(2, 1, 16, 24, (56, 57), (3, 3), padding=((1, 1), (1, 1))),
        Case(1, 1, 32, 16, (40, 40), (1, 1)),
        Case(2, 1, 8, 8, (41, 40), (1, 1), (2, 2)),
        Case(2, 40, 1, 1, (40, 41), (3, 3), padding=((1, 1), (1, 1))),
        Case(1, 4, 6, 10, (40, 40), (5, 5), padding=((2, 2), (2, 2))),
    ],
    ids=["alexnet", "vgg", "pointwise", "strided pointwise", "depthwise", "grouped"],
)
def test_layers_of_real_networks_agree_with_torch(case: Case, layout: str) -> None:
    make = Maker("float32", layout)
    x, w, dy = make.normal(*case.x_shape), make.normal(*case.w_shape), make.normal(*case.y_shape)
    y, dx, dw = make.blank(case.y_shape), make.blank(case.x_shape), make.blank(case.w_shape)
    run_conv("conv2d_forward", case, "float32", "gemm", x=x, w=w, y=y, relu=False)
    run_conv("conv2d_backward_data", case, "float32", "gemm", dy=dy, w=w, dx=dx)
    run_conv("conv2d_backward_filter", case, "float32", "gemm", x=x, dy=dy, dw=dw)
    expected, _ = sums(case.convolve, x, w, None, dy)
    assert_close(y, expected.y, "float32")
    assert_close(dx, expected.dx, "float32")
    assert_close(dw, expected.dw, "float32")


@given(case=cases(), layout=layouts, seed=seeds)
def test_nan_reaches_what_it_reaches_in_torch(case: Case, layout: str, seed: int) -> None:
    make = Maker("float64", layout, seed)
    x, w, dy = make.normal(*case.x_shape), make.normal(*case.w_shape), make.normal(*case.y_shape)
    for array in (x, dy):
        array[tuple(make.rng.integers(0, array.shape))] = np.nan
    y, dx, dw = make.blank(case.y_shape), make.blank(case.x_shape), make.blank(case.w_shape)
    run_conv("conv2d_forward", case, "float64", "implicit", x=x, w=w, y=y, relu=True)
    run_conv("conv2d_backward_data", case, "float64", "implicit", dy=dy, w=w, dx=dx)
    run_conv("conv2d_backward_filter", case, "float64", "implicit", x=x, dy=dy, dw=dw)
    expected, _ = sums(case.convolve, x, w, None, dy)
    assert_close(y, expected.y.relu(), "float64")
    assert_close(dx, expected.dx, "float64")
    assert_close(dw, expected.dw, "float64")


@pytest.mark.parametrize("case", [Case(2, 1, 5, 7, (34, 35), (3, 3), padding=((1, 1), (1, 1))),
                                  Case(2, 6, 1, 1, (34, 35), (3, 3)), Case(1, 2, 33, 65, (34, 35), (1, 1))],
                         ids=["dense", "depthwise", "pointwise"])  # fmt: skip
def test_bits_do_not_depend_on_where_the_arrays_lie(case: Case) -> None:
    make = Maker("float32", "NCHW")
    values = make.normal(*case.x_shape), make.normal(*case.w_shape), make.normal(*case.y_shape)
    results = set()
    for shift in (0, 1, 2, 3, 5, 8, 13):  # in elements, from what the allocator aligned

        def moved(source: Array, shift: int = shift) -> Array:
            arena = np.full(source.size + shift, np.nan, np.float32)
            arena[shift:] = source.reshape(-1)
            return arena[shift:].reshape(source.shape)

        x, w, dy = (moved(v) for v in values)
        y, dx, dw = moved(np.full_like(dy, np.nan)), moved(np.full_like(x, np.nan)), moved(np.full_like(w, np.nan))
        run_conv("conv2d_forward", case, "float32", "implicit", x=x, w=w, y=y, relu=True)
        run_conv("conv2d_backward_data", case, "float32", "implicit", dy=dy, w=w, dx=dx)
        run_conv("conv2d_backward_filter", case, "float32", "implicit", x=x, dy=dy, dw=dw)
        results.add((bits(y), bits(dx), bits(dw)))
    assert len(results) == 1


def test_an_images_bits_do_not_depend_on_its_batch() -> None:
    case = Case(3, 1, 4, 6, (34, 33), (3, 3), (2, 1))
    make = Maker("float32", "NCHW")
    x, w, y, one = make.normal(*case.x_shape), make.normal(*case.w_shape), make.blank(case.y_shape), Case(
        1, 1, 4, 6, (34, 33), (3, 3), (2, 1)
    )
    run_conv("conv2d_forward", case, "float32", "gemm", x=x, w=w, y=y, relu=False)
    alone = make.blank(one.y_shape)
    run_conv("conv2d_forward", one, "float32", "gemm", x=x[1:2], w=w, y=alone, relu=False)
    assert bits(alone) == bits(y[1:2])


@pytest.mark.parametrize("function", sorted(ALGORITHMS))
def test_the_last_algorithm_needs_no_workspace_and_the_first_is_told_exactly(function: str) -> None:
    case = Case(2, 2, 3, 4, (40, 40), (3, 3), padding=((1, 1), (1, 1)))
    make = Maker("float32", "NCHW")
    operands = {
        "conv2d_forward": {"x": case.x_shape, "w": case.w_shape, "y": case.y_shape},
        "conv2d_backward_data": {"dy": case.y_shape, "w": case.w_shape, "dx": case.x_shape},
        "conv2d_backward_filter": {"x": case.x_shape, "dy": case.y_shape, "dw": case.w_shape},
    }[function]
    arrays = {name: make.normal(*shape) for name, shape in operands.items()}
    first, *_, last = ALGORITHMS[function]
    enough = case.workspace(function, first, "float32")
    assert enough.nbytes > 0
    run(function, algorithm=first, workspace=enough, **arrays, **case.attributes)
    assert case.workspace(function, last, "float32").nbytes == 0
    run(function, algorithm=last, workspace=None, **arrays, **case.attributes)
    for too_small in (enough[:-1], None):
        with pytest.raises(ArgumentError, match=rf"workspace has \d+ bytes; {function} with 'gemm' needs"):
            run(function, algorithm=first, workspace=too_small, **arrays, **case.attributes)
    with pytest.raises(ArgumentError, match="algorithm is 'fft'"):
        run(function, algorithm="fft", workspace=enough, **arrays, **case.attributes)
    with pytest.raises(ArgumentError, match="algorithm is 'fft'"):
        case.workspace(function, "fft", "float32")


def test_a_pointwise_convolution_needs_no_columns() -> None:
    case = Case(1, 1, 8, 8, (20, 20), (1, 1))
    assert case.workspace("conv2d_forward", "gemm", "float32").nbytes == 0
    assert case.workspace("conv2d_backward_data", "gemm", "float32").nbytes == 0


@pytest.mark.parametrize("wrong", ["x", "w", "y"])
def test_shapes_that_do_not_belong_together_are_refused(wrong: str) -> None:
    case = Case(1, 2, 3, 4, (9, 9), (3, 3))
    make = Maker("float32", "NCHW")
    shapes = {"x": case.x_shape, "w": case.w_shape, "y": case.y_shape}
    shapes[wrong] = (shapes[wrong][0], shapes[wrong][1] + 1, *shapes[wrong][2:])
    arrays = {name: make.normal(*shape) for name, shape in shapes.items()}
    with pytest.raises(ShapeError, match="convolution of x"):
        run("conv2d_forward", relu=False, algorithm="implicit", **arrays, **case.attributes)
