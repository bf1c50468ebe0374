"""Pooling on the host agrees with PyTorch: values, which element wins, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError
from tests.host.ops_support import Array, Maker, assert_close, bits, dtypes, layouts, run, seeds, tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """One pooling, as PyTorch takes it: padding alike on both sides."""

    shape: tuple[int, ...]
    kernel: Pair
    stride: Pair
    pads: Pair
    dilation: Pair
    ceil_mode: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's attributes, without dilation."""
        return {
            "kernel": self.kernel, "stride": self.stride,
            "padding": ((self.pads[0], self.pads[0]), (self.pads[1], self.pads[1])),
        }  # fmt: skip


@st.composite
def pools(draw: st.DrawFn, dilated: bool = True) -> Pool:
    def pair(low: int, high: int) -> Pair:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, stride = pair(1, 4), pair(1, 4)
    pads = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
    dilation = pair(1, 2) if dilated else (1, 1)
    need = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * pads[i]) for i in range(2)]
    image = (need[0] + draw(st.integers(0, 9)), need[1] + draw(st.integers(0, 9)))
    pool = Pool((*pair(1, 3), *image), kernel, stride, pads, dilation, draw(st.booleans()))
    # Dilated windows may miss the image altogether; torch's index then points outside.
    assume(bool(torch.isfinite(reference(torch.zeros(pool.shape), pool)[0]).all()))
    return pool


def reference(x: Any, pool: Pool) -> tuple[Any, Any]:
    """Values and flat indices h * W + w."""
    values, places = F.max_pool2d(
        x, pool.kernel, pool.stride, pool.pads, pool.dilation, pool.ceil_mode, return_indices=True
    )
    return values, places


def flat(index: Array, pool: Pool) -> Array:
    """The op's window positions as flat indices h * W + w."""
    p, q = np.indices(index.shape[2:])
    r, s = index // pool.kernel[1], index % pool.kernel[1]
    h = p * pool.stride[0] - pool.pads[0] + r * pool.dilation[0]
    w = q * pool.stride[1] - pool.pads[1] + s * pool.dilation[1]
    return np.asarray(h * pool.shape[3] + w)


@given(pool=pools(), dtype=dtypes, layout=layouts, seed=seeds,
       kind=st.sampled_from(["ties", "nan", "infinite"]))  # fmt: skip
def test_max_pool_picks_the_element_that_torch_picks(
    pool: Pool, dtype: str, layout: str, seed: int, kind: str
) -> None:
    make = Maker(dtype, layout, seed)
    x = make.ties(*pool.shape)
    if kind != "ties":
        x[make.rng.random(x.shape) < 0.3] = np.nan if kind == "nan" else -np.inf
    tx = tensor(x, grad=True)
    expected, where = reference(tx, pool)
    y, index = make.blank(expected.shape), make.blank(expected.shape, "int8")
    run("max_pool2d_forward", x=x, y=y, index=index, relu=False, dilation=pool.dilation, **pool.attributes)
    assert_close(y, expected, dtype)
    np.testing.assert_array_equal(flat(index.astype(np.int64), pool), where.numpy())
    dy = make.normal(*expected.shape)
    expected.backward(tensor(dy))
    native, paper = make.blank(pool.shape), make.blank(pool.shape)
    attributes = {"dilation": pool.dilation, **pool.attributes}
    run("max_pool2d_backward", dy=dy, dx=native, index=index, **attributes)
    assert_close(native, tx.grad, dtype)
    without_index = make.blank(expected.shape)
    run("max_pool2d_forward", x=x, y=without_index, relu=False, **attributes)
    assert bits(without_index) == bits(y)
    run("max_pool2d_backward", dy=dy, dx=paper, x=x, y=y, **attributes)
    assert bits(paper) == bits(native)  # with x and y the same element is found again


@given(pool=pools(), dtype=dtypes, layout=layouts, seed=seeds)
def test_max_pool_kills_the_gradient_where_a_relu_in_front_would(
    pool: Pool, dtype: str, layout: str, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x = make.normal(*pool.shape) - make.place(np.ones(pool.shape))
    tx = tensor(x, grad=True)
    expected, _ = reference(tx.relu(), pool)
    y, index, dx = make.blank(expected.shape), make.blank(expected.shape, "int8"), make.blank(pool.shape)
    dy = make.normal(*expected.shape)
    expected.backward(tensor(dy))
    attributes = {"dilation": pool.dilation, **pool.attributes}
    run("max_pool2d_forward", x=x, y=y, index=index, relu=True, **attributes)
    run("max_pool2d_backward", dy=dy, dx=dx, index=index, **attributes)
    assert_close(y, expected, dtype)
    np.testing.assert_array_equal(index < 0, np.asarray(y <= 0))
    assert_close(dx, tx.grad, dtype)


@given(image=st.tuples(st.integers(4, 9), st.integers(4, 9)), layout=layouts, seed=seeds,
       padding=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2))  # fmt: skip
