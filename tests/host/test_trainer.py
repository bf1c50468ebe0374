"""The trainer as its user meets it: seeds, batches of all sizes, evaluation, prediction, schedules, interrupts."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minidnn import Trainer, nn, optim
from minidnn.data import Data, from_arrays
from minidnn.device.host import HostDevice
from minidnn.device.lanes import INTERLEAVINGS
from minidnn.errors import ArgumentError, NonFiniteLoss


def network(shape: tuple[int, int, int] = (2, 9, 7), width: int = 4, dropout: float = 0.25) -> nn.Sequential:
    """Odd sizes, a norm with statistics, dropout."""
    features = nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(width, 6, 3), nn.ReLU(),
    )  # fmt: skip
    size = int(np.prod(features.infer((1, *shape))))
    return nn.Sequential(features, nn.Flatten(), nn.Dropout(dropout), nn.Linear(size, 4), input_shape=shape)


def data(samples: int = 19, test: int = 7, shape: tuple[int, int, int] = (2, 9, 7)) -> Data:
    """Random images with a label that can be learned."""
    rng = np.random.default_rng(samples)
    images = rng.standard_normal((samples + test, *shape)).astype(np.float32)
    labels = rng.integers(0, 4, samples + test)
    images += labels[:, None, None, None]
    return Data(
        "noise", from_arrays("noise", (images[:samples], labels[:samples]), classes=4, test_samples=0).train,
        from_arrays("noise", (images[samples:], labels[samples:]), classes=4, test_samples=0).train if test else None,
    )  # fmt: skip


def trainer(net: nn.Sequential | None = None, batch: int = 5, **options: Any) -> Trainer:
    """A trainer on the host."""
    loss = options.pop("loss", nn.CrossEntropyLoss())
    optimizer = options.pop("optimizer", optim.SGD(0.05, momentum=0.9))
    return Trainer(net or network(), loss, optimizer, batch, **{"device": "host", "seed": 3, **options})


def state(opened: Trainer) -> dict[str, bytes]:
    """All weights, statistics and optimizer state."""
    return {name: value.tobytes() for name, value in (opened.state_dict() | opened.optimizer_state()).items()}


def fitted(epochs: int = 2, dataset: Data | None = None, **options: Any) -> dict[str, bytes]:
    """The state after some epochs."""
    with trainer(**options) as opened:
        opened.fit(dataset or data(), epochs)
        return state(opened)


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_bits_under_every_interleaving() -> None:
    first = fitted()
    for interleaving, seed in [(i, s) for i in INTERLEAVINGS for s in range(3 if i == "random" else 1)]:
        with HostDevice(interleaving, seed) as device:
            assert fitted(device=device) == first, interleaving
            assert fitted(device=device, memory="vdnn++:all(m)") == first, interleaving


def test_another_seed_gives_other_weights_order_and_dropout() -> None:
    start = network().initialize(3).state_dict()
    seeds = (3, 4, 3 + 2**32)
    assert len({fitted(seed=seed)["3.weight"] for seed in seeds}) == 3
    ordered, dropped = set(), set()
    for seed in seeds:  # from the same weights: first only the order of the data differs, then only the dropout
        net = network(dropout=0)
        net.load_state_dict(start)
        ordered.add(fitted(net=net, seed=seed)["3.weight"])
        net = network()
        net.load_state_dict(start)
        with trainer(net, seed=seed) as opened:
            opened.fit(data(), 1, shuffle=False)
            dropped.add(state(opened)["3.weight"])
    assert len(ordered) == len(dropped) == 3


def test_fitting_twice_is_fitting_longer() -> None:
    with trainer() as opened:
        opened.fit(data(), 1)
        result = opened.fit(data(), 2)
        assert state(opened) == fitted(3)
    assert (result.epochs, result.steps) == (3, 12)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["base", "vdnn++:all(m)"])
@pytest.mark.parametrize(
    ("samples", "test", "batch", "micro"),
    [(19, 7, 5, None), (6, 1, 1, None), (3, 2, 64, None), (10, 10, 5, None), (19, 7, 8, 3), (9, 3, 8, 8), (7, 5, 4, 1)],
)
def test_batches_of_all_sizes_train_and_evaluate(
    samples: int, test: int, batch: int, micro: int | None, memory: str
) -> None:
    dataset = data(samples, test)
    with trainer(batch=batch, micro_batch=micro, memory=memory) as opened:
        result = opened.fit(dataset, 2)
        assert (result.steps, result.images) == (2 * -(-samples // batch), 2 * samples)
        assert dataset.test is not None
        images, labels = np.empty((test, 2, 9, 7), np.float32), np.empty(test, np.int64)
        dataset.test.read(np.arange(test), images, labels)
        logits = opened.predict(images)
        loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
        assert result.metrics["test_loss"] == pytest.approx(loss, rel=1e-5)
        assert result.metrics["test_accuracy"] == (logits.argmax(axis=1) == labels).mean()


@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 13, 8), (2, 8, 31)])
def test_odd_image_sizes_train_alike_in_all_modes(shape: tuple[int, int, int]) -> None:
    results = [
        fitted(net=network(shape, width), dataset=data(9, 2, shape), memory=memory, target=target)
        for width in (3,)
        for memory, target in itertools.product(("base", "vdnn:conv(m)", "vdnn++:all"), ("paper", "native"))
    ]
    assert all(result == results[0] for result in results)


def test_predictions_do_not_depend_on_how_rows_are_grouped() -> None:
    x = np.random.default_rng(0).standard_normal((11, 2, 9, 7)).astype(np.float32)
    with trainer(batch=4) as opened:
        opened.fit(data(), 1)
        whole = opened.predict(x)
        assert whole.shape == (11, 4)
        assert whole.dtype == np.float32
        for rows in (1, 3, 4, 5):
            parts = [opened.predict(x[start : start + rows]) for start in range(0, 11, rows)]
            np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-4, atol=1e-6)


def test_evaluation_weighs_batches_as_pytorch_weighs_the_whole_set() -> None:
    weight = np.array([0.2, 3.0, 1.0, 0.5], np.float32)
    dataset = data(8, 13)
    assert dataset.test is not None
    with trainer(batch=5, loss=nn.CrossEntropyLoss(weight)) as opened:
        images, labels = np.empty((13, 2, 9, 7), np.float32), np.empty(13, np.int64)
        dataset.test.read(np.arange(13), images, labels)
        wanted = torch.nn.functional.cross_entropy(
            torch.from_numpy(opened.predict(images)), torch.from_numpy(labels), torch.from_numpy(weight)
        )
        found = opened.evaluate(dataset)
        assert found["test_loss"] == pytest.approx(wanted.item(), rel=1e-5)
        assert opened.evaluate(dataset.test) == found


def test_a_flat_network_trains() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = np.random.default_rng(0).standard_normal((5, 6)), np.array([0, 1, 2, 0, 1])
    with trainer(net, 5, input_shape=(6,), optimizer=optim.Adam(0.05)) as opened:
        losses = [opened.step(x, y).loss for _ in range(60)]
        assert losses[-1] < 0.1 * losses[0]
        assert opened.step(x, y).accuracy == 1


# -- weights -----------------------------------------------------------------------------------------------------------


def test_the_network_has_the_newest_weights_when_asked_and_at_the_end() -> None:
    net = network()
    with trainer(net) as opened:
        start = net.state_dict()
        opened.fit(data(), 1)
        middle = net.state_dict()
        opened.fit(data(), 1)
        end = opened.state_dict()
    assert (net.state_dict()["3.weight"] == end["3.weight"]).all()
    assert not (start["3.weight"] == middle["3.weight"]).all()
    assert not (middle["3.weight"] == end["3.weight"]).all()
    opened.close()  # again: nothing to do
    with pytest.raises(ArgumentError, match="trainer is closed"):
        opened.predict(np.zeros((1, 2, 9, 7)))


def test_loading_weights_into_an_open_trainer_keeps_its_momentum() -> None:
    with trainer() as opened:
        opened.fit(data(), 1)
        opened.net.load_state_dict(opened.state_dict())
        opened.fit(data(), 1)
        assert state(opened) == fitted(2)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_weights_read_behind_an_issued_step_are_those_after_it(interleaving: str) -> None:
    x, y = np.ones((5, 2, 9, 7), np.float32), np.zeros(5, np.int64)
    found = []
    for early in (True, False):
        with HostDevice(interleaving) as device, trainer(device=device) as opened:
            slot = opened._slots[0].batch
            pending = opened.issue(slot, opened._fill(slot, x, y))
            if not early:
                opened.settle(pending)
            found.append(state(opened))
    assert found[0] == found[1]


def test_observing_gradients_changes_nothing() -> None:
    with trainer(memory="vdnn++:all(m)") as opened:
        schedule, peak = opened.schedule, opened.peak_bytes
        observer = opened.observe_gradients()
        opened.fit(data(), 2)
        assert opened.schedule is schedule
        assert opened.peak_bytes == peak
        assert state(opened) == fitted(2)
        assert observer.steps == 8
        assert list(observer.gradients) == [n for n, _ in opened.net.named_parameters() if "running" not in n]


# -- learning rates ----------------------------------------------------------------------------------------------------


def torch_factors(make: Any, steps: int) -> list[float]:
    """Factors on the learning rate by a PyTorch scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, factors = make(optimizer), []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.StepLR(4, 0.3), lambda o: SCHEDULERS.StepLR(o, 4, 0.3)),
        (optim.CosineLR(12), lambda o: SCHEDULERS.CosineAnnealingLR(o, 12)),
        (optim.CosineLR(12, 0.1), lambda o: SCHEDULERS.CosineAnnealingLR(o, 12, 0.1)),
        (optim.WarmUp(5), lambda o: SCHEDULERS.LinearLR(o, 1 / 5, 1, 4)),
        (
            optim.WarmUp(3, optim.StepLR(2, 0.5)),
            lambda o: SCHEDULERS.SequentialLR(
                o, [SCHEDULERS.LinearLR(o, 1 / 3, 1, 2), SCHEDULERS.StepLR(o, 2, 0.5)], [3]
            ),
        ),
    ],
)
def test_learning_rates_follow_pytorch_s_schedulers(ours: optim.Schedule, theirs: Any) -> None:
    assert [ours(step) for step in range(12)] == pytest.approx(torch_factors(theirs, 12), abs=1e-12)


