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
    """Virtual time of three lanes: launches of `ms` each, of which the `open` part, the first, lets copies pass; copies
    of 1 ms, each way as slow beside them as `shares` say. Something else doubles the time of copies in some windows."""

    def __init__(
        self, shares: Shares, device: HostDevice, monkeypatch: pytest.MonkeyPatch, ms: float = 0.5, open: float = 0.0
    ) -> None:
        self.shares, self.ms, self.open = shares, ms, open
        self.windows, self.end = 0, 0.0
        self.launched: list[int] = []
        self.lanes: dict[str, list[str | list[float]]] = {"compute": [], "d2h": [], "h2d": []}
        monkeypatch.setattr(device, "launcher", lambda *arguments: lambda: self.lanes["compute"].append("launch"))
        for lane, name in (("d2h", "copy_out"), ("h2d", "copy_in")):
            monkeypatch.setattr(device, name, lambda *arguments, queue=self.lanes[lane]: queue.append("copy"))
        monkeypatch.setattr(device, "stream", lambda name: name)
        monkeypatch.setattr(device, "stamp", self.stamp)
        monkeypatch.setattr(device, "host_sync", lambda stream: self.host_sync())
        monkeypatch.setattr(device, "elapsed_ms", lambda begin, end: end[0] - begin[0])

    def stamp(self, lane: str) -> list[float]:
        mark: list[float] = []
        self.lanes[lane].append(mark)
        return mark

    def host_sync(self) -> None:
        if not any(self.lanes.values()):
            return
        loads, self.windows = Loads(), self.windows + 1
        self.launched.append(self.lanes["compute"].count("launch"))
        at = dict.fromkeys(self.lanes, self.end)
        for lane, queue in self.lanes.items():
            for action in queue:
                if action == "launch":
                    loads.add(at[lane] + self.ms * self.open, at[lane] + self.ms, self.shares)
                    at[lane] += self.ms
                elif action == "copy":
                    at[lane] += loads.copy_ms(at[lane], 1.0 + (self.windows % 3 == 1), lane == "d2h")
                else:
                    assert isinstance(action, list)
                    action.append(at[lane])
            queue.clear()
        self.end = max(at.values())


def shares_of(card: Card, device: HostDevice, monkeypatch: pytest.MonkeyPatch, ways: int = 3) -> list[Shares]:
    """What is measured on a card."""
    graph = training_step()
    op = next(op for op in graph.ops if op.function == "max_pool2d_forward")
    monkeypatch.setattr(measure, "BESIDE_BYTES", 4096)
    return measure.copy_shares(device, graph, [(op, Algorithm(ms=card.ms))] * ways, 1000)


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
    with HostDevice() as device:
        with monkeypatch.context() as patch:
            card = Card(Shares(*true), device, patch)
            shares = shares_of(card, device, patch)
        assert shares == [pytest.approx(found)] * 3
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


@pytest.mark.parametrize("ways", [1, 3, 40])
def test_behind_every_op_that_copies_are_measured_beside_others_are_queued(
    monkeypatch: pytest.MonkeyPatch, ways: int
) -> None:
    with HostDevice() as device, monkeypatch.context() as patch:
        card = Card(Shares(0.9, 0.9), device, patch)
        assert shares_of(card, device, patch, ways) == [pytest.approx((0.9, 0.9))] * ways
    launches = (ways + measure.QUEUED) * ceil(measure.BESIDE_MS / card.ms)
    assert card.launched == [0, launches] * (2 * measure.ROUNDS)


@pytest.mark.parametrize("ms", [0.5, 8.0, 30.0])
def test_copies_run_beside_whole_launches_whose_phases_differ(monkeypatch: pytest.MonkeyPatch, ms: float) -> None:
    """The first half of each launch slows no copy: one copy alone would say that none is slowed."""
    with HostDevice() as device, monkeypatch.context() as patch:
        shares = shares_of(Card(Shares(0.5, 0.5), device, patch, ms, open=0.5), device, patch)
    assert shares == [pytest.approx((0.75, 0.75), abs=0.06)] * 3


def test_an_op_beside_which_no_copy_gets_on_has_a_share_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostDevice() as device, monkeypatch.context() as patch:
        shares = shares_of(Card(Shares(1e-6, 1e-6), device, patch), device, patch)
    assert all(0 < kept < 0.05 for share in shares for kept in share)


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
