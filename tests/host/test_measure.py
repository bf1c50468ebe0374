"""Measuring ops and the link, on the emulator: what is measured, and that everything is given back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil
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
    assert found == pytest.approx((10, 2, 3 + 4))


def test_a_host_that_meets_the_end_of_the_cards_queue_is_not_what_a_launch_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the queue takes 20 launches; then one takes until the card has computed another: 500 ms."""
    clock, graph, pending = Clock(), training_step(), 0
    assert len(graph.ops) > 20
    monkeypatch.setattr(measure, "perf_counter", clock)

    def launch() -> None:
        nonlocal pending
        clock.passes(0.010 if pending < 20 else 0.5)
        pending = min(pending + 1, 20)

    def host_sync(stream: object) -> None:
        nonlocal pending
        pending = 0

    with HostDevice() as device:
        monkeypatch.setattr(device, "launcher", lambda *arguments: launch)
        monkeypatch.setattr(device, "host_sync", host_sync)
        assert measure.host_times(device, graph, {}, 1000).launch_ms == pytest.approx(10)


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


@pytest.mark.parametrize(("alone", "expected"), [(1.0, (0.8, 1.0)), (1.25, (1.0, 1.0))])
def test_what_copies_keep_beside_an_op_is_their_time_alone_over_that_beside_it(
    monkeypatch: pytest.MonkeyPatch, alone: float, expected: tuple[float, float]
) -> None:
    """Here a copy to the host takes 1.25 ms beside an op, one back 1.01, and in every other round twice as long."""
    graph, events = training_step(), list[str]()
    op = next(op for op in graph.ops if op.function == "max_pool2d_forward")
    ways = [(op, Algorithm(ms=0.5))] * 3
    monkeypatch.setattr(measure, "BESIDE_BYTES", 4096)
    with HostDevice() as device:
        launcher, copy_out, copy_in, elapsed = device.launcher, device.copy_out, device.copy_in, device.elapsed_ms

        def seen(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def do(*arguments: object) -> object:
                events.append(name)
                return call(*arguments)

            return do

        def elapsed_ms(begin: object, end: object) -> float:
            assert elapsed(begin, end) >= 0
            times.append(None)
            to_host, window = len(times) % 2, (len(times) - 1) // 2
            if window < measure.REPEATS:
                return alone
            slow = 1 + (window - measure.REPEATS) // len(ways) % 2
            return (1.25 if to_host else 1.01) * slow

        times: list[None] = []
        monkeypatch.setattr(device, "launcher", lambda *arguments: seen("launch", launcher(*arguments)))
        monkeypatch.setattr(device, "copy_out", seen("out", copy_out))
        monkeypatch.setattr(device, "copy_in", seen("in", copy_in))
        monkeypatch.setattr(device, "elapsed_ms", elapsed_ms)
        assert measure.copy_shares(device, graph, ways, 1000) == [expected] * 3
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
    beside = events[2 * measure.REPEATS :]
    count = ceil(2 * alone * measure.OUTLAST / 0.5)
    assert beside == ["launch", "out", "in", *["launch"] * (count - 1)] * (3 * measure.ROUNDS)
