"""Wrong numbers, shapes and objects given to layers, losses, optimizers and units: one sentence that names argument and
value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidnn import nn, optim
from minidnn.arguments import LARGEST, count, image_shape, number, sample_shape
from minidnn.data import open_data
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, CheckpointError, MiniDnnError, ShapeError
from minidnn.graph.build import build
from minidnn.memory.fit import named_fit
from minidnn.models import resolve
from minidnn.plan.registry import parse_mode
from minidnn.profile.gpus import named_gpu
from minidnn.units import GiB, parse_number, parse_shape, parse_size, parse_whole


class Unshowable:
    """An object whose own repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError


HUGE = 10**5000
"""More digits than Python prints."""
NO_NUMBERS: tuple[Any, ...] = (None, True, "x", "3", (), (1,), [2, 2], {}, object(), float("nan"), float("inf"))
NO_COUNTS = (*NO_NUMBERS, 0, -1, 1.5, np.float32(2), LARGEST + 1)

NUMBERS: dict[str, Callable[[Any], object]] = {
    "eps": lambda a: nn.BatchNorm2d(2, eps=a),
    "momentum": lambda a: nn.BatchNorm2d(2, momentum=a),
    "alpha": lambda a: nn.LocalResponseNorm(2, alpha=a),
    "beta": lambda a: nn.LocalResponseNorm(2, beta=a),
    "k": lambda a: nn.LocalResponseNorm(2, k=a),
    "p": nn.Dropout,
    "negative_slope": nn.LeakyReLU,
    "label_smoothing": lambda a: nn.CrossEntropyLoss(label_smoothing=a),
    "lr": optim.SGD,
    "weight_decay": lambda a: optim.Adam(weight_decay=a),
    "momentum ": lambda a: optim.SGD(0.1, momentum=a),
    "dampening": lambda a: optim.SGD(0.1, dampening=a),
    "betas[1]": lambda a: optim.AdamW(betas=(0.9, a)),
    "eps ": lambda a: optim.Adam(eps=a),
    "gamma": lambda a: optim.StepLR(1, a),
    "floor": lambda a: optim.CosineLR(1, a),
}
COUNTS: dict[str, Callable[[Any], object]] = {
    "in_channels": lambda a: nn.Conv2d(a, 2, 3),
    "groups": lambda a: nn.Conv2d(2, 2, 3, groups=a),
    "out_features": lambda a: nn.Linear(2, a),
    "num_features": nn.BatchNorm2d,
    "size": nn.LocalResponseNorm,
    "every": optim.StepLR,
    "total": optim.CosineLR,
    "batch": lambda a: nn.Sequential(nn.ReLU()).summary(a, (1, 2, 2)),
}


def refused(call: Callable[..., object], *values: Any) -> str:
    """What a call says in refusing: one sentence, not too long to read."""
    with pytest.raises(MiniDnnError) as caught:
        call(*values)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    for value in NO_NUMBERS:
        expected = f"{name.strip()} is {value!r}; it must be a number"
        assert refused(NUMBERS[name], value).startswith(expected)


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count_is_refused_by_name(name: str) -> None:
    for value in NO_COUNTS:
        expected = f"{name} is {value!r}; it must be an int of 1 or more"
        assert refused(COUNTS[name], value).startswith(expected)


FLAGS: dict[str, Callable[[Any], object]] = {
    "bias": lambda a: nn.Conv2d(1, 1, 1, bias=a),
    "bias ": lambda a: nn.Linear(1, 1, bias=a),
    "affine": lambda a: nn.BatchNorm2d(1, affine=a),
    "track_running_stats": lambda a: nn.BatchNorm2d(1, track_running_stats=a),
    "ceil_mode": lambda a: nn.MaxPool2d(2, ceil_mode=a),
    "count_include_pad": lambda a: nn.AvgPool2d(2, count_include_pad=a),
    "inplace": lambda a: nn.ReLU(inplace=a),
    "inplace ": lambda a: nn.Dropout(inplace=a),
    "nesterov": lambda a: optim.SGD(0.1, momentum=0.9, nesterov=a),
    "strict": lambda a: nn.Sequential(nn.ReLU()).load_state_dict({}, strict=a),
    "augment": lambda a: open_data("digits", augment=a),
    "deterministic": lambda a: open_device("host", deterministic=a),
}


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_neither_true_nor_false_is_refused_by_name(name: str) -> None:
    for value in (None, "no", "False", 0, 1, np.int64(1), (), [True]):
        assert refused(FLAGS[name], value) == f"{name.strip()} is {value!r}; it must be True or False"
    for value in (True, False, np.True_, np.False_):
        FLAGS[name](value)