def test_padding_may_differ_from_side_to_side(
    image: Pair, layout: str, seed: int, padding: tuple[Pair, Pair]
) -> None:
    make = Maker("float32", layout, seed)
    shape = (2, 3, *image)
    x = make.normal(*shape)
    (top, bottom), (left, right) = padding
    attributes: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 1), "padding": padding}
    for name in ("max", "avg"):
        tx = tensor(x, grad=True)
        padded = F.pad(tx, (left, right, top, bottom), value=float("-inf") if name == "max" else 0)
        expected = (F.max_pool2d if name == "max" else F.avg_pool2d)(padded, 3, (2, 1))
        y, dx, dy = make.blank(expected.shape), make.blank(shape), make.normal(*expected.shape)
        expected.backward(tensor(dy))
        extra: dict[str, Any] = {"dilation": (1, 1)} if name == "max" else {"count_include_pad": True}
        run(f"{name}_pool2d_forward", x=x, y=y, **attributes, **extra)
        saved = {"x": x, "y": y} if name == "max" else {}
        run(f"{name}_pool2d_backward", dy=dy, dx=dx, **saved, **attributes, **extra)
        assert_close(y, expected, "float32")
        assert_close(dx, tx.grad, "float32")


@pytest.mark.parametrize("relu", [False, True])
def test_a_window_of_padding_alone_gives_minus_infinity_and_takes_no_gradient(relu: bool) -> None:
    make = Maker("float32", "NCHW")
    x, y, index = np.abs(make.normal(1, 1, 2, 2)), make.blank((1, 1, 2, 2)), make.blank((1, 1, 2, 2), "int8")
    attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": ((2, 0), (2, 0)), "dilation": (1, 1)}
    run("max_pool2d_forward", x=x, y=y, index=index, relu=relu, **attributes)
    assert y[0, 0].tolist() == [[-np.inf, -np.inf], [-np.inf, x.max()]]
    assert index[0, 0, 0].tolist() == [-1, -1]
    dx = make.blank((1, 1, 2, 2))
    run("max_pool2d_backward", dy=make.place(np.ones((1, 1, 2, 2))), dx=dx, index=index, **attributes)
    assert dx.sum() == 1


@pytest.mark.parametrize("garbage", [113, -100])
def test_a_stale_index_writes_nowhere(garbage: int) -> None:
    make = Maker("float32", "NCHW")
    index, dx = make.place(np.full((1, 1, 2, 2), garbage), "int8"), make.blank((1, 1, 4, 4))
    attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    run("max_pool2d_backward", dy=make.normal(1, 1, 2, 2), dx=dx, index=index, **attributes)
    assert not dx.any()


def test_a_large_window_works_without_an_index_and_is_refused_with_one() -> None:
    make = Maker("float32", "NCHW")
    x, y, dx = make.normal(2, 3, 14, 14), make.blank((2, 3, 1, 1)), make.blank((2, 3, 14, 14))
    attributes = {"kernel": (14, 14), "stride": (14, 14), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    run("max_pool2d_forward", x=x, y=y, relu=False, **attributes)
    run("max_pool2d_backward", dy=np.ones_like(y), dx=dx, x=x, y=y, **attributes)
    np.testing.assert_array_equal(dx, x == x.max(axis=(2, 3), keepdims=True))
    with pytest.raises(ArgumentError, match=r"kernel is \(14, 14\); an int8 index"):
        run("max_pool2d_forward", x=x, y=y, index=make.blank(y.shape, "int8"), relu=False, **attributes)
    with pytest.raises(ArgumentError, match="neither index nor both x and y"):
        run("max_pool2d_backward", dy=y, dx=dx, x=x, **attributes)


@given(pool=pools(dilated=False), dtype=dtypes, layout=layouts, include=st.booleans(), masked=st.booleans(),
       seed=seeds)  # fmt: skip
def test_average_pool_agrees_with_torch(
    pool: Pool, dtype: str, layout: str, include: bool, masked: bool, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x = make.normal(*pool.shape)
    tx = tensor(x, grad=True)
    expected = F.avg_pool2d(tx, pool.kernel, pool.stride, pool.pads, pool.ceil_mode, include)
    attributes = {"ceil_mode": pool.ceil_mode, "count_include_pad": include, **pool.attributes}
    check_average("avg_pool2d", make, x, tx, expected, masked, attributes)


@given(shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 11)] * 2), masked=st.booleans(),
       size=st.tuples(st.integers(1, 12), st.integers(1, 12)), dtype=dtypes, layout=layouts, seed=seeds)  # fmt: skip
def test_adaptive_average_pool_agrees_with_torch(
    shape: tuple[int, ...], masked: bool, size: Pair, dtype: str, layout: str, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x = make.normal(*shape)
    tx = tensor(x, grad=True)
    check_average("adaptive_avg_pool2d", make, x, tx, F.adaptive_avg_pool2d(tx, size), masked, {})


def check_average(
    name: str, make: Maker, x: Array, tx: Any, expected: Any, masked: bool, attributes: dict[str, Any]
) -> None:
    y, dx, dy = make.blank(expected.shape), make.blank(x.shape), make.normal(*expected.shape)
    mask = np.maximum(make.normal(*x.shape), 0) if masked else None
    expected.backward(tensor(dy))
    run(f"{name}_forward", x=x, y=y, **attributes)
    run(f"{name}_backward", dy=dy, dx=dx, **({} if mask is None else {"mask": mask}), **attributes)
    assert_close(y, expected, make.dtype)
    assert_close(dx, tx.grad if mask is None else tx.grad * (tensor(mask) > 0), make.dtype)


def test_average_of_nan_is_nan_and_stays_in_its_windows() -> None:
    make = Maker("float32", "NCHW")
    x, y = make.normal(1, 1, 6, 6), make.blank((1, 1, 3, 3))
    x[0, 0, 0, 0] = np.nan
    run("avg_pool2d_forward", x=x, y=y, kernel=(2, 2), stride=(2, 2), padding=((0, 0), (0, 0)))
    assert_close(y, F.avg_pool2d(torch.tensor(x), 2), "float32")
