"""Every kernel but those for pooling against the host's op of the same name: layouts, types, odd shapes, in place, NaN.

The kernels run emulated on the CPU in every test run, and on the GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.errors import ShapeError
from minidnn.ops import map_ops
from tests.cuda.parity import BOTH, LAYOUTS, TOLERANCE, Value, normal, parity
from tests.cuda.support import Place, bf16, difference

# -- sums and normalization --------------------------------------------------------------------------------------------

SHAPES = pytest.mark.parametrize(
    "shape", [(2, 16, 6, 4), (3, 5, 7, 3), (1, 33, 1, 1), (40, 130), (5, 3, 16, 16), (70, 8, 2, 2), (2, 264, 3, 3)]
)


@BOTH
@LAYOUTS
@SHAPES
def test_the_bias_gradient_is_the_hosts(place: Place, shape: tuple[int, ...], layout: str, dtype: str) -> None:
    inputs = {"dy": normal(shape, dtype)}
    parity(place, "bias_backward", inputs, {"db": ((shape[1],), "float32")}, layout, 3e-6)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(4, 16, 6, 4), (3, 5, 7, 3), (9, 40, 1, 1), (20, 16, 9, 8), (30, 24, 7, 7)])
def test_batch_norm_and_its_gradient_are_the_hosts(
    place: Place, shape: tuple[int, ...], layout: str, dtype: str, relu: bool, affine: bool
) -> None:
    c = (shape[1],)
    x = (normal(shape) * 2 + 5 * normal((1, shape[1], 1, 1), seed=9)).astype(numpy_dtype(dtype))
    weights = {"w": normal(c, seed=1), "b": normal(c, seed=2)} if affine else {}
    running = {"running_mean": normal(c, seed=3), "running_var": np.abs(normal(c, seed=4))}
    tolerance = 2e-5 if dtype == "float32" else 8e-3
    outputs = {"y": (shape, dtype), "mean": (c, "float32"), "invstd": (c, "float32"),
               "running_mean": "running_mean", "running_var": "running_var"}  # fmt: skip
    found = parity(
        place, "batch_norm_forward", {"x": x, **weights, **running}, outputs, layout, tolerance,
        momentum=0.1, eps=1e-5, relu=relu,
    )  # fmt: skip
    parity(
        place, "batch_norm_inference", {"x": x, **weights, **running}, {"y": (shape, dtype)}, layout, tolerance,
        eps=1e-5, relu=relu,
    )  # fmt: skip
    y = {"y": found["y"][0]} if relu else {}
    saved = {"x": x, "dy": normal(shape, dtype, 5), "mean": found["mean"][0], "invstd": found["invstd"][0], **y}
    if affine:
        saved["w"] = weights["w"]
    gradients = {"dx": (shape, dtype)}
    if affine:
        gradients |= {"dw": (c, "float32"), "db": (c, "float32")}
    parity(place, "batch_norm_backward", saved, gradients, layout, max(tolerance, 1e-4), relu=relu)


def test_batch_norm_keeps_its_variance_where_the_mean_is_large(place: Place) -> None:
    x = (normal((8, 4, 16, 16)) + 1000).astype(np.float32)
    outputs = {"y": (x.shape, "float32"), "mean": ((4,), "float32"), "invstd": ((4,), "float32")}
    found = parity(place, "batch_norm_forward", {"x": x}, outputs, "NHWC", 1e-3, momentum=0.1, eps=1e-5)
    assert difference(found["invstd"][0], 1 / x.astype(np.float64).std(axis=(0, 2, 3))) < 1e-4


@BOTH
@LAYOUTS
@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (5, (2, 40, 9, 9)), (5, (3, 8, 5, 5)), (5, (1, 42, 3, 4)), (1, (1, 3, 4, 4)), (4, (1, 65, 2, 3)),
        (33, (1, 70, 3, 3)), (3, (1, 2, 8, 9)),
    ],
)
def test_local_response_normalization_is_the_hosts(
    place: Place, size: int, shape: tuple[int, ...], layout: str, dtype: str
) -> None:
    attributes: dict[str, Any] = {"size": size, "alpha": 0.5, "beta": 0.75, "k": 2.0}
    x = normal(shape, dtype)
    outputs = {"y": (shape, dtype), "scale": (shape, "float32")}
    found = parity(
        place, "local_response_norm_forward", {"x": x}, outputs, layout, TOLERANCE[dtype], **attributes
    )
    saved = {"x": x, "y": found["y"][0], "scale": found["scale"][0], "dy": normal(shape, dtype, 1)}
    parity(place, "local_response_norm_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype], **attributes)


# -- element-wise ------------------------------------------------------------------------------------------------------


@BOTH
@LAYOUTS
@pytest.mark.parametrize("function", ["relu", "leaky_relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (3, 8, 8, 16)])
def test_activations_and_their_gradients_are_the_hosts(
    place: Place, function: str, shape: tuple[int, ...], layout: str, dtype: str
) -> None:
    attributes: dict[str, Any] = {"function": function, "negative_slope": 0.1}
    x = normal(shape, dtype)
    x.flat[3] = np.nan
    output = {"y": (shape, dtype)}
    found = parity(place, "activation_forward", {"x": x}, output, layout, TOLERANCE[dtype], **attributes)
    saved = {"saved": x if function == "leaky_relu" else found["y"][0], "dy": normal(shape, dtype, 1)}
    parity(place, "activation_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype], **attributes)
    parity(place, "activation_backward", saved, {"dx": "dy"}, layout, TOLERANCE[dtype], **attributes)


@BOTH
def test_relu_backward_works_in_place(place: Place, dtype: str) -> None:
    inputs = {"y": np.maximum(normal((3, 7), dtype), 0), "dy": normal((3, 7), dtype, 1)}
    parity(place, "relu_backward", inputs, {"dx": "dy"}, tolerance=0.0)


@BOTH
def test_add_is_the_hosts(place: Place, dtype: str) -> None:
    inputs = {"a": normal((3, 77), dtype), "b": normal((3, 77), dtype, 1)}
    parity(place, "add", inputs, {"y": ((3, 77), dtype)}, tolerance=TOLERANCE[dtype])


def test_operands_of_different_layouts_are_refused(place: Place) -> None:
    a, b = place.empty((2, 3, 4, 5), "float32"), place.empty((2, 3, 4, 5), "float32", "NHWC")
    with pytest.raises(ShapeError, match="add: operands must lie in one layout"):
        map_ops.add(place.context, a=a, b=b, y=a)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 4, 4), (2, 5, 3, 3), (6, 24), (3, 10), (2, 3, 8, 8)])
def test_a_bias_is_added_per_channel(place: Place, shape: tuple[int, ...], relu: bool, layout: str, dtype: str) -> None:
    y, b = normal(shape, dtype), normal((shape[1],), seed=1)
    wanted = y.astype(np.float32) + b.reshape(1, -1, *[1] * (len(shape) - 2))
    array = place.put(y, layout)
    map_ops.bias_relu(place.context, y=array, b=place.put(b), relu=relu)()
    place.check()
    assert difference(place.get(array), np.maximum(wanted, 0) if relu else wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [("NCHW", "NHWC"), ("NHWC", "NCHW"), ("NCHW", "NCHW")])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 9, 8), (3, 3, 17, 19), (1, 70, 5, 13), (2, 16, 7, 7), (3, 17), (65, 64, 1, 3), (2, 18, 5, 14),
        (1, 4, 40, 32),
    ],
)
def test_layout_and_cast_change_no_value(
    place: Place, shape: tuple[int, ...], before: str, after: str, source: str, target: str
) -> None:
    x = normal(shape, source)
    x.flat[1] = np.nan
    outputs = {"y": (shape, target)}
    parity(place, "layout", {"x": x}, outputs, layouts={"x": before, "y": after}, tolerance=0.0)


# -- dropout -----------------------------------------------------------------------------------------------------------


def scalars(**named: float) -> np.ndarray:
    """The step scalars."""
    from minidnn.graph.op import SCALARS

    values = np.zeros(16)
    for name, value in named.items():
        values[SCALARS.index(name)] = value
    return values


@BOTH
@LAYOUTS
@pytest.mark.parametrize("shape", [(3, 70), (2, 8, 6, 6), (2, 5, 3, 3), (1, 12, 2, 2)])
def test_dropout_draws_the_hosts_bits(place: Place, shape: tuple[int, ...], layout: str, dtype: str) -> None:
    step = scalars(step=7, micro_step=1, seed_low=0xDEADBEEF, seed_high=0x12345678)
    x = normal(shape, dtype)
    for name, out, argument in (("dropout_forward", "y", "x"), ("dropout_backward", "dx", "dy")):
        found = parity(
            place, name, {argument: x, "scalars": step}, {out: (shape, dtype)}, layout, TOLERANCE[dtype], p=0.3, op=5
        )
        kept = found[out][0] != 0
        assert 0 < kept.mean() < 1
        parity(place, name, {argument: x, "scalars": step}, {out: argument}, layout, TOLERANCE[dtype], p=0.3, op=5)


# -- softmax and losses ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["few rows", "many rows"])
def many(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows count as many from two on, or from so many on as they do, and few blocks share them."""
    most: dict[str, Any] = {"MANY_ROWS": 2, "ROW_BLOCKS": 2} if request.param else {}
    with patch.multiple(map_ops, **most) if most else nullcontext():
        yield


