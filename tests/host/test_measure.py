"""Measuring ops and the link, on the emulator: what is measured, and that everything is given back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from unittest.mock import patch

import pytest

from minidnn import models, nn, optim
from minidnn.device import measure
from minidnn.device.host import HostDevice
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.profile.profile import Algorithm, Link, Shares, op_key
from minidnn.run.loads import Loads


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
    monkeypatch.setattr(measure, "WATCHED", 0.01)
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


def test_a_clock_that_has_not_settled_does_not_count_and_one_that_wanders_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches take 1.3 ms at first; when the card's clock has settled 1.1, but 1.0 for the first rounds that count."""
    clock, graph = Clock(), training_step()
    monkeypatch.setattr(measure, "perf_counter", clock)
    swinging = measure.SETTLING + 0.4 * measure.WATCHED
    began = clock()

    def launch() -> None:
        passed = clock() - began
        clock.passes(0.0013 if passed < measure.SETTLING - 0.1 else 0.0010 if passed < swinging else 0.0011)

    with HostDevice() as device:
        monkeypatch.setattr(device, "launcher", lambda *arguments: launch)
        monkeypatch.setattr(device, "stamp", lambda stream: clock())
        monkeypatch.setattr(device, "elapsed_ms", lambda begin, end: (end - begin) * 1e3)
        times = measure.times_in_place(device, graph, {}, 1000)
    assert times == pytest.approx(dict.fromkeys(times, 1.1))


def test_in_place_the_card_never_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes the host 0.02 ms and the card 0.1 ms: where the queue never runs dry, no op seems to take more."""
    host, graph, card = Clock(), training_step(), 0.0
    monkeypatch.setattr(measure, "perf_counter", host)

    def launch() -> None:
        nonlocal card
        host.passes(0.00002)
        card = max(card, host()) + 0.0001

    def stamp(stream: object) -> float:
        nonlocal card
        card = max(card, host())
        return card

    def wait_until(moment: float) -> None:
        host.passes(max(moment - host(), 0.0))

    with HostDevice() as device:
        monkeypatch.setattr(device, "launcher", lambda *arguments: launch)
        monkeypatch.setattr(device, "stamp", stamp)
        monkeypatch.setattr(device, "record", lambda stream: card)
        monkeypatch.setattr(device, "host_wait", wait_until)
        monkeypatch.setattr(device, "host_sync", lambda stream: wait_until(card))
        monkeypatch.setattr(device, "elapsed_ms", lambda begin, end: (end - begin) * 1e3)
        times = measure.times_in_place(device, graph, {}, 1000)
    assert times == pytest.approx(dict.fromkeys(times, 0.1))


def test_link_rates_are_bytes_over_time() -> None:
    with HostDevice() as device:
        link = measure.link_rates(device)
        assert min(link.d2h, link.h2d) > 1e6
        assert link.latency_ms >= 0
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


def measured_link(times: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> Link:
    """What is measured where a link's copies take these ms, one after the other."""
    monkeypatch.setattr(measure, "PAUSE", 0.0)
    monkeypatch.setattr(measure, "COPY_BYTES", 1024)
    with HostDevice() as device:
        monkeypatch.setattr(device, "elapsed_ms", lambda begin, end: next(times))
        return measure.link_rates(device)


def test_what_else_uses_the_link_does_not_make_it_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = (2.0, 4.0, 5.0, *[0.125] * measure.REPEATS)  # out, back, both, small copies
    rounds = measure.LINK_ROUNDS
    times = iter([ms * (1 if i % 4 == 3 else 3) for i in range(rounds) for ms in alone])  # quiet in every fourth round
    link = measured_link(times, monkeypatch)
    assert link == Link(measure.COPY_BYTES / 2e-3, measure.COPY_BYTES / 4e-3, 0.125, duplex=True)
    assert next(times, None) is None


