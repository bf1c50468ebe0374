"""Batch normalization and local response normalization on the host agree with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ShapeError
from tests.host.ops_support import Array, Maker, assert_close, dtypes, layouts, run, seeds, tensor

# Enough values per channel: with two, every gradient is a difference of nearly equal numbers.
shapes = st.tuples(st.integers(2, 4), st.integers(1, 5), st.integers(2, 7), st.integers(2, 7))


def statistics(make: Maker, channels: int) -> dict[str, Array]:
    return {
        "running_mean": make.normal(channels, dtype=make.stored),
        "running_var": np.abs(make.normal(channels, dtype=make.stored)) + 1,
    }


@given(shape=shapes, dtype=dtypes, layout=layouts, affine=st.booleans(), running=st.booleans(), relu=st.booleans(),
       momentum=st.sampled_from([0.1, 0.5]), seed=seeds)  # fmt: skip
def test_batch_norm_and_its_gradients_agree_with_torch(
    shape: tuple[int, ...], dtype: str, layout: str, affine: bool, running: bool, relu: bool, momentum: float, seed: int
) -> None:
    make, channels = Maker(dtype, layout, seed), shape[1]
    x, dy, y, dx = make.normal(*shape), make.normal(*shape), make.blank(shape), make.blank(shape)
    weights = {n: make.normal(channels, dtype=make.stored) for n in ("w", "b")} if affine else {}
    moving = statistics(make, channels) if running else {}
    saved = {name: make.blank((channels,), make.stored) for name in ("mean", "invstd")}
    t: dict[str, Any] = {name: tensor(value, grad=True) for name, value in {"x": x, **weights}.items()}
    state: dict[str, Any] = {name: tensor(value) for name, value in moving.items()}
    expected = F.batch_norm(
        t["x"], state.get("running_mean"), state.get("running_var"), t.get("w"), t.get("b"), True, momentum, 1e-3
    )
    run("batch_norm_forward", x=x, y=y, momentum=momentum, eps=1e-3, relu=relu, **saved, **weights, **moving)
    assert_close(y, expected.relu() if relu else expected, dtype)
    for name, value in state.items():
        assert_close(moving[name], value, make.stored)
    values = tensor(x)
    assert_close(saved["mean"], values.mean((0, 2, 3)), make.stored)
    assert_close(saved["invstd"], (values.var((0, 2, 3), correction=0) + 1e-3).rsqrt(), make.stored)

    # Both sides take the ReLU's mask from the same y: a value that rounds to zero on one side only is not the point.
    expected.backward(tensor(dy) * (tensor(y) > 0) if relu else tensor(dy))
    gradients = {f"d{name}": make.blank((channels,), make.stored) for name in weights}
    forward = {"y": y} if relu else {}
    factor = {"w": weights["w"]} if affine else {}
    run("batch_norm_backward", x=x, dy=dy, dx=dx, relu=relu, **saved, **factor, **forward, **gradients)
    assert_close(dx, t["x"].grad, dtype)
    for name in weights:
        assert_close(gradients[f"d{name}"], t[name].grad, make.stored)


@given(shape=shapes, dtype=dtypes, layout=layouts, affine=st.booleans(), relu=st.booleans(), seed=seeds)
def test_batch_norm_in_inference_agrees_with_torch(
    shape: tuple[int, ...], dtype: str, layout: str, affine: bool, relu: bool, seed: int
) -> None:
    make, channels = Maker(dtype, layout, seed), shape[1]
    x, y, moving = make.normal(*shape), make.blank(shape), statistics(make, channels)
    weights = {n: make.normal(channels, dtype=make.stored) for n in ("w", "b")} if affine else {}
    t = {name: tensor(value) for name, value in {**weights, **moving}.items()}
    expected = F.batch_norm(tensor(x), t["running_mean"], t["running_var"], t.get("w"), t.get("b"), False, 0.1, 1e-5)
    run("batch_norm_inference", x=x, y=y, eps=1e-5, relu=relu, **moving, **weights)
    assert_close(y, expected.relu() if relu else expected, dtype)


def test_batch_norm_keeps_its_precision_far_from_zero() -> None:
    make = Maker("float32", "NCHW")
    x, y = make.place(1000 + make.normal(4, 2, 8, 8).astype(np.float64)), make.blank((4, 2, 8, 8))
    saved = {name: make.blank((2,)) for name in ("mean", "invstd")}
    run("batch_norm_forward", x=x, y=y, momentum=0.1, eps=1e-5, relu=False, **saved)
    assert_close(y, F.batch_norm(tensor(x.astype(np.float64)), None, None, training=True), "float32")


def test_batch_norm_gives_only_the_gradients_that_are_asked_for() -> None:
    make = Maker("float32", "NCHW")
    x, dy = make.normal(2, 3, 4, 4), make.normal(2, 3, 4, 4)
    saved = {"mean": make.normal(3), "invstd": make.normal(3)}
    dw, db = make.blank((3,)), make.blank((3,))
    run("batch_norm_backward", x=x, dy=dy, w=make.normal(3), dw=dw, db=db, relu=False, **saved)
    assert np.isfinite(dw).all()
    assert_close(db, tensor(dy).sum((0, 2, 3)), "float32")


def test_batch_norm_refuses_one_value_per_channel() -> None:
    make = Maker("float32", "NCHW")
    saved = {"mean": make.blank((3,)), "invstd": make.blank((3,))}
    with pytest.raises(ShapeError, match="needs 2 values per channel"):
        run("batch_norm_forward", x=make.normal(1, 3, 1, 1), y=make.blank((1, 3, 1, 1)), momentum=0.1, eps=1e-5,
            relu=False, **saved)  # fmt: skip


def test_nan_spoils_its_own_channel_only() -> None:
    make = Maker("float32", "NHWC")
    x, y = make.normal(2, 3, 4, 4), make.blank((2, 3, 4, 4))
    x[1, 1, 2, 2] = np.nan
    run("batch_norm_forward", x=x, y=y, momentum=0.1, eps=1e-5, relu=True,
        **{name: make.blank((3,)) for name in ("mean", "invstd")})  # fmt: skip
    assert_close(y, F.batch_norm(tensor(x), None, None, training=True).relu(), "float32")


@given(shape=st.tuples(*[st.integers(1, 3)], st.integers(1, 9), *[st.integers(1, 5)] * 2), size=st.integers(1, 7),
       numbers=st.sampled_from([(1e-4, 0.75, 2.0), (0.5, 0.75, 1.0), (1.0, 1.5, 0.5)]), dtype=dtypes, layout=layouts,
       seed=seeds)  # fmt: skip
def test_local_response_norm_and_its_gradient_agree_with_torch(
    shape: tuple[int, ...], size: int, numbers: tuple[float, float, float], dtype: str, layout: str, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x, dy = make.normal(*shape), make.normal(*shape)
    y, scale, dx = make.blank(shape), make.blank(shape, make.stored), make.blank(shape)
    attributes = {"size": size, **dict(zip(("alpha", "beta", "k"), numbers, strict=True))}
    tx = tensor(x, grad=True)
    expected = F.local_response_norm(tx, size, *numbers)
    expected.backward(tensor(dy))
    run("local_response_norm_forward", x=x, y=y, scale=scale, **attributes)
    assert_close(y, expected, dtype)
    assert_close(scale, (tx / expected).detach().double() ** (1 / numbers[1]), make.stored)
    exact = make.place(np.asarray(expected.detach()), make.stored)  # y as float32: its rounding has been judged above
    run("local_response_norm_backward", x=x, y=exact, scale=scale, dy=dy, dx=dx, **attributes)
    assert_close(dx, tx.grad, dtype)


def test_local_response_norm_lets_nan_reach_its_window_of_channels() -> None:
    make = Maker("float32", "NCHW")
    x, y, scale = make.normal(1, 7, 2, 2), make.blank((1, 7, 2, 2)), make.blank((1, 7, 2, 2))
    x[0, 5, 1, 1] = np.nan
    run("local_response_norm_forward", x=x, y=y, scale=scale, size=4, alpha=1e-4, beta=0.75, k=2.0)
    assert_close(y, F.local_response_norm(torch.tensor(x), 4, 1e-4, 0.75, 2.0), "float32")
