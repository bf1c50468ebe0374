"""Training with compressed pinned memory: base's bits in every interleaving, cancelled or done; faults; reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.codec import PackedMemory, pack
from minidnn.device.host import HostDevice
from minidnn.device.lanes import INTERLEAVINGS
from minidnn.errors import ArgumentError, BudgetError, CodecError, DeviceError, MiniDnnError, OutOfPinnedMemory
from minidnn.plan import registry
from minidnn.plan.mode import Policy, Proposals, Request
from minidnn.plan.vdnn import offload_plan
from minidnn.run import adaptive, packing
from minidnn.run.packing import Packer, _Packing
from minidnn.run.program import Purpose
from minidnn.schedule.actions import Compress, Decompress, HostWait, Offload, PartAction, Prefetch, Schedule
from minidnn.schedule.check import check
from tests.host.runs import ROWS, batches, network, reference

MODES = ("vdnn:all(m)", "vdnn++:all(p)", "vdnn++:all(g)", "vdnn++:features.0+features.2+features.3+features.5")


def trainer(device: HostDevice, memory: str = "vdnn++:all(m)", update: str = "each", **options: object) -> Trainer:
    """A trainer of the network of tests.host.runs, as that makes it."""
    settings: dict[str, object] = {"compress": "all", **options}
    return Trainer(
        network(), nn.CrossEntropyLoss(label_smoothing=0.1), optim.SGD(0.1, momentum=0.9, weight_decay=1e-3), max(ROWS),
        memory=memory, device=device, seed=11, micro_batch=4 if update == "micro" else None,
        max_norm=0.5 if update == "clipped" else None, **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def packers(opened: Trainer) -> list[Packer]:
    return [executor.packer for executor in opened.programs.training_executors]


def outcomes(opened: Trainer) -> tuple[int, int]:
    """Tensors whose compression was done, and cancelled."""
    return sum(p.done for p in packers(opened)), sum(p.cancelled for p in packers(opened))


def gives_bases_bits(device: HostDevice, memory: str, update: str = "each", **options: object) -> tuple[int, int]:
    """Train; assert what every run must keep; return how many compressions were done and cancelled."""
    expected = reference(update)
    with device, trainer(device, memory, update, **options) as opened:
        observer = opened.observe_gradients()
        losses = []
        for x, y in batches():
            losses.append(opened.step(x, y).loss)
            assert opened.programs.packed.used == 0
        assert (observer.sha256, tuple(losses)) == (expected.gradients, expected.losses)
        for schedule in opened.programs.schedules.values():
            assert not check(schedule)
        return outcomes(opened)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("memory", MODES)
def test_compression_trains_as_base(memory: str, interleaving: str) -> None:
    done, cancelled = gives_bases_bits(HostDevice(interleaving), memory)
    assert done or interleaving == "lazy"
    assert cancelled or interleaving != "lazy"


@pytest.mark.parametrize("seed", range(12))
def test_compression_trains_as_base_in_random_orders(seed: int) -> None:
    gives_bases_bits(
        HostDevice("random", seed), MODES[seed % len(MODES)], ("each", "clipped", "micro")[seed % 3],
        placement=("planned", "live")[seed % 2], target=("paper", "native")[seed // 2 % 2],
        order=("prefetch-first", "derivative-first")[seed // 4 % 2],
    )  # fmt: skip


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("sync", ["none", "compute", "both"])
def test_any_number_of_slots_and_workers_trains_as_base(
    monkeypatch: pytest.MonkeyPatch, sync: str, interleaving: str
) -> None:
    """With host waits and, as the planners' modes, without."""
    outcomes = set()
    for slots, codecs in ((1, 1), (2, 1), (1, 3), (20, 2)):

        def policy(request: Request, slots: int = slots, codecs: int = codecs) -> Proposals:
            yield replace(offload_plan(request, "all", sync, "m"), slots=slots, codecs=codecs)

        monkeypatch.setitem(cast(dict[str, Policy], registry.POLICIES), "tried", policy)
        done, cancelled = gives_bases_bits(HostDevice(interleaving, slots + codecs), "tried")
        outcomes |= {"done"} if done else set()
        outcomes |= {"cancelled"} if cancelled else set()
    assert outcomes == {"done", "cancelled"} or interleaving in ("eager", "threads")


