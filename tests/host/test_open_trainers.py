"""While a trainer is open: parts of its network know it; a `fit` that fails leaves no batch on its way; its log."""

from __future__ import annotations

import copy
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from minidnn import Trainer, models, nn, optim
from minidnn.data import from_arrays
from minidnn.data.dataset import Dataset
from minidnn.device.host import HostDevice
from minidnn.device.lanes import INTERLEAVINGS
from minidnn.errors import ArgumentError, DataError, DeviceError
from minidnn.run.log import Log

ROWS = 16


def opened(net: nn.Sequential, device: HostDevice | str = "host", **options: str) -> Trainer:
    """A trainer of digits' size."""
    return Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9), ROWS, device=device, **options)  # type: ignore[arg-type]


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Invented images."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((ROWS, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, ROWS)


def features(net: nn.Sequential) -> nn.Sequential:
    """The part of that name."""
    part = net.features
    assert isinstance(part, nn.Sequential)
    return part


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_a_closed_device_is_refused(interleaving: str) -> None:
    device, net = HostDevice(interleaving, memory="1GiB"), models.create("smallnet")
    with device, opened(net, device) as trainer:
        trainer.step(*batch())
    with pytest.raises(DeviceError, match="device host is closed; open another"):
        opened(net, device)
    with pytest.raises(DeviceError, match="device host is closed"):
        device.pinned(8)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_a_trainer_whose_device_is_closed_says_so(interleaving: str) -> None:
    device, net = HostDevice(interleaving), models.create("smallnet")
    trainer = opened(net, device)
    device.close()
    with pytest.raises(DeviceError, match="device host is closed; open another"):
        trainer.step(*batch())
    trainer.close()


# --- parts of the network -------------------------------------------------------------------------------------------


def test_a_part_of_a_network_has_the_newest_weights() -> None:
    net = models.create("smallvgg")
    part = net[:1]
    with opened(net) as trainer:
        before = net.state_dict()["features.0.weight"]
        trainer.step(*batch())
        inner = features(net).state_dict()["0.weight"]
        sliced = part.state_dict()["features.0.weight"]
        assert not np.array_equal(inner, before)
        assert np.array_equal(inner, sliced)
        assert np.array_equal(inner, net.state_dict()["features.0.weight"])


def test_weights_that_a_part_takes_are_trained_and_the_others_stay_the_newest() -> None:
    net, other = models.create("smallvgg"), models.create("smallvgg").initialize(9)
    with opened(net) as trainer:
        trainer.step(*batch())
        last = trainer.state_dict()["classifier.0.weight"]
        trainer.step(*batch(1))
        features(net).load_state_dict(features(other).state_dict())
        newest = trainer.state_dict()
        assert np.array_equal(newest["features.0.weight"], other.state_dict()["features.0.weight"])
        assert not np.array_equal(newest["classifier.0.weight"], last)
        logits = trainer.predict(batch()[0])
    assert np.array_equal(net.state_dict()["features.0.weight"], other.state_dict()["features.0.weight"])
    with opened(net) as trainer:
        assert np.array_equal(trainer.predict(batch()[0]), logits)


def test_some_weights_of_an_open_network_are_taken_and_the_others_stay_the_newest() -> None:
    net = models.create("smallvgg")
    with opened(net) as trainer:
        trainer.step(*batch())
        net.load_state_dict({"classifier.0.bias": np.ones(64)}, strict=False)
        before = trainer.state_dict()
        trainer.step(*batch(1))
    with opened(twin := models.create("smallvgg")) as trainer:
        trainer.step(*batch())
        assert np.array_equal(before["features.0.weight"], twin.state_dict()["features.0.weight"])
        assert np.array_equal(before["classifier.0.bias"], np.ones(64))


def test_a_part_of_an_open_network_is_refused_by_another_trainer() -> None:
    net = models.create("smallvgg")
    with opened(net):
        for part in (net, features(net), net[:1]):
            with pytest.raises(ArgumentError, match="net is in another trainer that is still open"):
                Trainer(part, nn.CrossEntropyLoss(), optim.SGD(0.1), ROWS, device="host", input_shape=(1, 8, 8))
    with opened(net) as trainer:
        trainer.step(*batch())


def test_layers_without_weights_may_be_shared_by_open_networks() -> None:
    relu = nn.ReLU()
    first, second = (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), relu, input_shape=(1, 8, 8)) for _ in range(2))
    with opened(first) as one, opened(second) as two:
        assert one.step(*batch()).loss == two.step(*batch()).loss


def test_layers_are_not_appended_to_an_open_network() -> None:
    net = models.create("smallvgg")
    with opened(net), pytest.raises(ArgumentError, match="but a trainer has the network; close that before"):
        features(net).append(nn.ReLU())