@pytest.mark.parametrize("kind", [nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, lambda a: nn.Conv2d(1, 1, a)])
def test_what_is_no_pair_is_refused(kind: Callable[[Any], object]) -> None:
    for value in (None, True, "ab", 1.5, 0, (1,), (1, 2, 3), (1, "2"), float("nan"), {}, object()):
        assert "it must be an int or a pair" in refused(kind, value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert nn.Conv2d(np.int64(2), np.int32(4), np.int64(3)).parameters["weight"].shape == (4, 2, 3, 3)
    assert nn.AdaptiveAvgPool2d(np.int64(2)).infer((1, 1, 5, 5)) == (1, 1, 2, 2)
    assert nn.AdaptiveAvgPool2d((None, 2)).infer((1, 1, 5, 5)) == (1, 1, 5, 2)
    assert optim.SGD(np.float32(0.5), momentum=np.float64(0.9)).attributes()["momentum_factor"] == 0.9
    assert type(optim.SGD(np.float32(0.5)).scalars(0)["lr"]) is float
    assert count(np.uint8(3), "n") == 3
    assert number(np.float16(0.5), "x", 0, 1) == 0.5
    assert parse_size(np.int64(5)) == 5


def test_what_cannot_be_shown_is_refused_all_the_same() -> None:
    for value in (HUGE, Unshowable(), [Unshowable()]):
        calls: tuple[Callable[[Any], object], ...] = (
            *NUMBERS.values(), *COUNTS.values(), nn.MaxPool2d, sample_shape, parse_size, nn.Softmax, nn.Flatten,
            nn.CrossEntropyLoss, nn.Sequential().initialize, nn.Sequential().load_state_dict, open_data,
            lambda a: open_data("synthetic:shape=1x1x1", seed=a), open_device, parse_mode, named_fit, named_gpu,
        )  # fmt: skip
        for call in calls:
            assert f"an unshowable {type(value).__name__}" in refused(call, value)
    assert refused(parse_size, "0.5").startswith("size is '0.5'; write a number and a unit, such as 8GiB")


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "1_0", "٣", " 1", "1 ", "", "0x1", "1e", "."])
def test_what_is_no_number_for_a_reader_is_none(text: str) -> None:
    assert parse_number(text) != parse_number(text)
    assert (parse_number("-1.5e-3"), parse_number("+.5"), parse_number("2.")) == (-0.0015, 0.5, 2.0)


def test_bounds_are_named() -> None:
    assert refused(lambda: number(1, "p", 0, 1)) == "p is 1; it must be a number in [0, 1)"
    assert refused(lambda: number(0, "eps", 0, bounds="()")) == "eps is 0; it must be a number above 0"
    assert refused(lambda: number(-1, "lr", 0)) == "lr is -1; it must be a number of 0 or more"
    assert number(1, "p", 0, 1, "[]") == 1.0
    assert refused(lambda: count(2**31, "n")) == f"n is {2**31}; it must be an int of 1 or more, at most {2**31 - 1}"


@pytest.mark.parametrize("shape", ["abc", 5, (1, -8, 8), (1.0, 8, 8), (1, 8), (), (True, 8, 8), [0], {1, 8}])
def test_a_network_s_input_shape_is_a_shape(shape: Any) -> None:
    assert refused(lambda: nn.Sequential(nn.ReLU(), input_shape=shape)).startswith(f"input_shape is {shape!r}; it must")
    assert refused(lambda: sample_shape(shape)) == refused(lambda: nn.Sequential().summary(1, shape))
    net = nn.Sequential(nn.ReLU(), input_shape=[1, 8, 8])  # type: ignore[arg-type]
    assert net.input_shape == (1, 8, 8)
    refused(lambda: setattr(net, "input_shape", shape))
    assert net.input_shape == (1, 8, 8)
    assert "it must be (C, H, W), each 1 or more" in refused(lambda: image_shape((64,)))


def test_schedules_are_functions_that_give_factors() -> None:
    for wrong in (0, "cosine", True, 0.1, ()):
        assert "it must be a function of the step" in refused(lambda s: optim.SGD(0.1, schedule=s), wrong)
        assert "it must be a function of the step" in refused(optim.WarmUp, 1, wrong)
    assert "betas is 0.9; it must be a pair" in refused(lambda: optim.Adam(betas=0.9))  # type: ignore[arg-type]
    for gives in (-1.0, float("nan"), "x", None):
        bad = optim.SGD(0.1, schedule={7: gives}.get)  # type: ignore[arg-type]
        assert refused(bad.scalars, 7) == f"schedule(7) is {gives!r}; it must be a number of 0 or more"
    assert "schedule(2000) is inf" in refused(lambda: optim.SGD(0.0, schedule=optim.StepLR(1, 10.0)).scalars(2000))


