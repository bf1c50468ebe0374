"""Measuring on a device: how long ops take, alone and in an iteration, what the host costs, the rates of the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from time import perf_counter, sleep

import ml_dtypes
import numpy as np

from minidnn.device.base import (
    Device,
    Event,
    Launcher,
    Operand,
    Region,
    Stream,
    by_argument,
    numpy_dtype,
)
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.graph.tensor import Role, Tensor
from minidnn.profile.profile import Algorithm, HostCosts, Link, Shares, op_key
from minidnn.progress import bar
from minidnn.units import MiB, round_up

REPEATS = 5
COPY_BYTES = 128 * MiB
"""One copy of a link measurement: long against its latency, short against everything else."""
LINK_ROUNDS, PAUSE = 12, 0.025
"""So often are the link's copies timed, with pauses (seconds): what else uses a host slows them in bursts, and the
fastest count."""
DUPLEX = 0.7
"""Both directions at once count as duplex where each keeps this share of its rate."""
LEAST = 512
"""So small a copy takes the link's latency and nothing else."""
BESIDE_BYTES, OUTLAST, SHORT = 32 * MiB, 1.5, 0.01
"""Copies beside an op: their size, and how many times their time the op is computed for at first, in launches that
count as SHORT (ms) at least."""
DOUBLINGS = 4
"""So often twice as many launches are tried where copies outlast them; what waits until they end has a share near 0."""
NOTICED = 0.97
"""A copy that keeps more of its rate than this is not slowed: rates that are measured twice differ as much."""
ROUNDS = 3
"""Iterations that are issued to see what a launch costs the host: the first one compiles, and a median forgets it. And
rounds of copies beside ops."""
IN_A_ROW, SHIFT = 16, 5
"""So many launches are issued without a wait: a card's queue has an end, and a host that meets it waits for the card.
In every round it is other launches that follow a wait, and the median forgets that too."""
ISSUES = 64
"""Events that are recorded to see what an action costs the host."""
SETTLING, WATCHED = 2.0, 1.0
"""Seconds of an iteration's work until a card's clock is what its power allows (at first it is slowed by more), and
seconds that are watched then, since it never comes to rest."""
BLOCK = 2**20
_CONTENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "activations": lambda noise: np.maximum(noise, 0.0), "weights": lambda noise: noise, "integers": np.zeros_like
}  # fmt: skip
"""What an op reads, made of normal values and written as bfloat16: two of them are a sound float32 as well."""


def op_times(device: Device, work: Mapping[str, tuple[Graph, Op]], scratch: int) -> dict[str, float]:
    """ms of each of these ops, which have one algorithm without workspace, on random values. `scratch`: bytes that the
    device wants in front of an arena.

    Takes the memory of the largest op for a while. Raises OutOfDeviceMemory where that does not fit.
    """
    stream = device.stream("compute")
    arena = device.arena(max((_places(graph, op, scratch)[1] for graph, op in work.values()), default=scratch))
    times: dict[str, float] = {}
    try:
        with bar("measuring operations", len(work)) as done:
            for key, (graph, op) in work.items():
                times[key] = milliseconds(device, _bound(device, graph, op, scratch, arena, stream), stream)
                done.update()
    finally:
        device.give_back(arena)
    return times


@cache
def noise(dtype: str) -> np.ndarray:
    """A block of bytes: random values of that type; zeros where values are labels or indices."""
    if numpy_dtype(dtype).kind in "iu":
        return np.zeros(BLOCK, np.uint8)
    return np.random.default_rng(0).standard_normal(BLOCK).astype(numpy_dtype(dtype)).view(np.uint8)