@BOTH
@LAYOUTS
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("shape", [(3, 10), (2, 1000), (2, 1024), (11, 33), (2, 21, 3, 5)])
def test_softmax_and_its_gradient_are_the_hosts(place: Place, shape: tuple[int, ...], layout: str, dtype: str) -> None:
    x = (normal(shape) * 5).astype(numpy_dtype(dtype))
    found = parity(place, "softmax_forward", {"x": x}, {"y": (shape, dtype)}, layout, TOLERANCE[dtype])
    saved = {"y": found["y"][0], "dy": normal(shape, dtype, 1)}
    parity(place, "softmax_backward", saved, {"dx": (shape, dtype)}, layout, TOLERANCE[dtype])


@BOTH
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 10), (3, 1000), (4, 3, 2, 5)])
def test_cross_entropy_and_its_gradient_are_the_hosts(
    place: Place, shape: tuple[int, ...], weighted: bool, smoothing: float, dtype: str
) -> None:
    x = (normal(shape) * 3).astype(numpy_dtype(dtype))
    classes = x[0].size  # a flattened image is a view
    labels = np.random.default_rng(1).integers(0, classes, shape[0])
    labels[0] = int(x[0].astype(np.float32).argmax())
    weight = {"class_weight": np.abs(normal((classes,), seed=2))} if weighted else {}
    if weighted:
        weight["class_weight"][labels[1]] = 0
    inputs = {"labels": labels, "scalars": scalars(inverse_weight=0.37), **weight}
    outputs = {"loss": ((2,), "float32")}
    found = parity(
        place, "cross_entropy_forward", {"x": x, **inputs}, outputs | {"y": "x"}, "NCHW",
        TOLERANCE[dtype], label_smoothing=smoothing,
    )  # fmt: skip
    assert found["loss"][0][1] >= 1
    parity(
        place, "cross_entropy_backward", {"y": found["y"][0], **inputs}, {"dx": (shape, dtype)}, "NCHW",
        TOLERANCE[dtype], label_smoothing=smoothing,
    )  # fmt: skip


