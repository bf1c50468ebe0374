"""Weight updates on the host follow PyTorch's optimizers over several steps, on prescribed gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.host.ops_support import Array, Maker, assert_close, bits, layouts, run, seeds, tensor

SHAPES = [(3, 2, 3, 3), (3,), (5, 7)]
precise = st.sampled_from(["float32", "float64"])
rates = st.sampled_from([0.0, 0.01, 0.3])


def prescribed(make: Maker, steps: int) -> tuple[list[Array], list[list[Array]]]:
    """Weights, and gradients for some steps."""
    return [make.normal(*s) for s in SHAPES], [[make.normal(*s) for s in SHAPES] for _ in range(steps)]


def torch_steps(optimizer: Any, parameters: list[Any], gradients: list[list[Array]], factor: float = 1.0) -> list[Any]:
    """PyTorch's weights after each step."""
    history = []
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = tensor(gradient) * factor
        optimizer.step()
        history.append([p.detach().clone() for p in parameters])
    return history


@given(dtype=precise, layout=layouts, seed=seeds, lr=rates, weight_decay=rates, maximize=st.booleans(),
       kind=st.sampled_from(["plain", "momentum", "dampened", "nesterov"]), clipped=st.booleans())  # fmt: skip
def test_sgd_follows_torch(
    dtype: str, layout: str, seed: int, lr: float, weight_decay: float, maximize: bool, kind: str, clipped: bool
) -> None:
    make = Maker(dtype, layout, seed)
    weights, gradients = prescribed(make, 4)
    options: dict[str, Any] = {
        "momentum": 0.0 if kind == "plain" else 0.9, "dampening": 0.3 if kind == "dampened" else 0.0,
        "nesterov": kind == "nesterov", "weight_decay": weight_decay, "maximize": maximize,
    }  # fmt: skip
    parameters = [tensor(w, grad=True) for w in weights]
    expected = torch_steps(torch.optim.SGD(parameters, lr=lr, **options), parameters, gradients, 0.25 if clipped else 1)
    options["momentum_factor"] = options.pop("momentum")
    buffers = {} if kind == "plain" else {"momentum": [make.blank(w.shape) for w in weights]}
    if clipped:
        options["clip"] = np.array([0.25], make.stored)
    for step, gradient in enumerate(gradients):
        before = [bits(g) for g in gradient]
        run("sgd_update", w=weights, dw=gradient, scalars=make.scalars(lr=lr, step=step), **buffers, **options)
        for actual, reference in zip(weights, expected[step], strict=True):
            assert_close(actual, reference, dtype)
        assert [bits(g) for g in gradient] == before


@given(dtype=precise, layout=layouts, seed=seeds, weight_decay=rates, decoupled=st.booleans(), clipped=st.booleans(),
       betas=st.sampled_from([(0.9, 0.999), (0.5, 0.8), (0.0, 0.9)]), eps=st.sampled_from([1e-8, 1e-3]))  # fmt: skip
def test_adam_follows_torch(
    dtype: str, layout: str, seed: int, weight_decay: float, decoupled: bool, clipped: bool,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    make = Maker(dtype, layout, seed)
    weights, gradients = prescribed(make, 5)
    parameters = [tensor(w, grad=True) for w in weights]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(parameters, lr=0.02, betas=betas, eps=eps, weight_decay=weight_decay)
    expected = torch_steps(optimizer, parameters, gradients, 0.25 if clipped else 1)
    m, v = ([make.place(np.zeros(w.shape)) for w in weights] for _ in range(2))
    extra = {"clip": np.array([0.25], make.stored)} if clipped else {}
    for step, gradient in enumerate(gradients):
        scalars = make.scalars(
            lr=0.02, step=step, correction1=1 - betas[0] ** (step + 1), correction2=1 - betas[1] ** (step + 1)
        )
        run("adam_update", w=weights, dw=gradient, m=m, v=v, scalars=scalars, beta1=betas[0], beta2=betas[1], eps=eps,
            weight_decay=weight_decay, decoupled=decoupled, **extra)  # fmt: skip
        for actual, reference in zip(weights, expected[step], strict=True):
            assert_close(actual, reference, dtype)
    for i, parameter in enumerate(parameters):
        assert_close(m[i], optimizer.state[parameter]["exp_avg"], dtype)
        assert_close(v[i], optimizer.state[parameter]["exp_avg_sq"], dtype)


def test_updates_renew_the_bfloat16_copies() -> None:
    make = Maker("float32", "NHWC")
    weights, (gradient,) = prescribed(make, 1)
    state = {name: [make.place(np.zeros(w.shape)) for w in weights] for name in ("m", "v")}
    scalars = make.scalars(lr=0.1, correction1=0.1, correction2=0.001)
    for name, extra in (("sgd_update", {}), ("adam_update", state)):
        copies = [make.blank(w.shape, "bfloat16") for w in weights]
        run(name, w=weights, dw=gradient, copy=copies, scalars=scalars, **extra)
        for copy, weight in zip(copies, weights, strict=True):
            np.testing.assert_array_equal(copy, weight.astype(ml_dtypes.bfloat16))


def test_a_nan_gradient_shows_in_the_weight() -> None:
    make = Maker("float32", "NCHW")
    weights, (gradient,) = prescribed(make, 1)
    gradient[1][0] = np.nan
    run("sgd_update", w=weights, dw=gradient, scalars=make.scalars(lr=0.1))
    assert np.isnan(weights[1]).tolist() == [True, False, False]


@given(dtype=precise, layout=layouts, seed=seeds, max_norm=st.sampled_from([0.01, 1.0, 1000.0]))
def test_the_clip_factor_is_torchs(dtype: str, layout: str, seed: int, max_norm: float) -> None:
    make = Maker(dtype, layout, seed)
    _, (gradient,) = prescribed(make, 1)
    parameters = [tensor(g, grad=True) for g in gradient]
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = tensor(value)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clip = make.blank((1,))
    run("clip_factor", dw=gradient, clip=clip, max_norm=max_norm)
    for parameter, value in zip(parameters, gradient, strict=True):
        assert_close(value * clip[0], parameter.grad, dtype)


def test_the_norm_of_many_values_is_exact_enough() -> None:
    gradient, clip = np.full(1 << 22, 1e-3, np.float32), np.empty(1, np.float32)
    run("clip_factor", dw=[gradient], clip=clip, max_norm=1.0)
    assert abs(clip[0] * 2.048 - 1) < 1e-6


def test_a_nan_norm_clips_to_nan() -> None:
    clip = np.zeros(1, np.float32)
    run("clip_factor", dw=[np.array([1, np.nan], np.float32)], clip=clip, max_norm=1.0)
    assert np.isnan(clip[0])


@given(dtype=precise, layout=layouts, seed=seeds)
def test_accumulate_adds_entry_by_entry(dtype: str, layout: str, seed: int) -> None:
    make = Maker(dtype, layout, seed)
    total, (source,) = prescribed(make, 1)
    expected = [a + b for a, b in zip(total, source, strict=True)]
    run("accumulate", source=source, total=total)
    for actual, reference in zip(total, expected, strict=True):
        np.testing.assert_array_equal(actual, reference)