def test_a_busy_codec_is_cancelled_or_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that take their time are overtaken by the host; those that have begun are waited for."""

    def slowly(words: np.ndarray, memory: PackedMemory) -> object:
        time.sleep(0.002)
        return pack(words, memory=memory)

    monkeypatch.setattr(packing, "pack", slowly)
    done, cancelled = gives_bases_bits(HostDevice("threads"), "vdnn++:all(m)")
    assert done >= 5 * len(ROWS)  # the slots of five tensors are wanted by others
    assert cancelled


def test_the_host_does_not_wait_for_what_it_cancels() -> None:
    """A cancelled unpacking counts as done when the tensor has been copied out, whatever the workers are at."""
    with HostDevice("lazy") as device, trainer(device) as opened:
        opened.step(*batches()[0])
        executor = opened.executor(max(ROWS))
        packs = {(a.host, a.part): a for a in opened.schedule.actions if isinstance(a, Compress)}
        ends = {
            a.host.name: executor.events[a.signal] is executor.events[packs[a.host, a.part].waits[0]]
            for a in opened.schedule.actions
            if isinstance(a, Decompress) and a.signal is not None and (a.host, a.part) in packs
        }  # fmt: skip
        assert sum(ends.values()) == executor.packer.cancelled > 0


def test_either_all_parts_are_packed_or_the_host_has_the_tensor() -> None:
    for _ in range(200):
        state = _Packing()
        start = threading.Barrier(5)
        begun: list[bool] = []
        cancelled: list[bool] = []

        def race(do: object, found: list[bool], start: threading.Barrier = start) -> None:
            start.wait()
            found.append(do())  # type: ignore[operator]

        threads = [threading.Thread(target=race, args=(state.begin, begun)) for _ in range(4)]
        threads.append(threading.Thread(target=race, args=(state.cancel, cancelled)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(begun) == {not cancelled[0]}
        assert state.cancel() == cancelled[0]
        assert state.begin() == begun[0]


def test_pinned_memory_is_what_the_schedule_says_and_less_than_without() -> None:
    found = {}
    for compress in ("off", "all"):
        with HostDevice() as device, trainer(device, compress=compress) as opened:
            opened.step(*batches()[0])
            found[compress] = opened.pinned_bytes
            assert opened.pinned_bytes == opened.schedule.pinned_bytes
            assert device.memory_info().pinned == opened.pinned_bytes + opened.batch_slot_bytes
            report = opened.compression(1.0)
            assert report["pinned_raw_bytes"] == found["off"]
    assert found["all"] < 0.7 * found["off"]
    assert report["packed_bytes"] > 0
    assert report["cpu_share"] > 0


def test_the_report_says_what_was_packed() -> None:
    """Of ReLU's outputs as they are: density and bytes are those of the values."""
    with HostDevice() as device, trainer(device) as opened:
        seen: dict[str, np.ndarray] = {}
        executor = opened.executor(6)
        pinned = opened.programs.pinned
        assert pinned is not None
        assert pinned.array is not None
        for a in opened.schedule.actions:
            if isinstance(a, Prefetch) and a.host.kind == "pinned":
                place = slice(a.host.offset, a.host.offset + a.host.nbytes)
                view = pinned.array[place].view(np.uint32)
                seen[a.host.name] = view
        copies: dict[str, np.ndarray] = {}
        executor.steps = [
            (a, label, partial(_copy_first, step, seen[a.host.name], copies, a.host.name))
            if isinstance(a, Prefetch) and a.host.name in seen else (a, label, step)
            for a, label, step in executor.steps
        ]  # fmt: skip
        opened.step(*batches()[0])
        rows = {row["tensor"]: row for row in opened.compression()["compressed"]}
    assert rows.keys() == set(opened.schedule.plan.compress)
    for name, row in rows.items():
        values = copies[name]
        assert row["raw_bytes"] == values.nbytes
        assert row["density"] == pytest.approx(np.count_nonzero(values) / values.size)
        assert row["ratio"] == row["raw_bytes"] / row["packed_bytes"]