@BOTH
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("classes", [33, 40])
def test_the_first_largest_logit_is_the_prediction(place: Place, classes: int, dtype: str) -> None:
    """Equal ones, NaN, and rows of infinities: as NumPy's argmax has it."""
    x = np.round(normal((12, classes)), 0).astype(numpy_dtype(dtype))
    x[:6, 7] = x[:6, 20] = 50  # the label's is the first of two, then the second
    x[2:4, 25], x[4, 3], x[5, 20], x[5, 30] = np.nan, np.nan, np.nan, np.nan
    x[6:8] = -np.inf
    x[8:10, 7], x[9, 20] = np.inf, np.inf
    x[10, 7] = x[10, 20] = x[11, 2] = x[11, 7] = np.nan
    for labels in ([7, 20, 7, 25, 7, 20, 0, 1, 7, 20, 7, 7], [20, 7, 25, 7, 3, 30, 1, 0, 20, 7, 20, 2]):
        inputs = {"labels": np.array(labels), "scalars": scalars(inverse_weight=1)}
        outputs = {"y": (x.shape, dtype), "loss": ((2,), "float32")}
        loss = parity(
            place, "cross_entropy_forward", {"x": x, **inputs}, outputs, "NCHW", TOLERANCE[dtype], label_smoothing=0.0
        )["loss"][0]
        assert loss[1] == np.count_nonzero(x.astype(np.float32).argmax(axis=1) == labels) > 3


@pytest.mark.usefixtures("many")
def test_a_label_outside_the_classes_makes_the_loss_nan(place: Place) -> None:
    x, loss = place.put(normal((2, 4))), place.empty((2,), "float32")
    labels, step = place.put(np.array([1, 4])), place.put(scalars(inverse_weight=1))
    map_ops.cross_entropy_forward(place.context, x=x, y=x, labels=labels, loss=loss, scalars=step)()
    assert np.isnan(place.get(loss)[0])


