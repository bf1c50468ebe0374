"""A measured profile: every op of some graphs and every algorithm of it, on a device, and the host link."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

from minidnn.device.base import Device, Launcher, Operand, Region, Stream
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.profile import Algorithm, Link, Profile, op_key
from minidnn.units import MiB, round_up

REPEATS = 5
COPY_BYTES = 128 * MiB
"""One copy of a link measurement: long against its latency, short against everything else."""
DUPLEX = 0.7
"""Both directions at once count as duplex where each keeps this share of its rate."""
ISSUES = 64
"""Launches that are issued in a row to see what one costs the host; a stream takes many more before it blocks."""


def measured_profile(device: Device, graphs: Sequence[Graph]) -> Profile:
    """Times of all ops of graphs that were built for one target, and the link's rates.

    Algorithms that the device has timed keep those times. Needs the memory of the largest op; a progress bar shows on
    a terminal. Raises OutOfDeviceMemory where an op's operands do not fit.
    """
    from tqdm import tqdm

    entries: dict[str, tuple[Algorithm, ...]] = {}
    work: dict[str, tuple[Graph, Op, tuple[Algorithm, ...]]] = {}
    scratch = 0
    for graph in graphs:
        known = device.profile(graph)
        scratch = known.scratch_bytes
        for op in graph.ops:
            ways = known.algorithms(graph, op)
            entries[op_key(graph, op)] = ways
            if any(a.ms is None for a in ways):
                work[op_key(graph, op)] = (graph, op, ways)
    stream = device.stream("compute")
    nbytes = max((_end(graph, op, ways, scratch) for graph, op, ways in work.values()), default=scratch)
    arena = device.arena(nbytes)
    launch_ms = 0.0
    try:
        for key, (graph, op, ways) in tqdm(work.items(), desc="measuring operations", disable=None, leave=False):
            launches = list(_bound(device, graph, op, ways, scratch, arena, stream))
            timed = [(a, _milliseconds(device, launch, stream)) for a, launch in launches]
            found = tuple(Algorithm(a.name, a.workspace, ms, a.deterministic) for a, ms in timed)
            entries[key] = tuple(sorted(found, key=lambda a: a.ms or 0.0))
            if not launch_ms:
                launch_ms = _issue_ms(device, launches[0][1], stream)
        link = _link(device, arena)
    finally:
        device.give_back(arena)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    source = ", ".join(filter(None, [f"measured on {device.name}", device.libraries, today]))
    return Profile(source, entries, link, launch_ms or 0.005, scratch, graphs[0].target)


def _places(graph: Graph, op: Op, scratch: int) -> tuple[dict[str, int], int]:
    """Offset of each tensor that the op touches, and where they end."""
    places, end = {}, round_up(scratch, 512)
    for name in op.tensors:
        places[name] = end
        end = round_up(end + graph.tensors[name].nbytes, 512)
    return places, end


def _end(graph: Graph, op: Op, ways: tuple[Algorithm, ...], scratch: int) -> int:
    return _places(graph, op, scratch)[1] + max(a.workspace for a in ways)


def _bound(
    device: Device, graph: Graph, op: Op, ways: tuple[Algorithm, ...], scratch: int, arena: Region, stream: Stream
) -> Iterable[tuple[Algorithm, Launcher]]:
    """The op bound with each algorithm, on random values."""
    places, end = _places(graph, op, scratch)
    operands: dict[str, Operand | list[Operand]] = {}
    for argument, name in op.bindings:
        operand = Operand(graph.tensors[name], places[name])
        device.scribble(arena, operand)
        if argument.endswith("[]"):
            items = operands.setdefault(argument[:-2], [])
            assert isinstance(items, list)
            items.append(operand)
        else:
            operands[argument] = operand
    for a in ways:
        space = (end, a.workspace) if a.workspace else None
        yield a, device.launcher(graph, op, a.name, operands, space, arena, stream)


def _milliseconds(device: Device, launch: Launcher, stream: Stream) -> float:
    """Median time of a launch, after one that warms up."""
    launch()
    stamps = [device.stamp(stream)]
    for _ in range(REPEATS):
        launch()
        stamps.append(device.stamp(stream))
    device.host_sync(stream)
    return median(device.elapsed_ms(begin, end) for begin, end in pairwise(stamps))


def _issue_ms(device: Device, launch: Launcher, stream: Stream) -> float:
    """What one launch costs the host."""
    began = perf_counter()
    for _ in range(ISSUES):
        launch()
    spent = perf_counter() - began
    device.host_sync(stream)
    return spent / ISSUES * 1e3


def _link(device: Device, arena: Region) -> Link:
    """Rates of pinned copies, one direction at a time, and whether both keep them together."""
    nbytes = min(COPY_BYTES, arena.nbytes // 2)
    host = device.pinned(2 * nbytes)
    try:
        out, back = device.stream("d2h"), device.stream("h2d")

        def copy_out(size: int) -> None:
            device.copy_out(arena, 0, host, 0, size, out)

        def copy_in(size: int) -> None:
            device.copy_in(arena, nbytes, host, nbytes, size, back)

        d2h, h2d = (
            _milliseconds(device, lambda copy=copy: copy(nbytes), stream)  # type: ignore[misc]
            for copy, stream in ((copy_out, out), (copy_in, back))
        )
        latency = _milliseconds(device, lambda: copy_out(512), out)
        together = _both_ms(device, lambda: copy_out(nbytes), lambda: copy_in(nbytes))
    finally:
        device.give_back(host)
    return Link(nbytes / d2h * 1e3, nbytes / h2d * 1e3, latency, together * DUPLEX <= max(d2h, h2d))


def _both_ms(device: Device, one: Launcher, other: Launcher) -> float:
    """Time of a copy in each direction at once."""
    out, back = device.stream("d2h"), device.stream("h2d")
    times = []
    for _ in range(REPEATS):
        begin = device.stamp(out)
        device.wait(back, device.record(out))
        one()
        other()
        device.wait(out, device.record(back))
        end = device.stamp(out)
        device.host_sync(out)
        times.append(device.elapsed_ms(begin, end))
    return median(times)
