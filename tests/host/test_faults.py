"""Something fails in each action of an iteration in turn: the error names the action, and nothing is left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.data import from_arrays
from minidnn.device.host import HostDevice
from minidnn.device.lanes import INTERLEAVINGS
from minidnn.errors import ArgumentError, DeviceError, OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.run.executor import Executor
from minidnn.run.live import LiveExecutor
from minidnn.schedule.actions import HOST, Alloc, Release

ROWS = 3
MODES = (
    ("base", "planned"), ("keep(m)", "planned"), ("vdnn:all(m)", "planned"), ("vdnn:conv", "live"),
    ("vdnn++:all(m)", "planned"), ("vdnn++:all(m)", "live"),
)  # fmt: skip


def network() -> nn.Sequential:
    """As small as a network with something to offload, to pool and to normalize can be."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 3), input_shape=(2, 8, 8),
    )  # fmt: skip


def batch() -> tuple[np.ndarray, np.ndarray]:
    """The same three samples always."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((ROWS, 2, 8, 8)).astype(np.float32), rng.integers(0, 3, ROWS)


def open_trainer(device: HostDevice, mode: tuple[str, str], net: nn.Sequential | None = None) -> Trainer:
    """A trainer in a mode, with room for late releases where they need some."""
    budget = "64KiB" if mode == ("vdnn++:all(m)", "live") else None
    return Trainer(
        net or network(), nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9), ROWS, memory=mode[0],
        placement=mode[1], device=device, budget=budget,
    )  # fmt: skip


def weights(net: nn.Sequential) -> bytes:
    """All weights and statistics as bytes."""
    return b"".join(value.tobytes() for value in net.state_dict().values())


def train(device: HostDevice, mode: tuple[str, str]) -> bytes:
    """The weights after two steps."""
    with open_trainer(device, mode) as trainer:
        trainer.step(*batch())
        trainer.step(*batch())
        return weights(trainer.net)


@lru_cache
def undisturbed(mode: tuple[str, str]) -> bytes:
    """The weights after two steps where nothing failed before."""
    with HostDevice() as device:
        return train(device, mode)


@contextmanager
def left_clean(interleaving: str, mode: tuple[str, str]) -> Iterator[tuple[HostDevice, nn.Sequential]]:
    """A device and a network to fail with; afterwards all memory is back, the weights are what they were, the same
    device trains as if nothing had been, and no thread stays."""
    net = network().initialize(0)
    start = weights(net)
    with HostDevice(interleaving, 5) as device:
        yield device, net
        info = device.memory_info()
        assert (info.used, info.pinned) == (0, 0)
        assert weights(net) == start
        assert train(device, mode) == undisturbed(mode)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lane")]


def raiser(error: BaseException) -> Callable[[], None]:
    """A step that raises."""

    def step() -> None:
        raise error

    return step


def training_steps(mode: tuple[str, str]) -> list[tuple[str, str]]:
    """(lane, label) of each step that an iteration issues."""
    with HostDevice() as device, open_trainer(device, mode) as trainer:
        return [(action.lane, label) for action, label, _ in trainer.executor(ROWS).steps]


def sabotage(executor: Executor, index: int, step: Callable[[], object]) -> None:
    """Put another step in the place of one."""
    action, label, _ = executor.steps[index]
    executor.steps[index] = (action, label, step)


def fails(
    mode: tuple[str, str], interleaving: str, break_it: Callable[[HostDevice, Executor], object],
    wanted: type[BaseException],
) -> BaseException:  # fmt: skip
    """The error of a step with something broken in it; the trainer is of no use afterwards, the rest is clean."""
    with left_clean(interleaving, mode) as (device, net), open_trainer(device, mode, net) as trainer:
        break_it(device, trainer.executor(ROWS))
        with pytest.raises(wanted) as caught:
            trainer.step(*batch())
        with pytest.raises(ArgumentError, match="failed; close it and open a new one"):
            trainer.step(*batch())
    notes = getattr(caught.value, "__notes__", [])
    assert "in step 0" in notes
    return caught.value


def named(error: BaseException) -> str:
    """What a reader sees: the sentence and the notes."""
    return " ".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_an_error_at_the_issue_of_any_action_names_it(mode: tuple[str, str]) -> None:
    for index, (_, label) in enumerate(training_steps(mode)):
        error = fails(
            mode, INTERLEAVINGS[index % 4],
            lambda _, executor, at=index: sabotage(executor, at, raiser(RuntimeError("broken"))), DeviceError,  # type: ignore[misc]
        )  # fmt: skip
        assert isinstance(error, DeviceError)
        assert error.action == label
        assert str(error) == f"action '{label}' failed: broken"
        assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_an_error_on_a_lane_names_its_own_action_whoever_waits_for_it(mode: tuple[str, str]) -> None:
    for index, (lane, label) in enumerate(training_steps(mode)):
        if lane == HOST or label.startswith(("record", "wait", "release")):
            continue  # what others wait for cannot be replaced, and at the end nobody waits for a wait

        def break_it(device: HostDevice, executor: Executor, at: int = index, lane: str = lane) -> None:
            sabotage(executor, at, lambda: device.lanes.submit(lane, raiser(ValueError("broken"))))

        error = fails(mode, INTERLEAVINGS[index % 4], break_it, DeviceError)
        assert str(error) == f"action '{label}' failed: broken"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_ctrl_c_in_any_action_passes_with_the_action_as_a_note(mode: tuple[str, str]) -> None:
    for index, (_, label) in enumerate(training_steps(mode)):
        error = fails(
            mode, INTERLEAVINGS[index % 4],
            lambda _, executor, at=index: sabotage(executor, at, raiser(KeyboardInterrupt())), KeyboardInterrupt,  # type: ignore[misc]
        )  # fmt: skip
        assert f"in action '{label}'" in named(error)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("mode", [m for m in MODES if m[0].startswith("vdnn++")], ids="-".join)
def test_an_error_in_a_release_worker_reaches_the_caller(mode: tuple[str, str], interleaving: str) -> None:
    with HostDevice() as device, open_trainer(device, mode) as trainer:
        releases = [a for a in trainer.schedule.actions if isinstance(a, Release)]
    assert releases
    for broken in releases:

        def break_it(device: HostDevice, executor: Executor, broken: Release = broken) -> None:
            released = executor.released

            def release(action: Release) -> None:
                if action.label == broken.label:
                    raise OSError("worker died")
                released(action)

            executor.released = release  # type: ignore[method-assign]

        error = fails(mode, interleaving, break_it, DeviceError)
        assert str(error) == f"action '{broken.label}' failed: worker died"


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("mode", [m for m in MODES if m[1] == "live"], ids="-".join)
def test_a_failed_allocation_says_what_is_in_use(mode: tuple[str, str], interleaving: str) -> None:
    with HostDevice() as device, open_trainer(device, mode) as trainer:
        allocations = [a for a in trainer.schedule.actions if isinstance(a, Alloc)]
    for index, alloc in enumerate(allocations):

        def break_it(device: HostDevice, executor: Executor, at: int = index) -> None:
            assert isinstance(executor, LiveExecutor)
            try_allocate, count = executor.pool.try_allocate, iter(range(10_000))
            refused = set()

            def allocate(nbytes: int, role: str = "", label: str = "") -> object:
                if next(count) == at:
                    refused.add(label)
                return None if label in refused else try_allocate(nbytes, role, label)

            executor.pool.try_allocate = allocate  # type: ignore[method-assign, assignment]

        error = fails(mode, interleaving, break_it, OutOfDeviceMemory)
        assert f"in action '{alloc.label}'" in named(error)
        assert "are in use, the largest free block is" in str(error)
        assert "live buffers" in str(error)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_minidnn_s_own_errors_keep_their_type_and_gain_the_action(interleaving: str) -> None:
    mode = ("vdnn:all(m)", "planned")

    def break_it(device: HostDevice, executor: Executor) -> None:
        at = next(i for i, (_, label, _) in enumerate(executor.steps) if label == "3:forward")
        sabotage(executor, at, lambda: device.lanes.submit("compute", raiser(OutOfPinnedMemory("no more"))))

    error = fails(mode, interleaving, break_it, OutOfPinnedMemory)
    assert named(error) == "no more in action '3:forward' in step 0"


class Failing(HostDevice):
    """A device whose n-th request for memory fails."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.count, self.fail_at = 0, fail_at

    def _take(self, nbytes: int, pinned: bool) -> object:  # type: ignore[override]
        self.count += 1
        if self.count == self.fail_at:
            raise MemoryError
        return super()._take(nbytes, pinned)


