"""Take any one wait away: training diverges on the emulator, or the checker proves that the wait was not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from minidnn import optim
from minidnn.device.host import HostDevice
from minidnn.errors import MiniDnnError
from minidnn.run.program import Purpose
from minidnn.schedule.actions import Alloc, AwaitReleases, HostSync, HostWait, Schedule, Wait
from minidnn.schedule.check import check
from tests.host.runs import Case, batches

SEEDS = 64
CASES = [
    Case("vdnn:all(m)"), Case("vdnn++:all(m)", target="native"), Case("vdnn++:conv(m)", order="derivative-first"),
    Case("keep(p)"), Case("base(p)", target="native"), Case("base(p)", target="native", precision="bf16"),
]  # fmt: skip


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """The schedule without one of its waits, each in turn."""
    for i, action in enumerate(schedule.actions):
        before, after = schedule.actions[:i], schedule.actions[i + 1 :]
        if isinstance(action, (HostSync, HostWait, Wait, AwaitReleases)):
            yield f"{i} {action.label}", replace(schedule, actions=before + after)
        elif isinstance(action, Alloc) and action.waits:
            yield f"{i} {action.label}", replace(schedule, actions=(*before, replace(action, waits=()), *after))


def outcome(case: Case, schedule: Schedule | None = None) -> object:
    """Losses and gradients of three batches that are issued one behind the other; the error's type where it ends so."""
    with HostDevice(case.interleaving, case.seed) as device:
        try:
            with case.trainer(device) as trainer:
                # Each step has scalars of its own, so that those of another one show.
                trainer.optimizer = replace(trainer.optimizer, schedule=optim.StepLR(1, 0.5))
                if schedule is not None:
                    key = (Purpose(train=True), 6)
                    trainer.programs.schedules[key] = schedule
                    trainer.programs.executors.pop(key)
                observer = trainer.observe_gradients()
                slots = [slot.batch for slot in trainer._slots]
                whole = [batch for batch in batches() if len(batch[0]) == 6]
                issued = [trainer.issue(s, trainer._fill(s, *b)) for s, b in zip(slots, whole, strict=True)]
                return [trainer.settle(pending).loss for pending in issued], observer.sha256
        except MiniDnnError as error:
            return type(error)


def diverges(case: Case, schedule: Schedule, good: object, seeds: int) -> bool:
    """Whether some interleaving does not give the right result."""
    draws = [replace(case, interleaving="random", seed=seed) for seed in range(seeds)]
    return any(outcome(way, schedule) != good for way in [replace(case, interleaving="lazy"), *draws])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.memory}-{case.target}-{case.precision}")
def test_a_removed_wait_shows_or_is_proved_redundant(case: Case) -> None:
    good = outcome(case)
    with HostDevice() as device, case.trainer(device) as trainer:
        schedule = trainer.schedule
    assert not diverges(case, schedule, good, SEEDS)
    shown = 0
    for name, mutant in mutants(schedule):
        needed = bool(check(mutant))
        diverged = diverges(case, mutant, good, SEEDS if needed else 3)
        assert diverged or not needed, f"{name}: the checker wants it, but none of {SEEDS} interleavings shows why"
        assert needed or not diverged, f"{name}: training diverges without it, but the checker finds nothing wrong"
        shown += diverged
    assert shown >= 3