def test_class_weights_are_numbers() -> None:
    for wrong in ("x", {}, object(), [], [[1.0]], [1.0, -1.0], [1.0, float("nan")], [float("inf")], np.ones((40, 40))):
        assert "it must be a number of 0 or more for each class" in refused(nn.CrossEntropyLoss, wrong)
    assert nn.CrossEntropyLoss([0, 1]).weight is not None


def test_a_layer_with_weights_has_one_place() -> None:
    shared, relu = nn.Linear(4, 4), nn.ReLU()
    assert refused(lambda: nn.Sequential(shared, relu, nn.Sequential(shared))) == (
        "child '2.0' is layer '0' again; weights cannot be shared: make another"
    )
    net = nn.Sequential(shared, relu, nn.Linear(4, 4), relu)  # without weights it may come again
    assert "child '4' is layer '0' again" in refused(lambda: net.append(shared))
    assert len(net) == 4
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    inner.append(outer[1])
    assert "weights cannot be shared" in refused(outer.initialize)


def test_a_sequential_is_not_inside_itself() -> None:
    inner = nn.Sequential(nn.ReLU())
    outer = nn.Sequential(nn.Sequential(inner))
    for wrong in (inner, outer):
        assert "append another one" in refused(inner.append, wrong)
    assert len(inner) == 1


@pytest.mark.parametrize("key", [None, 1.5, (), [0], {}, "9", 9, np.float32(1)])
def test_a_child_that_is_not_there_is_named(key: Any) -> None:
    assert refused(lambda: nn.Sequential(nn.ReLU())[key]) == f"child is {key!r}; it must be one of 0"


class Unfinished(nn.Layer):
    """A layer of a user who has just begun."""


class Wrong(nn.Layer):
    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return "x"  # type: ignore[return-value]


class Bare(nn.ReLU):
    def __init__(self) -> None:
        pass


def test_unfinished_layers_of_a_user_are_named() -> None:
    unfinished = nn.Sequential(Unfinished())
    assert refused(lambda: unfinished.summary(1, (4,))) == "layer 0 (Unfinished) does not define infer; a layer must"
    assert "layer 0 (Wrong): infer returned 'x'; it must be" in refused(lambda: nn.Sequential(Wrong()).infer((1, 4)))
    assert refused(lambda: nn.Sequential(Bare())) == "child '0' has no parameters; Bare must call super().__init__()"


def test_initializers_return_the_weight_s_numbers() -> None:
    net = nn.Sequential(nn.Linear(2, 3))
    weight = net[0].parameters["weight"]
    weight.init = lambda rng, shape: np.zeros(3)
    with pytest.raises(ShapeError, match=r"the initializer of 0.weight returned shape \[3\]; it must be \[3, 2\]"):
        net.initialize()
    weight.init = lambda rng, shape: None  # type: ignore[assignment,return-value]
    with pytest.raises(MiniDnnError, match=r"the initializer of 0.weight returned"):
        net.initialize()


@pytest.mark.parametrize("value", ["x", None, [1j, 2j], [[1], [2, 3]], np.array(["1.5"]), object()])
def test_weights_that_are_no_numbers_are_named(value: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False)).initialize()
    before = net.state_dict()
    with pytest.raises(CheckpointError, match=r"weight 0.weight must be an array of real numbers"):
        net.load_state_dict({"0.weight": value})
    assert (net.state_dict()["0.weight"] == before["0.weight"]).all()
    with pytest.raises(ArgumentError, match=r"state is .*; it must be a dict of arrays by name"):
        net.load_state_dict([value])  # type: ignore[arg-type]


def test_a_last_layer_for_other_classes_is_left_out_of_the_state() -> None:
    ten, three = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, n)).initialize(n) for n in (10, 3))
    state, own = ten.state_dict(), three.state_dict()
    said = r"weight 1.weight has shape \[10, 4\]; expected \[3, 4\]: leave it out of the state, and with strict=False"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=said):
            three.load_state_dict(state, strict=strict)
    assert all((value == own[name]).all() for name, value in three.state_dict().items())
    three.load_state_dict({name: value for name, value in state.items() if not name.startswith("1.")}, strict=False)
    found = three.state_dict()
    assert all((found[name] == (state if name.startswith("0.") else own)[name]).all() for name in own)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300])
def test_weights_that_are_not_finite_are_refused_without_a_warning(value: float) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False)).initialize()
    with pytest.raises(CheckpointError, match=r"weight 0.weight has values that are no finite float32; use weights"):
        net.load_state_dict({"0.weight": np.full((2, 2), value)})


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5G", "8EiB", "1e9", "-1", "", "4 4", "9" * 30, "9999999T"])
def test_sizes_beyond_reason_are_refused(text: str) -> None:
    refused(lambda: parse_size(text))
    assert parse_size("1.5GiB") == 3 * GiB // 2


