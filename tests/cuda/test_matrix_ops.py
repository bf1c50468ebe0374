"""Convolutions and fully connected layers on the GPU against the host's, every plan that cuDNN offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.errors import DeviceError, ShapeError
from minidnn.ops import blas, cudnn_ops, cudnn_plans
from minidnn.ops.numpy_ops import OPS
from minidnn.ops.plans import SPLIT, PlanStore
from tests.cuda.support import Cuda, difference

pytestmark = pytest.mark.cuda

# fp32 is strict: a plan that rounds its inputs to TF32 errs by 3e-4 and more.
LIMITS = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 2e-2}
PRECISIONS = pytest.mark.parametrize("precision", list(LIMITS))
LAYOUTS = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
CONVOLUTIONS = {  # (N, C, H, W), K, (R, S), stride, padding, dilation, groups
    "3x3": ((2, 16, 12, 12), 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "first layer": ((2, 3, 19, 17), 8, (5, 5), (2, 2), ((2, 2), (2, 2)), (1, 1), 1),
    "images": ((4, 3, 16, 16), 8, (5, 5), (2, 2), ((2, 2), (2, 2)), (1, 1), 1),
    "1x1 strided": ((3, 8, 9, 9), 16, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1), 1),
    "dilated": ((1, 8, 14, 14), 8, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2), 1),
    "odd channels": ((2, 5, 9, 8), 7, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "grouped": ((2, 16, 8, 8), 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2),
    "one row": ((1, 16, 6, 6), 16, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
}


IN_PARTS = ("3x3", "images")


def normal(shape: tuple[int, ...], precision: str, seed: int) -> np.ndarray:
    """Random values in the precision's activation type."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values.astype(numpy_dtype("bfloat16")) if precision == "bf16" else values