def _copy_first(step: Callable[[], object], view: np.ndarray, copies: dict[str, np.ndarray], name: str) -> None:
    copies[name] = view.copy()
    step()


# -- faults


class Broken(Exception):
    """What a test makes a worker raise."""


def raising(*_: object, **__: object) -> None:
    raise Broken("this worker is broken")


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("work", ["pack", "unpack"])
def test_a_fault_in_a_codec_worker_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, work: str, interleaving: str
) -> None:
    with HostDevice(interleaving) as device:
        with trainer(device) as opened:
            opened.step(*batches()[0])
            monkeypatch.setattr(packing, work, raising)
            label = "compress" if work == "pack" else "decompress"
            with pytest.raises(DeviceError, match=f"'{label} [a-z0-9.]*' failed: this worker is broken") as error:
                opened.step(*batches()[0])
            assert isinstance(error.value.__cause__, Broken)
            assert opened.programs.packed.used == 0
            with pytest.raises(ArgumentError, match="failed"):
                opened.step(*batches()[0])
        info = device.memory_info()
        assert (info.used, info.pinned) == (0, 0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("lane")]


def test_damaged_packed_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(words: np.ndarray, memory: PackedMemory) -> object:
        part = pack(words, memory=memory)
        if part.masks.size:
            part.masks[0] ^= np.uint32(1)
        return part

    monkeypatch.setattr(packing, "pack", damaged)
    with HostDevice() as device, trainer(device) as opened:
        with pytest.raises(CodecError, match="damaged"):
            opened.step(*batches()[0])
        assert opened.programs.packed.used == 0


def test_packed_memory_keeps_its_limit() -> None:
    with HostDevice() as device:
        with trainer(device) as opened:
            opened.step(*batches()[0])
            needed = opened.programs.packed.peak
        with trainer(device, packed_limit=needed) as opened:
            opened.step(*batches()[0])
        with trainer(device, packed_limit=needed - 1) as opened:
            with pytest.raises(BudgetError, match="packed memory"):
                opened.step(*batches()[0])
            assert opened.programs.packed.used == 0


def test_compression_is_off_or_all_or_auto() -> None:
    with HostDevice() as device, pytest.raises(ArgumentError, match=r"compress is 'some'; .* off, all, auto"):
        trainer(device, compress="some")


def test_named_tensors_alone_are_compressed() -> None:
    with HostDevice() as device, trainer(device, compress=("features.2.y", "input")) as opened:
        assert opened.schedule.plan.compress == ("features.2.y",)
        opened.step(*batches()[0])
        assert [row["tensor"] for row in opened.compression()["compressed"]] == ["features.2.y"]


# -- what the waits are for


def mutants(schedule: Schedule) -> dict[str, Schedule]:
    """The schedule without one of the waits that compression needs, each in turn. (What comes back in place is there
    already, whoever writes it again.)"""
    found = {}
    tokens = {a.signal for a in schedule.actions if isinstance(a, PartAction)}
    for i, action in enumerate(schedule.actions):
        if isinstance(action, HostWait) and tokens & set(action.waits):
            following = next(a for a in schedule.actions[i + 1 :] if isinstance(a, (Offload, Prefetch)))
            if isinstance(following, Prefetch) and f"{following.host.name} unpacked" not in schedule.pinned:
                continue
            left = schedule.actions[:i] + schedule.actions[i + 1 :]
            found[f"{following.label} does not wait"] = replace(schedule, actions=left)
    return found