def host_times(device: Device, graph: Graph, algorithms: Mapping[str, Algorithm], scratch: int) -> HostCosts:
    """What the host costs in this graph's iteration: a launch on average, an action that launches nothing, and what a
    wait for the device adds. Arguments and errors are those of `times_in_place`."""
    with _in_place(device, graph, _ways(graph, algorithms), scratch) as launches:
        stream = device.stream("compute")

        def launch_ms(waiting: bool) -> float:
            found: list[list[float]] = []
            for i in range(ROUNDS):
                times = []
                for j, launch in enumerate(launches):
                    if waiting or (j + i * SHIFT) % IN_A_ROW == 0:
                        device.host_sync(stream)
                    times.append(_host_ms(launch))
                found.append(times)
            device.host_sync(stream)
            return fmean(map(median, zip(*found, strict=True)))

        in_a_row, after_a_wait = launch_ms(waiting=False), launch_ms(waiting=True)
        action = median(_host_ms(lambda: device.record(stream)) for _ in range(ISSUES))
        waited = median(_host_ms(lambda: device.host_wait(device.record(stream))) for _ in range(ISSUES))
    return HostCosts(in_a_row, action, max(after_a_wait - in_a_row, 0.0) + max(waited - action, 0.0))


def times_in_place(device: Device, graph: Graph, algorithms: Mapping[str, Algorithm], scratch: int) -> dict[str, float]:
    """ms of each op of a graph, by its profile key, in its place in the iteration. `algorithms`: of the ops that have a
    choice. `scratch`: bytes that the device wants in front of an arena.

    A card that computes without pause soon draws all the power that it may, and slows its clock; an op that is measured
    alone is over before. Here all ops run in order until the clock has settled, and on from there. Takes the memory of
    the largest operands; raises OutOfDeviceMemory where that does not fit.
    """
    stream = device.stream("compute")
    rounds: list[list[float]] = []
    queued: list[tuple[float, list[object], Event]] = []

    def finish() -> None:
        passed, stamps, end = queued.pop(0)
        device.host_wait(end)
        if passed >= SETTLING:
            rounds.append([device.elapsed_ms(start, stop) for start, stop in pairwise(stamps)])

    with _in_place(device, graph, _ways(graph, algorithms), scratch) as launches:
        began = perf_counter()
        while (passed := perf_counter() - began) < SETTLING + WATCHED or len(rounds) < REPEATS:
            stamps: list[object] = [device.stamp(stream)]
            for launch in launches:
                launch()
                stamps.append(device.stamp(stream))
            queued.append((passed, stamps, device.record(stream)))
            if len(queued) > 1:  # the next round is queued: the card does not wait for the host between them
                finish()
        finish()
    found: dict[str, list[float]] = {}
    for op, times in zip(graph.ops, zip(*rounds, strict=True), strict=True):
        found.setdefault(op_key(graph, op), []).extend(times)
    return {key: median(times) for key, times in found.items()}


def link_rates(device: Device) -> Link:
    """Rates of pinned copies, one direction at a time, and whether both keep them together: what the link can do, not
    what others leave of it at the moment."""
    outward, inward = device.stream("d2h"), device.stream("h2d")
    rounds = []
    with _copies(device, COPY_BYTES) as (copy_out, copy_in), _copies(device, LEAST) as (least, _):
        out, back = (copy_out, outward), (copy_in, inward)
        for _ in range(LINK_ROUNDS):
            times = [_copied_ms(device, *copies) for copies in ((out,), (back,), (out, back))]
            rounds.append([*times, milliseconds(device, least, outward)])
            sleep(PAUSE)
    d2h, h2d, both, latency = (min(times) for times in zip(*rounds, strict=True))
    return Link(COPY_BYTES / d2h * 1e3, COPY_BYTES / h2d * 1e3, latency, both * DUPLEX <= max(d2h, h2d))