@BOTH
def test_squared_error_and_its_gradient_are_the_hosts(place: Place, dtype: str) -> None:
    inputs = {"x": normal((7, 300), dtype), "target": normal((7, 300), seed=1)}
    inputs["scalars"] = scalars(inverse_weight=1 / 2100)
    parity(place, "mse_forward", inputs, {"loss": ((2,), "float32")})
    parity(place, "mse_backward", inputs, {"dx": ((7, 300), dtype)}, tolerance=TOLERANCE[dtype])


# -- updates -----------------------------------------------------------------------------------------------------------

SIZES = [(3,), (4100,), (7, 5), (16, 3, 3, 3), (9000,)]


@pytest.mark.parametrize("count", [5, 83])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum_factor": 0.9, "dampening": 0.2},
        {"momentum_factor": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.01},
    ],
)
def test_sgd_is_the_hosts(place: Place, step: int, options: dict[str, Any], count: int) -> None:
    shapes = SIZES if count == 5 else [(i % 7 + 1,) for i in range(count)]
    w = [normal(s, seed=i) for i, s in enumerate(shapes)]
    inputs: dict[str, Value] = {"w": w, "dw": [normal(s, seed=i + 100) for i, s in enumerate(shapes)]}
    outputs: dict[str, Value] = {"w": "w", "copy": [(s, "bfloat16") for s in shapes]}
    if "momentum_factor" in options:
        start = np.nan if step == 0 else 0.5  # before the first step the buffer holds nothing
        inputs["momentum"] = [np.full(s, start, np.float32) for s in shapes]
        outputs["momentum"] = "momentum"
    inputs |= {"scalars": scalars(lr=0.1, step=step), "clip": np.array([0.5], np.float32)}
    parity(place, "sgd_update", inputs, outputs, "NHWC", tolerance=5e-3, **options)
    del outputs["copy"]
    parity(place, "sgd_update", inputs, outputs, "NHWC", tolerance=1e-6, **options)


def test_weights_behind_the_last_copy_have_none(place: Place) -> None:
    w = [place.put(normal(s, seed=i)) for i, s in enumerate(SIZES)]
    copies = [place.empty(s, "bfloat16") for s in SIZES[:2]]
    step = place.put(scalars(lr=0.5))
    map_ops.sgd_update(place.context, w=w, dw=[place.put(normal(s)) for s in SIZES], copy=copies, scalars=step)()
    place.check()
    for copy, weight in zip(copies, w, strict=False):
        assert (place.get(copy) == bf16(place.get(weight))).all()
    assert difference(place.get(w[-1]), normal(SIZES[-1], seed=4) - 0.5 * normal(SIZES[-1])) < 1e-6


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("step", [0, 3])
def test_adam_is_the_hosts(place: Place, step: int, decoupled: bool) -> None:
    w = [normal(s, seed=i) for i, s in enumerate(SIZES)]
    inputs: dict[str, Value] = {
        "w": w, "dw": [normal(s, seed=i + 100) for i, s in enumerate(SIZES)],
        "m": [normal(s, seed=i + 200) * bool(step) for i, s in enumerate(SIZES)],
        "v": [np.abs(normal(s, seed=i + 300)) * bool(step) for i, s in enumerate(SIZES)],
        "scalars": scalars(lr=0.01, step=step, correction1=1 - 0.9 ** (step + 1), correction2=1 - 0.999 ** (step + 1)),
    }  # fmt: skip
    outputs = {"w": "w", "m": "m", "v": "v"}
    parity(
        place, "adam_update", inputs, outputs, tolerance=2e-6,
        beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled,
    )  # fmt: skip


def test_gradients_are_accumulated(place: Place) -> None:
    inputs = {name: [normal(s, seed=i + at) for i, s in enumerate(SIZES)] for at, name in ((0, "source"), (9, "total"))}
    parity(place, "accumulate", inputs, {"total": "total"}, tolerance=1e-7)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
@pytest.mark.parametrize("count", [5, 83])
def test_the_clip_factor_is_the_hosts(place: Place, max_norm: float, count: int) -> None:
    shapes = SIZES if count == 5 else [(i % 7 + 1,) for i in range(count)]
    gradients = [normal(s, seed=i) for i, s in enumerate(shapes)]
    parity(place, "clip_factor", {"dw": gradients}, {"clip": ((1,), "float32")}, tolerance=1e-6, max_norm=max_norm)
