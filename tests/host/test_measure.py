"""Measuring ops and the link, on the emulator: what is measured, and that everything is given back."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest

from minidnn import models, nn, optim
from minidnn.device import measure
from minidnn.device.host import HostDevice
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.profile.profile import Algorithm, op_key


def training_step() -> Graph:
    """A network with the ops that read integers: labels and places of maxima."""
    target = Target("native", "tf32", "NHWC")
    sgd = optim.SGD(0.1, momentum=0.9)
    return build(models.smallvgg(), nn.CrossEntropyLoss(), (4, 1, 8, 8), target, optimizer=sgd)


def test_every_op_gets_a_time_and_the_memory_comes_back() -> None:
    graph = training_step()
    work = {op_key(graph, op): (graph, op) for op in graph.ops if not op.function.startswith("conv2d")}
    with HostDevice() as device:
        times = measure.op_times(device, work, 1000)
        assert times.keys() == work.keys()
        assert all(ms >= 0 for ms in times.values())
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


class Clock:
    """Time that passes only where a call says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, result: object = None) -> object:
        self.now += seconds
        return result


def test_what_the_host_costs_is_launches_actions_and_what_a_wait_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every launch takes 10 ms, 13 where the host has waited just before, an event 2 and a wait for one 4."""
    clock, graph = Clock(), training_step()
    monkeypatch.setattr(measure, "perf_counter", clock)
    waited = False

    def launch() -> None:
        nonlocal waited
        clock.passes(0.013 if waited else 0.010)
        waited = False

    def host_sync(stream: object) -> None:
        nonlocal waited
        waited = True

    with HostDevice() as device:
        monkeypatch.setattr(device, "launcher", lambda *arguments: launch)
        monkeypatch.setattr(device, "host_sync", host_sync)
        monkeypatch.setattr(device, "record", lambda stream: clock.passes(0.002, "event"))
        monkeypatch.setattr(device, "host_wait", lambda event: clock.passes(0.004))
        found = measure.host_times(device, graph, {}, 1000)
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
    first = 3 / len(graph.ops)  # of those in a row the first one follows a wait too, but in the first round
    assert found == pytest.approx((10 + first, 2, 3 - first + 4))


def test_every_op_gets_a_time_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SETTLING", 0.01)
    graph = training_step()
    convolutions = [op for op in graph.ops if op.function.startswith("conv2d")]
    with HostDevice() as device:
        profile = device.profile(graph)
        algorithms = {op_key(graph, op): profile.algorithms(graph, op)[0] for op in convolutions}
        with patch.object(device, "launcher", wraps=device.launcher) as launcher:
            times = measure.times_in_place(device, graph, algorithms, 1000)
        assert times.keys() == {op_key(graph, op) for op in graph.ops}
        assert all(ms >= 0 for ms in times.values())
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
    bound = {call.args[1].name: call.args for call in launcher.call_args_list}
    assert bound.keys() == {op.name for op in graph.ops}
    for op in graph.ops:
        _, _, algorithm, operands, workspace, _ = bound[op.name][:6]
        assert algorithm == algorithms.get(op_key(graph, op), Algorithm()).name
        values = [v for value in operands.values() for v in (value if isinstance(value, list) else [value])]
        used = {(v.offset, v.offset + v.tensor.nbytes) for v in values}  # an op in place binds a tensor twice
        if workspace:
            used.add((workspace[0], sum(workspace)))
        assert min(start for start, _ in used) >= 1000
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(used)))


def test_link_rates_are_bytes_over_time() -> None:
    with HostDevice() as device:
        link = measure.link_rates(device)
        assert min(link.d2h, link.h2d) > 1e6
        assert link.latency_ms >= 0
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