@pytest.mark.parametrize("text", ["9" * 5000, "9999999999", "-1", "1.5", "x", "", "٣", "0"])
def test_whole_numbers_beyond_reason_are_refused(text: str) -> None:
    refused(lambda: parse_whole(text))
    refused(lambda: parse_shape(f"1x{text}x1"))
    assert (parse_whole("64"), parse_shape("3x064x1")) == (64, (3, 64, 1))


def test_names_of_weights_are_strings() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    for name in (None, 1, b"0.weight"):
        said = refused(net.load_state_dict, {name: np.ones((2, 2))})
        assert said == f"state has the name {name!r}; it must be a dict of arrays by name"
    assert refused(resolve, None) == "model is a NoneType; give a name such as 'vgg16', or path/to/file.py:function"
    for weight in ([10**400], np.ones(2, complex)):
        assert "it must be a number of 0 or more for each class" in refused(nn.CrossEntropyLoss, weight)


def test_layers_too_large_for_any_machine_are_counted_exactly() -> None:
    net = nn.Sequential(nn.Conv2d(LARGEST, LARGEST, 3, padding=1, bias=False))
    total = net.summary(1000, (LARGEST, 1, 1)).total
    assert total["parameters"] == 9 * LARGEST**2
    assert total["activation_bytes"] == 4000 * LARGEST


class Silent(nn.Sigmoid):
    def forward(self, scope: Any) -> Any:
        return None


class Shape(nn.Layer):
    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


class Failing(nn.Sigmoid):
    """Its own code fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise KeyError(f"{where}\nof mine")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._fail("infer")
        return super().infer(shape)

    def forward(self, scope: Any) -> Any:
        self._fail("forward")
        return super().forward(scope)

    def backward(self, scope: Any, dy: Any) -> Any:
        self._fail("backward")
        return super().backward(scope, dy)


class Forward(nn.Sigmoid):
    backward = nn.Layer.backward


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Silent(), "layer 1 (Silent): forward returned None; it must return its output, a Tensor"),
        (Shape(), "layer 1 (Shape) does not define forward; a layer must"),
        *((Failing(where), f"layer 1 (Failing): {where} failed with KeyError: '{where}\\nof mine'; mend the layer")
          for where in ("infer", "forward", "backward")),
        (Forward(), "layer 1 (Forward) does not define backward; a layer that is trained must"),
    ],
)  # fmt: skip
def test_layers_of_a_user_that_write_no_graph_are_named(layer: nn.Layer, says: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    assert refused(lambda: build(net, nn.CrossEntropyLoss(), (2, 4), optimizer=optim.SGD(0.1))) == says


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nn.Conv2d(4, 6, 3, groups=4), "groups is 4; it must divide in_channels 4 and out_channels 6"),
        (lambda: nn.Conv2d(1, 1, 3, padding="full"), "padding is 'full'; it must be an int, a pair, 'same' or 'valid'"),
        (lambda: nn.Conv2d(1, 1, 3, 2, "same"), "padding is 'same' with stride (2, 2); 'same' needs stride 1"),
        (lambda: nn.MaxPool2d(2, padding=2), "padding is 2; it must be at most half of kernel_size (2, 2)"),
        (lambda: nn.BatchNorm2d(3).infer((1, 2, 4, 4)), "input has shape [1, 2, 4, 4]; expected 3 channels, got 2"),
        (lambda: nn.BatchNorm2d(3).infer((1, 3)), "input has shape [1, 3]; expected 4 dimensions (N, C, H, W)"),
        (lambda: nn.Sequential().append(None), "layer is None; append takes a layer"),  # type: ignore[arg-type]
        (lambda: nn.Sequential({"1": nn.ReLU()}).append(nn.ReLU()), "child '1' exists already; append to a Sequential"),
        (lambda: nn.Sequential({"a.b": nn.ReLU()}), "child name is 'a.b'; it must be a non-empty string without '.'"),
        (lambda: nn.Sequential({"a+b": nn.ReLU()}), "child name is 'a+b'; it must be a non-empty string without"),
        (lambda: nn.Sequential(nn.ReLU()).summary(), "input_shape is None; give the (C, H, W) of one image"),
        (lambda: optim.SGD(0.1, nesterov=True), "nesterov is True with momentum 0.0 and dampening 0.0; it needs"),
    ],
)  # fmt: skip
def test_what_a_layer_cannot_be_or_take_is_said_by_name(call: Callable[[], object], says: str) -> None:
    assert refused(call).startswith(says)


def test_a_valid_convolution_has_no_padding_and_a_child_is_an_attribute() -> None:
    assert nn.Conv2d(1, 1, 3, padding="valid").infer((1, 1, 5, 5)) == (1, 1, 3, 3)
    net = nn.Sequential({"first": nn.ReLU()})
    assert net.first is net["first"]
    assert list(net) == [net.first]
    with pytest.raises(AttributeError, match="Sequential has no attribute or child 'second'"):
        _ = net.second