def test_the_scheduled_rate_is_what_the_weights_get() -> None:
    x, y = np.ones((4, 2, 9, 7), np.float32), np.arange(4)
    with trainer(batch=4, optimizer=optim.SGD(0.5, schedule=optim.StepLR(2, 0.1)), precision="fp64") as opened:
        observer = opened.observe_gradients()
        for rate in (0.5, 0.5, 0.05, 0.05, 0.005):
            before = opened.state_dict()["3.weight"].astype(np.float64)
            opened.step(x, y)
            moved = before - opened.state_dict()["3.weight"]
            np.testing.assert_allclose(moved, rate * observer.gradients["3.weight"], rtol=1e-6, atol=1e-12)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("memory", ["base", "vdnn++:all(m)"])
def test_data_that_are_not_numbers_stop_the_step_that_meets_them(value: float, memory: str) -> None:
    x, y = np.ones((5, 2, 9, 7), np.float32), np.arange(5) % 4
    net = network()
    with HostDevice() as device:
        with trainer(net, device=device, memory=memory) as opened:
            opened.step(x, y)
            good = opened.state_dict()
            x[3, 1, 4, 4] = value
            with pytest.raises(NonFiniteLoss, match="the loss of step 1 is nan; lower the learning rate or check"):
                opened.step(x, y)
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
    assert all((net.state_dict()[name] == array).all() for name, array in good.items())


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupted_epoch_costs_that_epoch_at_most() -> None:
    net = network()

    def sabotage(epoch: int, _: dict[str, float]) -> None:
        if epoch == 2:
            steps = opened.executor(5).steps
            steps[30] = (*steps[30][:2], lambda: os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt), trainer(net) as opened:
        opened.fit(data(), 4, on_epoch=sabotage)
    with trainer() as undisturbed:
        undisturbed.fit(data(), 2)
        assert all((net.state_dict()[name] == value).all() for name, value in undisturbed.state_dict().items())