@pytest.mark.parametrize("made", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_an_open_network_has_the_newest_weights_and_no_trainer(
    made: Callable[[nn.Sequential], nn.Sequential]
) -> None:
    net = models.create("smallvgg")
    with opened(net) as trainer:
        trainer.step(*batch())
        layer = made(features(net)[0])  # type: ignore[arg-type]
        assert np.array_equal(layer.parameters["weight"].materialize("", 0), net.state_dict()["features.0.weight"])
        trainer.step(*batch())
        kept = made(net)
        saved = kept.state_dict()
        assert all(np.array_equal(saved[name], value) for name, value in net.state_dict().items())
        trainer.step(*batch(1))
        with opened(kept) as other:
            other.step(*batch())
    assert not np.array_equal(net.state_dict()["features.0.weight"], saved["features.0.weight"])


def test_a_trainer_that_was_dropped_is_missed_and_its_network_is_free() -> None:
    net = models.create("smallvgg")
    with HostDevice() as device:
        trainer = opened(net, device)
        trainer.step(*batch())
        held = [trainer]
        del trainer
        with pytest.warns(ResourceWarning, match="a trainer was dropped that was not closed; use it in a with"):
            held.clear()
        with opened(net, device) as again:
            again.step(*batch())


# --- a fit that fails -----------------------------------------------------------------------------------------------


class Torn(Dataset):
    """Images of which one cannot be read."""

    input_shape, classes = (1, 8, 8), 10

    def __init__(self) -> None:
        self.x, self.y = (np.concatenate(parts) for parts in zip(*map(batch, range(5)), strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        if 2 * ROWS in indices:
            raise DataError("cannot read image 32")
        x[:], y[:] = self.x[indices], self.y[indices]


@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("memory", ["base", "keep(m)", "vdnn++:all(m)"])
@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_what_was_issued_before_a_fit_failed_is_computed_from_its_own_batch(
    interleaving: str, memory: str, target: str
) -> None:
    good = from_arrays("good", (3 * Torn().x[::-1].copy(), Torn().y), classes=10, test_samples=0)

    def trained(device: HostDevice) -> dict[str, np.ndarray]:
        net = models.create("smallvgg")
        with opened(net, device, memory=memory, target=target) as trainer:
            with pytest.raises(DataError, match="cannot read image 32"):
                trainer.fit(Torn(), 1, shuffle=False)
            assert trainer.step_count == 2
            trainer.fit(good, 1, shuffle=False)
        return net.state_dict()

    with HostDevice() as eager, HostDevice(interleaving, 5) as device:
        wanted, found = trained(eager), trained(device)
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_a_loss_that_is_nan_behind_a_failure_is_seen(tmp_path: Path) -> None:
    torn = Torn()
    torn.x[2 * ROWS - 1] = np.nan  # in the batch that is on its way when the next one cannot be read
    with opened(models.create("smallvgg")) as trainer:
        with pytest.raises(DataError, match="cannot read image 32"):
            trainer.fit(torn, 1, shuffle=False)
        with pytest.raises(ArgumentError, match="trainer stopped in an iteration that failed"):
            trainer.step(*batch())


def test_what_a_user_s_schedule_does_wrong_costs_no_slot() -> None:
    good, wrong = from_arrays("good", (Torn().x, Torn().y), classes=10, test_samples=0), [True]

    def schedule(step: int) -> float:
        return float("nan") if wrong[0] and step % 5 else 1.0

    net = models.create("smallvgg")
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1, schedule=schedule), ROWS, device="host") as trainer:
        for _ in range(5):
            with pytest.raises(ArgumentError, match="it must be a number of 0 or more"):
                trainer.fit(good, 1)
        wrong[0] = False
        assert trainer.fit(good, 1).epochs == 1


# --- the log ----------------------------------------------------------------------------------------------------------


RECORD = {"step": 1, "loss": 12.25, "accuracy": 0.5}


@contextmanager
def full_at(nbytes: int) -> Iterator[None]:
    """Files end there, as on a disk that is full in the middle of a line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_was_torn_ends_before_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step":')
    log = Log(path)
    for step in (7, 8):
        log.write({"step": step})
    log.close()
    assert path.read_text().split("\n") == ['{"step": 0}', '{"step":', '{"step": 7}', '{"step": 8}', ""]


def test_what_cannot_be_written_whole_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.write({"step": 0})
    with full_at(30), pytest.raises(ArgumentError, match=r"log\.jsonl cannot be written: File too large; name another"):
        log.write(RECORD)
    assert path.read_text() == '{"step": 0}\n'
    log.write({"step": 2})
    log.close()
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n'


def test_what_another_run_has_written_to_the_log_is_not_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    one, two = Log(path), Log(path)
    one.write({"step": 0})
    two.write({"step": 0, "run": "b"})
    with full_at(50), pytest.raises(ArgumentError, match="File too large"):
        one.write(RECORD)
    one.close()
    two.close()
    assert path.read_text() == '{"step": 0}\n{"step": 0, "run": "b"}\n'