def copy_shares(device: Device, graph: Graph, ways: Sequence[tuple[Op, Algorithm]], scratch: int) -> list[Shares]:
    """What copies keep of their rates beside each of these ops, whose times are known. `scratch`: bytes that the device
    wants in front of an arena.

    A copy each way, one after the other, runs beside launches that outlast both. Whatever else uses the link slows them
    as well: they are repeated in rounds through all ops, and the fastest counts. Takes the memory of the largest
    operands; raises OutOfDeviceMemory or OutOfPinnedMemory where that does not fit.
    """
    compute, out, back = device.stream("compute"), device.stream("d2h"), device.stream("h2d")
    with _in_place(device, graph, ways, scratch) as launches, _copies(device, BESIDE_BYTES) as (copy_out, copy_in):

        def copies_ms(launch: Launcher, count: int) -> tuple[float, float, float]:
            """Of each copy, and by how much both outlasted the launches."""
            if count:
                launch()
            stamps = [device.stamp(out)]
            copy_out()
            stamps.append(device.stamp(out))
            device.wait(back, device.record(out))
            stamps.append(device.stamp(back))
            copy_in()
            stamps.append(device.stamp(back))
            for _ in range(1, count):
                launch()
            end = device.stamp(compute)
            for stream in (back, compute):
                device.host_sync(stream)
            begin, *_, last = stamps
            late = device.elapsed_ms(begin, last) - device.elapsed_ms(begin, end)
            return device.elapsed_ms(*stamps[:2]), device.elapsed_ms(*stamps[2:]), late

        d2h, h2d, _ = (min(times) for times in zip(*(copies_ms(launches[0], 0) for _ in range(REPEATS)), strict=True))
        found = []
        counts = [ceil(OUTLAST * (d2h + h2d) / max(way.ms or 0.0, SHORT)) for _, way in ways]
        most = [count << DOUBLINGS for count in counts]
        with bar("measuring copies beside operations", ROUNDS * len(ways)) as done:
            for _ in range(ROUNDS):
                for i, launch in enumerate(launches):
                    *times, late = copies_ms(launch, counts[i])
                    while late > 0 and counts[i] < most[i]:
                        counts[i] *= 2
                        *times, late = copies_ms(launch, counts[i])
                    found.append(times)
                    done.update()
    shares = []
    for i in range(len(ways)):
        slowed = (min(times) for times in zip(*found[i :: len(ways)], strict=True))
        kept = (alone / ms for alone, ms in zip((d2h, h2d), slowed, strict=True))
        shares.append(Shares(*(1.0 if share > NOTICED else share for share in kept)))
    return shares


@contextmanager
def _copies(device: Device, nbytes: int) -> Iterator[tuple[Launcher, Launcher]]:
    """A copy to the host and one back, each on its stream, of different memory."""
    out, back = device.stream("d2h"), device.stream("h2d")
    with ExitStack() as taken:
        host = device.pinned(2 * nbytes)
        taken.callback(device.give_back, host)
        arena = device.arena(2 * nbytes)
        taken.callback(device.give_back, arena)  # first: it waits for copies that may still run
        yield (
            lambda: device.copy_out(arena, 0, host, 0, nbytes, out),
            lambda: device.copy_in(arena, nbytes, host, nbytes, nbytes, back),
        )


def milliseconds(device: Device, launch: Launcher, stream: Stream) -> float:
    """Median time of a launch, after one that warms up."""
    launch()
    stamps = [device.stamp(stream)]
    for _ in range(REPEATS):
        launch()
        stamps.append(device.stamp(stream))
    device.host_sync(stream)
    return median(device.elapsed_ms(begin, end) for begin, end in pairwise(stamps))


