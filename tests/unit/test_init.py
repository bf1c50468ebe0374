"""Initializers draw what PyTorch's of the same name draw, in distribution, and rules set them for a whole network."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest

from minidnn import nn
from minidnn.errors import ArgumentError
from minidnn.nn.init import Constant, He, Normal, Uniform, Xavier, fans

SHAPE = (64, 32, 3, 3)
FAN_IN, FAN_OUT = 288, 576


def drawn(initializer: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """A weight of SHAPE."""
    values = initializer(np.random.default_rng(7), SHAPE)
    assert values.shape == SHAPE
    assert values.dtype == np.float32
    return values


@pytest.mark.parametrize(
    ("initializer", "std", "bound"),
    [
        (Normal(0, 0.01), 0.01, None), (Uniform(0.3), 0.3 / sqrt(3), 0.3),
        (He(), sqrt(2 / FAN_IN), None), (He(mode="fan_out"), sqrt(2 / FAN_OUT), None),
        (He(slope=sqrt(5), uniform=True), 1 / sqrt(3 * FAN_IN), 1 / sqrt(FAN_IN)),
        (Xavier(), sqrt(2 / (FAN_IN + FAN_OUT)), sqrt(6 / (FAN_IN + FAN_OUT))),
        (Xavier(uniform=False), sqrt(2 / (FAN_IN + FAN_OUT)), None),
    ],
)  # fmt: skip
def test_the_spread_is_that_of_the_papers(
    initializer: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], std: float, bound: float | None
) -> None:
    values = drawn(initializer)
    assert values.std() == pytest.approx(std, rel=0.03)
    assert abs(values.mean()) < 4 * std / sqrt(values.size)
    if bound is not None:
        assert 0.99 * bound < np.abs(values).max() <= bound


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))


def test_rules_set_conv_and_linear_alone_and_forget_what_was_drawn() -> None:
    net = network().initialize()
    before = net.state_dict()
    nn.init.xavier(net)
    after = net.initialize().state_dict()
    bound = sqrt(6 / (8 + 4))
    assert 0.5 * bound < np.abs(after["4.weight"]).max() <= bound
    assert not np.array_equal(before["0.weight"], after["0.weight"])
    assert not after["0.bias"].any()
    assert (after["1.weight"] == 1).all()
    nn.init.constant(net, 0.5)
    assert {name for name, value in net.initialize().state_dict().items() if (value == 0.5).all()} == {
        "0.weight", "0.bias", "4.weight", "4.bias",
    }  # fmt: skip
    nn.init.vgg(net)
    assert 0.003 < net.initialize().state_dict()["4.weight"].std() < 0.03


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constant("x"), "value is 'x'; it must be a number"),  # type: ignore[arg-type]
        (lambda: Normal(std=-1), "std is -1; it must be a number of 0 or more"),
        (lambda: Uniform(float("nan")), "bound is nan; it must be a number of 0 or more"),
        (lambda: He(mode="fan"), "mode is 'fan'; it must be one of fan_in, fan_out"),
        (lambda: nn.init.constant(network(), None), "value is None; it must be a number"),  # type: ignore[arg-type]
        (lambda: fans((3,)), r"weight has shape [3]; fan-based initializers need 2 or more dimensions"),
    ],
)
def test_what_cannot_be_drawn_is_refused_when_it_is_made(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        make()
    assert str(refused.value) == says
