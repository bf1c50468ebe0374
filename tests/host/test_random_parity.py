"""Small random networks, of any layer at any place, train as in PyTorch: both targets, both losses, micro-batches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from minidnn import nn, optim
from tests.host.test_parity import sgd
from tests.host.test_random_networks import append_linear, random_layer
from tests.host.torch_reference import Reference, compare_runs, difference

BLOCKS, NETWORKS = 6, 8
TOLERANCE = 1e-9
LAST = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Softmax)


class Whole(Reference):
    """Differences count beside the largest value of all tensors: many a gradient is exactly 0, such as that of a bias
    that moves all logits alike, and what is left of it is rounding."""

    def compare(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        assert found.keys() == wanted.keys()
        scale = max(float(value.abs().max()) for value in wanted.values())
        for name, value in wanted.items():
            assert difference(found[name], value, max(scale, 1e-6)) < TOLERANCE, name


def random_chain(rng: random.Random) -> nn.Sequential:
    """One to eight layers on small images, up to three linear ones, and whatever comes last."""
    net = nn.Sequential(input_shape=(rng.randint(1, 3), rng.randint(5, 12), rng.randint(5, 12)))
    while len(net) < rng.randint(1, 8):
        _, channels, *sides = net.infer((2, *net.input_shape))  # type: ignore[misc]
        layer = rng.choice(LAST)() if rng.random() < 0.2 else random_layer(rng, channels, min(sides))
        if not isinstance(layer, nn.Dropout):  # whose bits are its own
            net.append(layer)
    append_linear(net.append(nn.Flatten()), rng, rng.randint(0, 3), 12, 0.6, lambda: rng.choice(LAST)())
    return net


def try_network(seed: int) -> bool:
    """Train one; False where it has nothing to train."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    net = random_chain(rng).initialize(seed)
    assert net.input_shape is not None
    rows, outputs = rng.randint(2, 5), net.infer((1, *net.input_shape))[1]
    if not list(net.weighted()) or not 2 <= outputs <= 400:
        return False
    squares = rng.random() < 0.3
    batches = [
        (numbers.standard_normal((rows, *net.input_shape)).astype(np.float32),
         numbers.standard_normal((rows, outputs)).astype(np.float32) if squares
         else numbers.integers(0, outputs, rows))
        for _ in range(2)
    ]  # fmt: skip
    alone = any(isinstance(layer, nn.BatchNorm2d) for layer in net.weighted())  # it sees the batch as a whole
    reference = Whole(net, torch.nn.MSELoss() if squares else torch.nn.CrossEntropyLoss(), "fp64")
    compare_runs(
        net, nn.MSELoss() if squares else nn.CrossEntropyLoss(), optim.SGD(0.01), reference,
        sgd(reference.module, lr=0.01), batches, target=rng.choice(("paper", "native")),
        memory=rng.choice(("base", "keep(m)", "vdnn++:all(m)")),
        micro_batch=None if alone or rng.random() < 0.7 else 1,
    )  # fmt: skip
    return True


@pytest.mark.parametrize("block", range(BLOCKS))
def test_networks_of_any_layers_train_as_in_pytorch(block: int) -> None:
    seeds = range(block * NETWORKS, (block + 1) * NETWORKS)
    assert sum(map(try_network, seeds)) > NETWORKS // 2