@contextmanager
def _in_place(
    device: Device, graph: Graph, ways: Sequence[tuple[Op, Algorithm]], scratch: int
) -> Iterator[list[Launcher]]:
    """The launches of a graph's ops with these algorithms. What they read is not what the op before wrote but values as
    they are in training, since power depends on them too: activations and gradients of which half are zero (as a ReLU
    leaves them), random weights."""
    stream, spans = device.stream("compute"), {"written": 0} | dict.fromkeys(_CONTENTS, 0)
    layouts = [_spans(graph, op) for op, _ in ways]
    for _, ends in layouts:
        for span, nbytes in ends.items():
            spans[span] = max(spans[span], nbytes)
    starts, end = {}, round_up(scratch, 512)
    for span, nbytes in spans.items():
        starts[span], end = end, end + nbytes
    arena = device.arena(end + max((way.workspace for _, way in ways), default=0))
    try:
        for span, make in _CONTENTS.items():
            block = make(np.random.default_rng(0).standard_normal(BLOCK)).astype(ml_dtypes.bfloat16).view(np.uint8)
            device.repeat(arena, starts[span], spans[span], block)
        launches = []
        for (op, way), (offsets, _) in zip(ways, layouts, strict=True):
            places = {name: starts[span] + offset for name, (span, offset) in offsets.items()}
            workspace = (end, way.workspace) if way.workspace else None
            operands = _operands(graph, op, places)
            launches.append(device.launcher(graph, op, way.name, operands, workspace, arena, stream))
        yield launches
    finally:
        device.give_back(arena)


def _ways(graph: Graph, algorithms: Mapping[str, Algorithm]) -> list[tuple[Op, Algorithm]]:
    """All ops of a graph; those that have a choice with these algorithms."""
    return [(op, algorithms.get(op_key(graph, op), Algorithm())) for op in graph.ops]


def _host_ms(call: Callable[[], object]) -> float:
    """What a call costs the host."""
    began = perf_counter()
    call()
    return (perf_counter() - began) * 1e3


def _places(graph: Graph, op: Op, scratch: int) -> tuple[dict[str, int], int]:
    """Offset of each tensor that the op touches, and where they end."""
    places, end = {}, round_up(scratch, 512)
    for name in op.tensors:
        places[name] = end
        end = round_up(end + graph.tensors[name].nbytes, 512)
    return places, end


def _bound(device: Device, graph: Graph, op: Op, scratch: int, arena: Region, stream: Stream) -> Launcher:
    """The op on random values."""
    places, _ = _places(graph, op, scratch)
    for name, offset in places.items():
        tensor = graph.tensors[name]
        device.repeat(arena, offset, tensor.nbytes, noise(tensor.dtype))
    return device.launcher(graph, op, Algorithm().name, _operands(graph, op, places), None, arena, stream)


def _operands(graph: Graph, op: Op, places: Mapping[str, int]) -> dict[str, Operand | list[Operand]]:
    """The op's arguments at those offsets."""
    return by_argument((argument, Operand(graph.tensors[name], places[name])) for argument, name in op.bindings)


def _content(tensor: Tensor) -> str:
    """Which of the `_CONTENTS` a tensor has that is only read."""
    if numpy_dtype(tensor.dtype).kind in "iu":
        return "integers"
    return "weights" if tensor.role is Role.WEIGHT else "activations"


def _spans(graph: Graph, op: Op) -> tuple[dict[str, tuple[str, int]], dict[str, int]]:
    """In which span each tensor of an op lies, and where there; and how long the spans are that it needs."""
    written = {name for _, name in op.writes}
    offsets: dict[str, tuple[str, int]] = {}
    ends: dict[str, int] = {}
    for name in op.tensors:
        tensor = graph.tensors[name]
        span = "written" if name in written else _content(tensor)
        offsets[name] = span, ends.get(span, 0)
        ends[span] = round_up(offsets[name][1] + tensor.nbytes, 512)
    return offsets, ends


def _copied_ms(device: Device, *copies: tuple[Launcher, Stream]) -> float:
    """Time of copies that begin together, each on its stream."""
    (_, first), *others = copies
    begin = device.stamp(first)
    for _, stream in others:
        device.wait(stream, device.record(first))
    for launch, _ in copies:
        launch()
    for _, stream in others:
        device.wait(first, device.record(stream))
    end = device.stamp(first)
    device.host_sync(first)
    return device.elapsed_ms(begin, end)
