"""The paper's run-time pool: by timing alone it can end in a request that nothing serves. An error, never a hang."""

from __future__ import annotations

import pytest

from minidnn import nn, optim
from minidnn.device.host import HostDevice
from minidnn.errors import OutOfDeviceMemory
from minidnn.graph.build import build
from minidnn.models import create
from minidnn.run.choose import Options, choose
from minidnn.run.live import executor_for
from minidnn.run.slot import BatchSlot, slot_fields
from minidnn.schedule.actions import Schedule
from minidnn.schedule.timings import observe

CASES = [("smallvgg", "all", "best-fit"), ("smallvgg", "all", "first-fit"), ("smallnet", "all", "first-fit")]


def live(model: str, offload_set: str, fit: str, pool_bytes: int | None = None) -> Schedule:
    """The live schedule of a mode; with `pool_bytes`, in a pool of that size."""
    net = create(model)
    assert net.input_shape is not None
    graph = build(net, nn.CrossEntropyLoss(), (32, *net.input_shape), optimizer=optim.SGD(0.1))
    profile = HostDevice().profile(graph)
    mode = f"vdnn++:{offload_set}(m)"
    found = choose(graph, mode, profile, Options(fit=fit, placement="live"))
    if pool_bytes is not None:
        budget = found.persistent_bytes + pool_bytes
        found = choose(graph, mode, profile, Options(fit=fit, placement="live", budget=budget))
    return found


def iterate(schedule: Schedule, interleaving: str, seed: int) -> bool:
    """Run two iterations; whether they came through. Any other error than OutOfDeviceMemory propagates."""
    labels = schedule.graph.tensors["labels"]
    with HostDevice(interleaving, seed) as device:
        slot = BatchSlot(device, slot_fields(schedule.graph, labels.shape, labels.dtype, schedule.graph.batch, 1))
        for name in slot.fields:
            slot.array(name).fill(0)
        pinned = device.pinned(schedule.pinned_bytes)
        executor = executor_for(device, schedule, device.arena(schedule.peak_bytes), pinned)
        try:
            for _ in range(2):
                executor.run(slot)
                executor.finish()
        except OutOfDeviceMemory:
            return False
        return True


@pytest.mark.parametrize(("model", "offload_set", "fit"), CASES)
def test_timing_alone_makes_dead_ends_at_the_searched_size(model: str, offload_set: str, fit: str) -> None:
    observed = observe(live(model, offload_set, fit), fit, timings=200)
    assert 0 < observed.dead_ends < observed.timings
    tight = live(model, offload_set, fit, observed.searched)
    assert tight.pool_bytes == observed.searched
    assert iterate(tight, "eager", 0), "every release at once is the timing that the search has seen"
    outcomes = [iterate(tight, "random", seed) for seed in range(60)] + [iterate(tight, "lazy", 0)]
    assert not all(outcomes), "some timing must end in a dead end"


@pytest.mark.parametrize(("model", "offload_set", "fit"), CASES)
def test_the_observed_size_serves_nearly_every_interleaving(model: str, offload_set: str, fit: str) -> None:
    """It was observed, not proved: an order that was not among the timings tried may need more, and says so."""
    schedule = live(model, offload_set, fit)
    assert schedule.pool_bytes == observe(schedule, fit).nbytes
    assert all(iterate(schedule, name, 0) for name in ("eager", "lazy", "threads"))
    assert sum(iterate(schedule, "random", seed) for seed in range(40)) >= 36


def test_without_release_workers_timing_does_not_matter() -> None:
    net = create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (32, 1, 8, 8), optimizer=optim.SGD(0.1))
    schedule = choose(graph, "vdnn:all(m)", HostDevice().profile(graph), Options(placement="live"))
    observed = observe(schedule, "best-fit")
    assert (observed.timings, observed.dead_ends) == (1, 0)
    assert observed.nbytes == observed.searched