@pytest.mark.parametrize(("both", "duplex"), [(5.7, True), (5.8, False)])
def test_a_link_is_duplex_where_both_ways_keep_most_of_their_rates(
    both: float, duplex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([3.0, 4.0, both, *[0.1] * measure.REPEATS] * measure.LINK_ROUNDS)
    assert measured_link(times, monkeypatch).duplex is duplex


class Card:
    """Virtual time: launches of 0.5 ms each from 0 on, a copy of 1 ms to the host beside them, and one back behind it.
    Something else doubles the time of both in every other window."""

    def __init__(self, shares: Shares, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shares, self.windows, self.launches = shares, 0, 0
        self.marks: list[list[float]] = []
        self.seen: list[int] = []
        monkeypatch.setattr(device, "launcher", lambda *arguments: self.launch)
        monkeypatch.setattr(device, "stamp", self.stamp)
        monkeypatch.setattr(device, "host_sync", self.host_sync)
        monkeypatch.setattr(device, "elapsed_ms", lambda begin, end: end[0] - begin[0])

    def launch(self) -> None:
        self.launches += 1

    def stamp(self, stream: object) -> list[float]:
        self.marks.append([])
        return self.marks[-1]

    def host_sync(self, stream: object) -> None:
        if not self.marks:
            return
        loads, end, ms = Loads(), 0.5 * self.launches, 1.0 + self.windows % 2
        loads.add(0.0, end, self.shares)
        there = loads.copy_ms(0.0, ms, to_host=True)
        back = there + loads.copy_ms(there, ms, to_host=False)
        for mark, at in zip(self.marks, (0.0, there, there, back, end), strict=True):
            mark.append(at)
        self.seen.append(self.launches)
        self.windows, self.launches, self.marks = self.windows + 1, 0, []


@pytest.mark.parametrize(
    ("true", "found"),
    [
        ((1.0, 1.0), (1.0, 1.0)), ((0.98, 0.99), (1.0, 1.0)), ((0.8, 1.0), (0.8, 1.0)), ((0.5, 0.5), (0.5, 0.5)),
        ((0.3, 0.9), (0.3, 0.9)), ((0.1, 0.1), (0.1, 0.1)), ((0.9, 0.2), (0.9, 0.2)),
    ],
)  # fmt: skip
def test_what_copies_keep_beside_an_op_is_their_time_alone_over_that_beside_it(
    monkeypatch: pytest.MonkeyPatch, true: tuple[float, float], found: tuple[float, float]
) -> None:
    graph = training_step()
    op = next(op for op in graph.ops if op.function == "max_pool2d_forward")
    ways = [(op, Algorithm(ms=0.5))] * 3
    monkeypatch.setattr(measure, "BESIDE_BYTES", 4096)
    with HostDevice() as device:
        with monkeypatch.context() as patch:
            card = Card(Shares(*true), device, patch)
            shares = measure.copy_shares(device, graph, ways, 1000)
        assert shares == [pytest.approx(found)] * 3
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
    alone, beside = card.seen[: measure.REPEATS], card.seen[measure.REPEATS :]
    assert set(alone) == {0}
    assert min(beside) == ceil(2 * measure.OUTLAST / 0.5)


def test_an_op_that_lets_no_copy_through_is_measured_with_so_many_launches_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = training_step()
    op = next(op for op in graph.ops if op.function == "max_pool2d_forward")
    monkeypatch.setattr(measure, "BESIDE_BYTES", 4096)
    with HostDevice() as device, monkeypatch.context() as patch:
        card = Card(Shares(1e-6, 1e-6), device, patch)
        (shares,) = measure.copy_shares(device, graph, [(op, Algorithm(ms=0.5))], 1000)
    assert shares.d2h < 0.03
    assert max(card.seen) == ceil(2 * measure.OUTLAST / 0.5) << measure.DOUBLINGS


@pytest.mark.parametrize("fails", ["pinned", "launch", "copy_out", "copy_in", "host_sync"])
def test_nothing_stays_taken_where_copies_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    graph = training_step()
    op = next(op for op in graph.ops if op.function == "max_pool2d_forward")
    monkeypatch.setattr(measure, "BESIDE_BYTES", 4096)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with HostDevice() as device:
        with monkeypatch.context() as patch:
            if fails == "launch":
                patch.setattr(device, "launcher", lambda *arguments: fail)
            else:
                patch.setattr(device, fails, fail)
            with pytest.raises(KeyboardInterrupt):
                measure.copy_shares(device, graph, [(op, Algorithm(ms=0.5))], 1000)
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