def layer(case: str, precision: str) -> tuple[dict[str, np.ndarray], dict[str, Any], tuple[int, ...]]:
    """Arrays, window attributes and output shape of a case."""
    shape, k, kernel, stride, padding, dilation, groups = CONVOLUTIONS[case]
    out = [
        (size + sum(pad) - d * (r - 1) - 1) // s + 1
        for size, pad, d, r, s in zip(shape[2:], padding, dilation, kernel, stride, strict=True)
    ]
    y_shape = (shape[0], k, *out)
    arrays = {
        "x": normal(shape, precision, 0), "w": normal((k, shape[1] // groups, *kernel), precision, 1),
        "b": normal((k,), "fp32", 2), "dy": normal(y_shape, precision, 3), "mask": normal(shape, precision, 4),
    }  # fmt: skip
    return arrays, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}, y_shape


def by_every_plan(
    cuda: Cuda, function: str, inputs: dict[str, np.ndarray], output: str, shape: tuple[int, ...], dtype: str, *,
    layout: str, precision: str, compiled: int, parts: bool = False, **attributes: Any,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:  # fmt: skip
    """Run the op with each plan (`parts`: over parts of the batch): its name, what it found, and what the host did."""
    host = {name: np.array(value) for name, value in inputs.items()}
    host[output] = np.zeros(shape, np.float32)
    reference = {name: a.astype(np.float32) for name, a in host.items()}
    OPS[function](**reference, **attributes, algorithm="implicit", workspace=None)
    device: dict[str, Any] = {name: cuda.put(value, layout) for name, value in inputs.items()}
    window = {k: v for k, v in attributes.items() if k != "relu"}
    result = cuda.empty(shape, dtype, layout)
    arrays: dict[str, Any] = {**device, output: result}
    problem = cudnn_ops.problem(function, precision, arrays, **window, relu=attributes.get("relu", False))
    assert cuda.context.plans is not None
    plans = cuda.context.plans.explore(problem, compiled)
    assert plans
    if parts:
        with patch("minidnn.ops.cudnn_plans.LARGE", 0):
            plans = cuda.context.plans.in_parts(problem)
        assert all(p.name.startswith(SPLIT) for p in plans)
    assert len({p.name for p in plans}) == len(plans)
    for plan in plans:
        result = cuda.empty(shape, dtype, layout)
        workspace = cuda.empty((max(plan.workspace, 1),), "uint8").address
        getattr(cudnn_ops, function)(
            cuda.context, **device, **{output: result}, **attributes, algorithm=plan.name, workspace=workspace
        )()
        yield plan.name, cuda.get(result), reference[output]


def every_plan(cuda: Cuda, *what: Any, precision: str, **attributes: Any) -> None:
    """Every plan's result is the host's."""
    for name, found, wanted in by_every_plan(cuda, *what, precision=precision, **attributes):
        error = difference(found, wanted)
        assert error <= LIMITS[precision], f"{name} errs by {error:.1e}"


@PRECISIONS
@LAYOUTS
@pytest.mark.parametrize(
    ("case", "parts"), [*((case, False) for case in CONVOLUTIONS), *((case, True) for case in IN_PARTS)]
)
def test_every_plan_of_a_convolution_is_the_hosts(
    cuda: Cuda, case: str, parts: bool, layout: str, precision: str
) -> None:
    a, window, y_shape = layer(case, precision)
    dtype = "bfloat16" if precision == "bf16" else "float32"
    # Compiling plans takes seconds: one case has to do.
    compiled = int(case == "3x3" and not parts)
    how: dict[str, Any] = {"layout": layout, "precision": precision, "compiled": compiled, "parts": parts}
    forward = {name: a[name] for name in ("x", "w", "b")}
    every_plan(cuda, "conv2d_forward", forward, "y", y_shape, dtype, **how, **window, relu=True)
    every_plan(cuda, "conv2d_forward", {"x": a["x"], "w": a["w"]}, "y", y_shape, dtype, **how, **window, relu=False)
    data = {name: a[name] for name in ("dy", "w", "mask")}
    every_plan(cuda, "conv2d_backward_data", data, "dx", a["x"].shape, dtype, **how, **window)
    filters = {"x": a["x"], "dy": a["dy"]}
    every_plan(cuda, "conv2d_backward_filter", filters, "dw", a["w"].shape, "float32", **how, **window)


@PRECISIONS
@LAYOUTS
@pytest.mark.parametrize("case", ["3x3", "images", "first layer", "1x1 strided"])
def test_no_plan_swallows_a_nan(cuda: Cuda, case: str, layout: str, precision: str) -> None:
    """Where the host has NaN no plan has a number, fused ReLU or not; one that transforms tiles has fewer numbers, and
    eng7, which rounds to bf16 itself, has infinity for NaN, which a loss shows too."""
    a, window, y_shape = layer(case, precision)
    for name in ("x", "dy"):
        a[name] = a[name].copy()
        a[name][0, 1, 2, 2] = np.nan
    dtype = "bfloat16" if precision == "bf16" else "float32"
    a["mask"] = np.abs(a["mask"])  # no unit is dead
    cases: list[tuple[Any, ...]] = [
        ("conv2d_forward", "x w b", "y", y_shape, dtype, {"relu": True}),
        ("conv2d_backward_data", "dy w mask", "dx", a["x"].shape, dtype, {}),
        ("conv2d_backward_filter", "x dy", "dw", a["w"].shape, "float32", {}),
    ]
    swallowing = []
    for function, inputs, output, shape, type_, more in cases:
        operands = {name: a[name] for name in inputs.split()}
        for name, found, wanted in by_every_plan(
            cuda, function, operands, output, shape, type_, layout=layout, precision=precision,
            compiled=int(case == "3x3"), **window, **more,
        ):  # fmt: skip
            assert np.isnan(wanted).any()
            if np.isfinite(found.astype(np.float32)[np.isnan(wanted)]).any():
                swallowing.append(f"{function} {name}")
    assert not swallowing


def test_an_unknown_plan_is_refused_by_name(cuda: Cuda) -> None:
    a, window, y_shape = layer("3x3", "fp32")
    arrays: dict[str, Any] = {"x": cuda.put(a["x"]), "w": cuda.put(a["w"]), "y": cuda.empty(y_shape, "float32")}
    with pytest.raises(DeviceError, match="no plan 'fast'"):
        cudnn_ops.conv2d_forward(cuda.context, **arrays, **window, algorithm="fast")


def test_deterministic_plans_repeat_their_bits(cuda: Cuda) -> None:
    a, window, _ = layer("3x3", "fp32")
    x, dy = cuda.put(a["x"]), cuda.put(a["dy"])
    arrays = {"x": x, "dy": dy, "dw": cuda.empty(a["w"].shape, "float32")}
    problem = cudnn_ops.problem("conv2d_backward_filter", "fp32", arrays, **window)
    assert cuda.context.plans is not None
    plans = [p for p in cuda.context.plans.algorithms(problem) if p.deterministic]
    assert plans
    for plan in plans:
        results = []
        for _ in range(3):
            dw = cuda.empty(a["w"].shape, "float32")
            workspace = cuda.empty((max(plan.workspace, 1),), "uint8").address
            cudnn_ops.conv2d_backward_filter(
                cuda.context, x=x, dy=dy, dw=dw, **window, algorithm=plan.name, workspace=workspace
            )()
            results.append(cuda.get(dw))
        assert all((r == results[0]).all() for r in results), plan.name


@PRECISIONS
@pytest.mark.parametrize("shape", [(7, 24, 1, 1), (5, 6, 2, 2), (64, 128)])
@pytest.mark.parametrize("relu", [False, True])
def test_linear_layers_are_the_hosts(cuda: Cuda, shape: tuple[int, ...], relu: bool, precision: str) -> None:
    features, out = int(np.prod(shape[1:])), 40
    dtype = "bfloat16" if precision == "bf16" else "float32"
    x, w, dy = normal(shape, precision, 0), normal((out, features), precision, 1), normal((shape[0], out), precision, 2)
    b, mask = normal((out,), "fp32", 3), normal(shape, precision, 4)
    f32 = {name: a.astype(np.float32) for name, a in {"x": x, "w": w, "dy": dy, "b": b, "mask": mask}.items()}
    y, dx, dw = (np.zeros(s, np.float32) for s in ((shape[0], out), shape, (out, features)))
    OPS["linear_forward"](x=f32["x"], w=f32["w"], b=f32["b"], y=y, relu=relu)
    OPS["linear_backward_data"](dy=f32["dy"], w=f32["w"], mask=f32["mask"], dx=dx)
    OPS["linear_backward_filter"](x=f32["x"], dy=f32["dy"], dw=dw)
    on = cuda.context
    found_y, found_dx = cuda.empty(y.shape, dtype), cuda.empty(dx.shape, dtype)
    found_dw = cuda.empty(dw.shape, "float32")
    blas.linear_forward(on, x=cuda.put(x), w=cuda.put(w), b=cuda.put(b), y=found_y, relu=relu)()
    blas.linear_backward_data(on, dy=cuda.put(dy), w=cuda.put(w), mask=cuda.put(mask), dx=found_dx)()
    blas.linear_backward_filter(on, x=cuda.put(x), dy=cuda.put(dy), dw=found_dw)()
    for found, wanted in ((found_y, y), (found_dx, dx), (found_dw, dw)):
        assert difference(cuda.get(found), wanted) <= LIMITS[precision]


def test_a_linear_layer_refuses_channels_last_images(cuda: Cuda) -> None:
    x, w = cuda.empty((2, 3, 4, 4), "float32", "NHWC"), cuda.empty((5, 48), "float32")
    with pytest.raises(ShapeError, match="lies channels-last"):
        blas.linear_forward(cuda.context, x=x, w=w, y=cuda.empty((2, 5), "float32"))


def test_plans_come_back_from_the_store(cuda: Cuda) -> None:
    a, window, y_shape = layer("3x3", "fp32")
    arrays: dict[str, Any] = {name: cuda.put(a[name], "NHWC") for name in ("x", "w")}
    arrays["y"] = cuda.empty(y_shape, "float32", "NHWC")
    problem = cudnn_ops.problem("conv2d_forward", "tf32", arrays, **window)
    first = cuda.context.plans
    assert first is not None
    known = first.explore(problem, 1)
    second = cudnn_plans.Plans(0, PlanStore(None))
    second.store.entries = first.store.entries
    assert second.algorithms(problem) == known
    wanted = None
    for plan in known:
        workspace = cuda.empty((max(plan.workspace, 1),), "uint8").address
        second.bind(problem, plan.name, workspace)()
        found = cuda.get(arrays["y"])
        wanted = found if wanted is None else wanted
        assert difference(found, wanted) < LIMITS["tf32"]
    second.close()
