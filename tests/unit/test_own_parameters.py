"""Parameters of a user's own layers: what is none is named, whenever it came among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.errors import ArgumentError
from minidnn.graph.build import build
from minidnn.nn.init import Constant
from minidnn.nn.layer import Parameter


def said(use: Callable[[], object]) -> str:
    """The sentence with which it is refused."""
    with pytest.raises(ArgumentError) as refused:
        use()
    return str(refused.value)


class Holding(nn.Sigmoid):
    """It has something of its own among its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self.parameters = parameters


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"w": np.zeros(2)}, "parameters has array([0., 0.]) for 'w'; it must be a Parameter(shape, init) by name"),
        ({"w": None}, "parameters has None for 'w'; it must be a Parameter(shape, init) by name"),
        ({3: Parameter((2,), Constant(0))}, "for 3; it must be a Parameter(shape, init) by name"),
        ([np.zeros(2)], "parameters is [array([0., 0.])]; it must be a dict of Parameter by name"),
        (None, "parameters is None; it must be a dict of Parameter by name"),
    ],
)
def test_what_is_no_parameter_of_a_layer_is_named(parameters: Any, sentence: str) -> None:
    begun = said(lambda: nn.Sequential(nn.Sequential(nn.ReLU(), Holding(parameters))))
    assert begun.startswith("layer 1 (Holding): ")
    assert begun.endswith(sentence)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Sequential(layer := Holding({})), input_shape=(1, 2, 2))
    layer.parameters = parameters  # after the network was made
    for use in (
        lambda: Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1), 2, device="host"), net.state_dict, net.summary,
        lambda: build(net, nn.CrossEntropyLoss(), (2, 1, 2, 2), optimizer=optim.SGD(0.1)),
    ):  # fmt: skip
        told = said(use)
        assert told.startswith("layer 2.0 (Holding): ")
        assert told.endswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3, Constant(0)), "shape is 3; it must be a tuple of ints, each 1 or more"),
        (((3, 0), Constant(0)), "shape is (3, 0); it must be a tuple of ints, each 1 or more"),
        (((3,), 0), "init is 0; it must be a function of a generator and a shape"),
        (((3,), Constant(0), "weight"), "role is 'weight'; it must be Role.WEIGHT or Role.STATISTIC"),
    ],
)
def test_a_parameter_has_a_shape_and_an_initializer(arguments: Any, sentence: str) -> None:
    assert said(lambda: Parameter(*arguments)) == sentence
