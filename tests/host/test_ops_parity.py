"""Fully connected layers, activations, dropout, losses and copies on the host agree with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError, DataError
from minidnn.ops.numpy_ops import OPS
from tests.host.ops_support import TYPES, Array, Maker, assert_close, bits, dtypes, layouts, run, seeds, sums, tensor

images = st.tuples(st.integers(1, 3), *[st.integers(1, 5)] * 3)


def test_every_op_of_the_contract_is_there() -> None:
    both = "conv2d linear batch_norm local_response_norm activation dropout softmax cross_entropy mse"
    expected = {f"{name}_forward" for name in both.split()}
    expected |= {f"{name}_backward" for name in both.split()[2:]}
    expected |= {f"{name}_backward_{part}" for name in ("conv2d", "linear") for part in ("data", "filter")}
    expected |= {f"{name}_{way}" for name in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
                 for way in ("forward", "backward")}  # fmt: skip
    expected |= {"bias_backward", "relu_backward", "batch_norm_inference", "sgd_update", "adam_update", "accumulate"}
    expected |= {"clip_factor", "cast", "layout", "add"}
    assert set(OPS) == expected


@given(shape=images, outputs=st.integers(1, 6), flat=st.booleans(), dtype=dtypes, layout=layouts, bias=st.booleans(),
       relu=st.booleans(), seed=seeds)  # fmt: skip
def test_linear_and_its_gradients_agree_with_torch(
    shape: tuple[int, ...], outputs: int, flat: bool, dtype: str, layout: str, bias: bool, relu: bool, seed: int
) -> None:
    make, features = Maker(dtype, layout, seed), shape[1] * shape[2] * shape[3]
    x_shape = (shape[0], features) if flat else shape
    x, w, dy = make.normal(*x_shape), make.normal(outputs, features), make.normal(shape[0], outputs)
    mask = np.maximum(make.normal(*x_shape), 0)
    b = {"b": make.normal(outputs, dtype=make.stored)} if bias else {}
    y, dx, dw = make.blank(dy.shape), make.blank(x_shape), make.blank(w.shape, make.stored)
    expected, terms = sums(lambda x, w, b: F.linear(x.flatten(1), w, b), x, w, b.get("b"), dy)
    run("linear_forward", x=x, w=w, y=y, relu=relu, **b)
    run("linear_backward_data", dy=dy, w=w, dx=dx)
    run("linear_backward_filter", x=x, dy=dy, dw=dw)
    assert_close(y, expected.y.relu() if relu else expected.y, dtype, terms.y)
    assert_close(dx, expected.dx, dtype, terms.dx)
    assert_close(dw, expected.dw, make.stored, terms.dw)
    masked = make.blank(x_shape)
    run("linear_backward_data", dy=dy, w=w, dx=masked, mask=mask)
    assert_close(masked, expected.dx * (tensor(mask) > 0), dtype, terms.dx)


@given(shape=images, dtype=dtypes, layout=layouts, seed=seeds)
def test_the_bias_gradient_is_the_sum_over_all_but_channels(
    shape: tuple[int, ...], dtype: str, layout: str, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    dy, db = make.normal(*shape), make.blank((shape[1],), make.stored)
    run("bias_backward", dy=dy, db=db)
    assert_close(db, tensor(dy).sum((0, 2, 3)), make.stored, tensor(dy).abs().sum((0, 2, 3)))
    run("bias_backward", dy=dy[:, :, 0, 0], db=db)
    assert_close(db, tensor(dy)[:, :, 0, 0].sum(0), make.stored, tensor(dy)[:, :, 0, 0].abs().sum(0))


FUNCTIONS: dict[str, Any] = {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
}  # fmt: skip


@given(shape=images, dtype=dtypes, layout=layouts, in_place=st.booleans(), seed=seeds,
       function=st.sampled_from(sorted(FUNCTIONS)))  # fmt: skip
def test_activations_and_their_gradients_agree_with_torch(
    shape: tuple[int, ...], dtype: str, layout: str, in_place: bool, seed: int, function: str
) -> None:
    make = Maker(dtype, layout, seed)
    x, dy = make.normal(*shape), make.normal(*shape)
    x[0, 0, 0, 0] = make.rng.choice([0.4, np.nan, np.inf, -np.inf, 200, -200])
    tx = tensor(x, grad=True)
    expected = FUNCTIONS[function](tx)
    attributes = {"function": function, "negative_slope": 0.2}
    target = x.copy(order="K") if in_place else x
    y = target if in_place else make.blank(shape)
    run("activation_forward", x=target, y=y, **attributes)
    assert_close(y, expected, dtype)
    # The gradient of what was saved: y as it was rounded, through torch's own formula.
    saved = x if function == "leaky_relu" else y
    slopes: dict[str, Any] = {
        "relu": lambda v: (~(v <= 0)).to(v.dtype), "sigmoid": lambda v: v * (1 - v), "tanh": lambda v: 1 - v * v,
        "leaky_relu": lambda v: torch.where(v > 0, torch.ones_like(v), torch.full_like(v, 0.2)),
    }  # fmt: skip
    gradient = dy.copy(order="K")
    dx = gradient if in_place else make.blank(shape)
    run("activation_backward", saved=saved, dy=gradient, dx=dx, **attributes)
    assert_close(dx, tensor(dy) * slopes[function](tensor(saved)), dtype)
    if dtype != "bfloat16":
        expected.backward(tensor(dy))
        assert_close(dx, tx.grad, dtype)


def test_an_unknown_activation_is_refused() -> None:
    x = np.ones((1, 2), np.float32)
    for name, arrays in (("forward", {"x": x, "y": x}), ("backward", {"saved": x, "dy": x, "dx": x})):
        with pytest.raises(ArgumentError, match="function is 'gelu'"):
            run(f"activation_{name}", function="gelu", **arrays)


@given(shape=images, dtype=dtypes, layout=layouts, in_place=st.booleans(), seed=seeds)
def test_relu_backward_passes_what_torch_passes(
    shape: tuple[int, ...], dtype: str, layout: str, in_place: bool, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    y, dy = make.ties(*shape), make.normal(*shape)
    y[0, 0, 0, 0], dy[-1, -1, -1, -1] = np.nan, np.nan
    gradient = dy.copy(order="K")
    dx = gradient if in_place else make.blank(shape)
    run("relu_backward", y=y, dy=gradient, dx=dx)
    ty = tensor(y, grad=True)
    ty.relu().backward(tensor(dy))
    assert bits(dx.astype(np.float64)) == bits(np.asarray(ty.grad, np.float64))


@given(shape=images, dtype=dtypes, layout=layouts, in_place=st.booleans(), seed=seeds)
def test_softmax_and_its_gradient_agree_with_torch(
    shape: tuple[int, ...], dtype: str, layout: str, in_place: bool, seed: int
) -> None:
    make = Maker(dtype, layout, seed)
    x, dy = make.normal(*shape), make.normal(*shape)
    x[0, 0, 0, 0] = make.rng.choice([0.4, np.nan, 1000, -1000])
    tx = tensor(x, grad=True)
    expected = tx.softmax(1)
    y = x if in_place else make.blank(shape)
    run("softmax_forward", x=x, y=y)
    assert_close(y, expected, dtype)
    saved = tensor(y)
    reference = saved * (tensor(dy) - (saved * tensor(dy)).sum(1, keepdim=True))
    dx = dy if in_place else make.blank(shape)
    run("softmax_backward", y=y, dy=dy, dx=dx)
    assert_close(dx.astype(np.float64) + 1, reference + 1, dtype)  # + 1: one class alone has no gradient


@given(batch=st.integers(1, 6), classes=st.integers(2, 7), dtype=st.sampled_from(["float32", "float64"]),
       weighted=st.booleans(), smoothing=st.sampled_from([0.0, 0.1, 0.6]), in_place=st.booleans(), seed=seeds,
       extreme=st.sampled_from([0.4, 300.0, np.nan, np.inf]))  # fmt: skip
def test_cross_entropy_agrees_with_torch_and_splits_into_micro_batches(
    batch: int, classes: int, dtype: str, weighted: bool, smoothing: float, in_place: bool, seed: int, extreme: float
) -> None:
    make = Maker(dtype, "NCHW", seed)
    x, labels = make.normal(batch, classes), make.rng.integers(0, classes, batch)
    x[0, 0] = extreme
    weight = np.abs(make.normal(classes)) + 0.1 if weighted else None
    extra = {} if weight is None else {"class_weight": weight}
    tx = tensor(x, grad=True)
    expected = F.cross_entropy(
        tx, torch.tensor(labels), None if weight is None else tensor(weight), label_smoothing=smoothing
    )
    expected.backward()
    total = float(batch if weight is None else weight[labels].sum())
    scalars, parts, gradient = make.scalars(inverse_weight=1 / total), np.zeros(2), make.blank(x.shape)
    for rows in (slice(0, batch // 2), slice(batch // 2, batch)):
        if rows.start == rows.stop:
            continue
        logits, loss = x[rows].copy(), make.blank((2,))
        y = logits if in_place else make.blank(logits.shape)
        run("cross_entropy_forward", x=logits, labels=labels[rows], y=y, loss=loss, scalars=scalars,
            label_smoothing=smoothing, **extra)  # fmt: skip
        assert_close(y, tensor(x[rows]).softmax(1), dtype)
        dx = y if in_place else gradient[rows]
        run("cross_entropy_backward", y=y, labels=labels[rows], dx=dx, scalars=scalars, label_smoothing=smoothing,
            **extra)  # fmt: skip
        gradient[rows], parts = dx, parts + loss
    assert_close(parts[0], expected, dtype)
    assert parts[1] == (tensor(x).argmax(1).numpy() == labels).sum()
    assert_close(gradient + 1 / total, tx.grad + 1 / total, dtype)


def test_cross_entropy_in_bfloat16_rounds_once() -> None:
    make = Maker("bfloat16", "NCHW")
    x, labels, y, dx = make.normal(5, 4), np.array([0, 1, 2, 3, 0]), make.blank((5, 4)), make.blank((5, 4))
    loss, scalars = make.blank((2,), "float32"), make.scalars(inverse_weight=0.2)
    run("cross_entropy_forward", x=x, labels=labels, y=y, loss=loss, scalars=scalars, label_smoothing=0.0)
    assert_close(loss[0], F.cross_entropy(tensor(x), torch.tensor(labels)), "float32")
    assert_close(y, tensor(x).softmax(1), "bfloat16")
    run("cross_entropy_backward", y=y, labels=labels, dx=dx, scalars=scalars, label_smoothing=0.0)
    assert_close(dx, (tensor(y) - F.one_hot(torch.tensor(labels), 4)) * 0.2, "bfloat16")


def test_a_class_of_no_weight_counts_nothing_even_where_it_is_impossible() -> None:
    make = Maker("float32", "NCHW")
    x, labels = make.place(np.array([[0.0, 1.0, -np.inf]])), np.array([1])
    y, loss, weight = make.blank((1, 3)), make.blank((2,)), make.place(np.array([1.0, 1.0, 0.0]))
    run("cross_entropy_forward", x=x, labels=labels, y=y, loss=loss, scalars=make.scalars(inverse_weight=1),
        class_weight=weight, label_smoothing=0.0)  # fmt: skip
    assert_close(loss[0], F.cross_entropy(torch.tensor(x), torch.tensor(labels), torch.tensor(weight)), "float32")


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_outside_the_classes_is_refused(label: int) -> None:
    make = Maker("float32", "NCHW")
    x = make.normal(2, 4)
    with pytest.raises(DataError, match=f"labels hold {label}; with 4 classes"):
        run("cross_entropy_forward", x=x, labels=np.array([0, label]), y=x, loss=make.blank((2,)),
            scalars=make.scalars(inverse_weight=1), label_smoothing=0.0)  # fmt: skip


@given(shape=images, dtype=dtypes, layout=layouts, seed=seeds)
def test_mean_squared_error_agrees_with_torch(shape: tuple[int, ...], dtype: str, layout: str, seed: int) -> None:
    make = Maker(dtype, layout, seed)
    x, target, dx, loss = make.normal(*shape), make.normal(*shape), make.blank(shape), make.blank((2,), make.stored)
    scalars = make.scalars(inverse_weight=1 / x.size)
    tx = tensor(x, grad=True)
    expected = F.mse_loss(tx, tensor(target))
    expected.backward()
    run("mse_forward", x=x, target=target, loss=loss, scalars=scalars)
    run("mse_backward", x=x, target=target, dx=dx, scalars=scalars)
    assert_close(loss[0], expected, make.stored)
    assert loss[1] == 0
    assert_close(dx, tx.grad, dtype)


@given(shape=images, dtype=dtypes, layout=layouts, seed=seeds)
def test_add_rounds_once(shape: tuple[int, ...], dtype: str, layout: str, seed: int) -> None:
    make = Maker(dtype, layout, seed)
    a, b, y = make.normal(*shape), make.normal(*shape), make.blank(shape)
    run("add", a=a, b=b, y=y)
    assert_close(y, tensor(a) + tensor(b), dtype)


@given(shape=images, source=layouts, target=layouts, seed=seeds)
def test_layout_and_cast_keep_values(shape: tuple[int, ...], source: str, target: str, seed: int) -> None:
    make = Maker("float32", source, seed)
    x, y = make.normal(*shape), make.blank(shape, layout=target)
    run("layout", x=x, y=y)
    np.testing.assert_array_equal(y, x)
    low = make.blank(shape, "bfloat16", target)
    run("cast", x=x, y=low)
    expected = tensor(x).to(torch.bfloat16).to(torch.float32).numpy()  # round to nearest, ties to even
    np.testing.assert_array_equal(low.astype(np.float32), expected)
    run("cast", x=low, y=y)
    np.testing.assert_array_equal(y, expected)


def test_layout_unrolls_images_in_logical_order() -> None:
    make = Maker("float32", "NHWC")
    x, y = make.normal(2, 3, 4, 5), make.blank((2, 60))
    run("layout", x=x, y=y)
    np.testing.assert_array_equal(y, tensor(x).flatten(1).numpy())


def test_nan_does_not_warn() -> None:
    """Warnings are errors in this suite; signalling and quiet NaN alike pass through an op without one."""
    x = np.full((2, 4), 0xFF, np.uint8).repeat(4, axis=1).view(np.float32)
    signalling = np.full(x.shape, 0x7F800001, np.uint32).view(np.float32)
    for values in (x, signalling):
        y: Array = np.zeros_like(values)
        run("activation_forward", x=values, y=y, function="sigmoid")
        run("softmax_forward", x=values, y=y)
        assert np.isnan(y).all()
    assert TYPES["float32"] == x.dtype
