"""Small random networks in random modes and budgets, under seeded interleavings: a failing seed replays exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.host import HostDevice
from minidnn.device.lanes import Lanes
from minidnn.errors import BudgetError
from minidnn.plan.plan import ORDERS
from minidnn.schedule.check import check
from tests.host.runs import MODES

BLOCKS = 8
NETWORKS, INTERLEAVINGS = 48, 4
SOAK_NETWORKS, SOAK_INTERLEAVINGS = 5000, 20
ANYWHERE = [mode for mode in MODES if ":features" not in mode]
"""The modes that name no layer."""
Batch = tuple[np.ndarray, np.ndarray]


def random_network(rng: random.Random) -> nn.Sequential:
    """Two to nine layers on small images of odd sizes, then one to three linear ones."""
    channels, high, wide = rng.randint(1, 3), rng.randint(5, 12), rng.randint(5, 12)
    net = nn.Sequential(input_shape=(channels, high, wide))
    for _ in range(rng.randint(2, 9)):
        shape = net.infer((2, *net.input_shape)) if len(net) else (2, *net.input_shape)  # type: ignore[misc]
        layer = random_layer(rng, shape[1], min(shape[2:]))
        net.append(layer)
    append_linear(net.append(nn.Flatten()), rng, rng.randint(0, 2), 20, 0.7, nn.ReLU)
    return net.append(nn.Linear(net.infer((2, *net.input_shape))[1], 3))  # type: ignore[misc]


def append_linear(
    net: nn.Sequential, rng: random.Random, count: int, widest: int, share: float, activation: Callable[[], nn.Layer]
) -> None:  # fmt: skip
    """So many linear layers of random widths; behind that share of them an activation."""
    for _ in range(count):
        features = net.infer((2, *net.input_shape))[1]  # type: ignore[misc]
        net.append(nn.Linear(features, rng.randint(2, widest), bias=rng.random() < 0.8))
        if rng.random() < share:
            net.append(activation())


def random_layer(rng: random.Random, channels: int, side: int) -> nn.Layer:
    """One that takes images of so many channels and at least that size."""
    kind = rng.choice(("conv", "conv", "conv", "relu", "relu", "pool", "norm", "other"))
    if kind == "conv":
        groups = rng.choice([g for g in (1, 2, 3) if channels % g == 0])
        kernel = rng.choice((1, 3, 3, 5))
        return nn.Conv2d(
            channels, groups * rng.randint(1, 6), kernel, rng.choice((1, 1, 2)), kernel // 2, 1, groups,
            rng.random() < 0.7,
        )  # fmt: skip
    if kind == "pool" and side >= 4:
        return rng.choice((nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)))
    if kind == "norm":
        return rng.choice((nn.BatchNorm2d(channels), nn.LocalResponseNorm(3)))
    if kind == "other":
        return rng.choice((nn.Dropout(0.3), nn.LeakyReLU(), nn.Tanh(), nn.AdaptiveAvgPool2d(rng.randint(1, side))))
    return nn.ReLU()


def train(trainer: Trainer, start: dict[str, np.ndarray], batches: list[Batch]) -> bytes:
    """Two steps from the start: all gradients, then the weights, as bytes."""
    trainer.net.load_state_dict(start)
    trainer.weights.reset()
    trainer.step_count = 0
    observer = trainer.observe_gradients()
    seen = b""
    for x, y in batches:
        trainer.step(x, y)
        seen += b"".join(g.tobytes() for g in observer.gradients.values())
    trainer.programs.forget(observer)
    return seen + b"".join(value.tobytes() for value in trainer.state_dict().values())


def try_network(seed: int, interleavings: int) -> None:
    """One network: base, then a random mode within a random budget, under so many interleavings."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    net = random_network(rng).initialize(seed)
    assert net.input_shape is not None
    start = net.state_dict()
    rows = rng.randint(2, 5)
    batches = [
        (numbers.standard_normal((n, *net.input_shape)).astype(np.float32), numbers.integers(0, 3, n))
        for n in (rows, rng.randint(2, rows))
    ]
    memory, target, order = rng.choice(ANYWHERE), rng.choice(("paper", "native")), rng.choice(ORDERS)
    loss, optimizer = nn.CrossEntropyLoss(), optim.Adam(0.01)
    with Trainer(net, loss, optimizer, rows, device="host", target=target) as trainer:
        wanted = train(trainer, start, batches)
    needed = 0
    try:
        Trainer(net, loss, optimizer, rows, device="host", target=target, memory=memory, order=order, budget=1)
    except BudgetError as error:
        needed = error.needed or 0
    budget = int(needed * rng.choice((1, 1, 1 + rng.random())))
    with (
        HostDevice("random", seed) as device,
        Trainer(
            net, loss, optimizer, rows, device=device, target=target, memory=memory, order=order, budget=budget
        ) as trainer,
    ):
        assert isinstance(device.lanes, Lanes)
        assert not check(trainer.schedule)
        for draw in range(interleavings):
            device.lanes.random.seed(seed * interleavings + draw)
            device.lanes.ahead = draw % 4
            assert train(trainer, start, batches) == wanted, f"network {seed} in {memory}, interleaving {draw}"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_networks_train_as_base(block: int) -> None:
    for seed in range(block, NETWORKS, BLOCKS):
        try_network(seed, INTERLEAVINGS)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_interleavings_train_as_base(block: int) -> None:
    for seed in range(1000 + block, 1000 + SOAK_NETWORKS, 100):
        try_network(seed, SOAK_INTERLEAVINGS)