def gradients(device: HostDevice, schedule: Schedule | None = None) -> str:
    with device, trainer(device) as opened:
        if schedule is not None:
            key = (Purpose(train=True), max(ROWS))
            opened.programs.schedules[key] = schedule
            opened.programs.executors.pop(key)
        observer = opened.observe_gradients()
        try:
            for x, y in batches()[:2]:
                opened.step(x, y)
        except MiniDnnError as error:
            return type(error).__name__
        return observer.sha256


def test_each_wait_for_a_codec_is_needed() -> None:
    with HostDevice() as device, trainer(device) as opened:
        schedule = opened.schedule
    good = gradients(HostDevice())
    without = mutants(schedule)
    assert len(without) >= 4
    for name, mutant in without.items():
        assert check(mutant), name
        ways = [HostDevice("lazy"), *(HostDevice("random", seed) for seed in range(24))]
        assert any(gradients(device, mutant) != good for device in ways), name


# -- auto


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_auto_replans_between_iterations_and_keeps_the_bits(
    monkeypatch: pytest.MonkeyPatch, interleaving: str
) -> None:
    monkeypatch.setattr(adaptive, "EVERY", 2)
    expected = reference("each").gradients
    with HostDevice(interleaving) as device, trainer(device, compress="auto") as opened:
        observer = opened.observe_gradients()
        assert opened.adaptive is not None
        first = opened.schedule.plan.compress
        arena = opened.peak_bytes
        for x, y in batches():
            opened.step(x, y)
            assert device.memory_info().used == opened.peak_bytes == arena
            assert opened.pinned_bytes == max(s.pinned_bytes for s in opened.programs.schedules.values())
        choices = opened.adaptive.choices
        assert [choice.step for choice in choices] == [0, 1]
        assert choices[0].compressed == first
        assert choices[1].compressed == opened.schedule.plan.compress
        assert set(choices[1].compressed) < set(first)
        for name in set(first) - set(choices[1].compressed):  # without ReLU nothing is zero
            assert choices[1].density[name] > 0.7
        assert observer.sha256 == expected
        for schedule in opened.programs.schedules.values():
            assert not check(schedule)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_auto_sees_the_density_of_what_it_does_not_compress(
    monkeypatch: pytest.MonkeyPatch, interleaving: str
) -> None:
    monkeypatch.setattr(adaptive, "EVERY", 2)
    with HostDevice(interleaving) as device, trainer(device, compress="auto") as opened:
        for x, y in batches()[:2]:
            opened.step(x, y)
        assert opened.adaptive is not None
        seen = opened.adaptive.choices[-1].density
        assert set(seen) == {name for name in opened.schedule.plan.offload if name != "input"}
        assert all(0 <= share <= 1 for share in seen.values())
        assert seen["features.0.y"] == pytest.approx(0.5, abs=0.2)  # after ReLU


def test_a_refused_slab_leaves_everything_as_it_was() -> None:
    with HostDevice() as device, trainer(device, compress="all") as opened:
        schedules, pinned = opened.programs.schedules, opened.pinned_bytes
        take = device.pinned

        def refuse(nbytes: int) -> object:
            if nbytes > pinned:
                raise OutOfPinnedMemory("no")
            return take(nbytes)

        device.pinned = refuse  # type: ignore[method-assign, assignment]
        assert not adaptive.recompress(opened.programs, ())
        assert opened.programs.schedules is schedules
        assert opened.pinned_bytes == pinned
        executor = opened.executor(opened.batch)  # copies to the slab that there is now
        assert executor.pinned is opened.programs.pinned
        opened.step(*batches()[0])


def test_a_machine_that_refuses_the_old_slab_too_ends_the_run() -> None:
    with HostDevice() as device, trainer(device, compress="all") as opened:

        def refuse(nbytes: int) -> object:
            raise OutOfPinnedMemory(f"no {nbytes}")

        device.pinned = refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(OutOfPinnedMemory, match=f"no {opened.pinned_bytes}"):
            adaptive.recompress(opened.programs, ())