def test_memory_that_cannot_be_had_at_the_start_leaves_nothing_taken() -> None:
    with HostDevice() as counting, open_trainer(counting, ("vdnn++:all(m)", "planned")):
        requests = len(counting._regions)
    assert requests == 5  # arena, slab, three batch slots
    for fail_at in range(1, requests + 1):
        with Failing(fail_at) as device:
            net = network()
            with pytest.raises(MemoryError):
                open_trainer(device, ("vdnn++:all(m)", "planned"), net)
            assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
            open_trainer(device, ("vdnn++:all(m)", "planned"), net).close()


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_an_error_in_an_evaluation_leaves_the_trainer_usable(interleaving: str) -> None:
    x, y = batch()
    with HostDevice(interleaving) as device, open_trainer(device, ("vdnn++:all(m)", "planned")) as trainer:
        trainer.step(x, y)
        wanted = trainer.predict(x)
        executor = next(e for (p, _), e in trainer.programs.executors.items() if not p.train and not p.loss)
        steps = list(executor.steps)
        sabotage(executor, len(steps) // 2, raiser(RuntimeError("broken")))
        with pytest.raises(DeviceError, match="broken"):
            trainer.predict(x)
        executor.steps = steps
        assert (trainer.predict(x) == wanted).all()
        trainer.step(x, y)
        after = weights(trainer.net)
    assert after == undisturbed(("base", "planned"))


def test_no_lock_of_the_lanes_is_taken_where_an_interrupt_would_keep_it() -> None:
    entered: list[str] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is threading.Condition.__enter__.__code__:
            assert frame.f_back is not None
            entered.append(frame.f_back.f_code.co_filename)

    with HostDevice("threads") as device, open_trainer(device, ("vdnn++:all(m)", "planned")) as trainer:
        sys.setprofile(look)  # of this thread, which interrupts reach
        try:
            trainer.step(*batch())
            device.abandon()
            data = from_arrays("same", batch(), classes=3, test_samples=0)
            trainer.fit(data, 1)
        finally:
            sys.setprofile(None)
    assert set(entered) <= {threading.__file__}  # where a thread is started