def test_an_evaluation_that_fails_can_be_repeated_and_training_goes_on() -> None:
    good = data()
    images = np.full((9, 2, 9, 7), np.nan, np.float32)
    poisoned = from_arrays("poisoned", (images, np.arange(9) % 4), test_samples=0)
    with trainer() as opened:
        opened.fit(good, 1)
        before = opened.evaluate(good)
        for _ in range(4):  # more often than there are batch slots
            with pytest.raises(NonFiniteLoss, match="the loss of the evaluation after 4 steps is nan"):
                opened.evaluate(poisoned)
        assert opened.evaluate(good) == before
        opened.fit(good, 1)
        assert state(opened) == fitted(2)


def test_an_evaluation_plans_its_partial_batch_before_it_reads_any() -> None:
    planned: list[set[int]] = []

    class Looking:
        """Images of zeros; at each read, what is planned."""

        input_shape, classes = (2, 9, 7), 4

        def __len__(self) -> int:
            return 7

        def read(self, indices: Any, x_out: Any, y_out: Any) -> None:
            planned.append({rows for purpose, rows in opened.programs.schedules if not purpose.train})
            x_out[...], y_out[...] = 0.0, 0

    with trainer() as opened:
        opened.evaluate(Looking())
    assert all({5, 2} <= rows for rows in planned)


class Interrupting:
    """Data that send a real Ctrl-C to the process from the loader's thread, at one of the reads."""

    classes = 4

    def __init__(self, inner: Any, at: int) -> None:
        self.inner, self.at, self.reads = inner, at, 0
        self.input_shape = inner.input_shape

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, indices: Any, x_out: Any, y_out: Any) -> None:
        self.reads += 1
        if self.reads == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        self.inner.read(indices, x_out, y_out)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("at", [1, 2, 5, 9, 14])
def test_a_real_ctrl_c_gives_all_memory_back_and_keeps_the_weights(interleaving: str, at: int) -> None:
    dataset = data(60, 0)
    net = network()
    with HostDevice(interleaving, at) as device:
        with pytest.raises(KeyboardInterrupt), trainer(net, device=device, memory="vdnn++:all(m)") as opened:
            opened.fit(Interrupting(dataset.train, at), 10)
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
        assert all(np.isfinite(value).all() for value in net.state_dict().values())
        assert fitted(device=device) == fitted()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("lane", "loader"))]


def test_the_log_has_every_step_and_epoch(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with trainer() as opened:
        result = opened.fit(data(), 2, log=log)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps, epochs = [r for r in records if "step" in r], [r for r in records if "epoch" in r]
    assert [r["step"] for r in steps] == list(range(8))
    assert [r["rows"] for r in steps] == [5, 5, 5, 4] * 2
    assert [r["epoch"] for r in epochs] == [1, 2]
    mean = sum(r["loss"] * r["rows"] for r in steps[4:]) / 19
    assert epochs[-1]["train_loss"] == pytest.approx(mean)
    assert result.metrics["train_loss"] == pytest.approx(mean)
