"""Measuring on a device: how long ops take, what a launch costs the host, and the rates of the host link."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from time import perf_counter

from minidnn.device.base import Device, Launcher, Operand, Region, Stream
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.profile import Algorithm, Link
from minidnn.progress import bar
from minidnn.units import MiB, round_up

REPEATS = 5
COPY_BYTES = 128 * MiB
"""One copy of a link measurement: long against its latency, short against everything else."""
DUPLEX = 0.7
"""Both directions at once count as duplex where each keeps this share of its rate."""
ISSUES = 64
"""Launches that are issued in a row to see what one costs the host; a stream takes many more before it blocks."""


def op_times(device: Device, work: Mapping[str, tuple[Graph, Op]], scratch: int) -> tuple[dict[str, float], float]:
    """ms of each of these ops, which have one algorithm without workspace, on random values; and the ms that a launch
    costs the host. `scratch`: bytes that the device wants in front of an arena.

    Takes the memory of the largest op for a while. Raises OutOfDeviceMemory where that does not fit.
    """
    stream = device.stream("compute")
    arena = device.arena(max((_places(graph, op, scratch)[1] for graph, op in work.values()), default=scratch))
    times: dict[str, float] = {}
    launch_ms = 0.0
    try:
        with bar("measuring operations", len(work)) as done:
            for key, (graph, op) in work.items():
                launch = _bound(device, graph, op, scratch, arena, stream)
                times[key] = milliseconds(device, launch, stream)
                launch_ms = launch_ms or _issue_ms(device, launch, stream)
                done.update()
    finally:
        device.give_back(arena)
    return times, launch_ms


def link_rates(device: Device) -> Link:
    """Rates of pinned copies, one direction at a time, and whether both keep them together."""
    arena = device.arena(2 * COPY_BYTES)
    host = device.pinned(2 * COPY_BYTES)
    try:
        out, back = device.stream("d2h"), device.stream("h2d")

        def copy_out(nbytes: int = COPY_BYTES) -> None:
            device.copy_out(arena, 0, host, 0, nbytes, out)

        def copy_in() -> None:
            device.copy_in(arena, COPY_BYTES, host, COPY_BYTES, COPY_BYTES, back)

        d2h, h2d = milliseconds(device, copy_out, out), milliseconds(device, copy_in, back)
        latency = milliseconds(device, lambda: copy_out(512), out)
        together = _both_ms(device, copy_out, copy_in)
    finally:
        device.give_back(host)
        device.give_back(arena)
    return Link(COPY_BYTES / d2h * 1e3, COPY_BYTES / h2d * 1e3, latency, together * DUPLEX <= max(d2h, h2d))


def milliseconds(device: Device, launch: Launcher, stream: Stream) -> float:
    """Median time of a launch, after one that warms up."""
    launch()
    stamps = [device.stamp(stream)]
    for _ in range(REPEATS):
        launch()
        stamps.append(device.stamp(stream))
    device.host_sync(stream)
    return median(device.elapsed_ms(begin, end) for begin, end in pairwise(stamps))


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
    return device.launcher(graph, op, Algorithm().name, operands, None, arena, stream)


def _issue_ms(device: Device, launch: Launcher, stream: Stream) -> float:
    """What one launch costs the host."""
    began = perf_counter()
    for _ in range(ISSUES):
        launch()
    spent = perf_counter() - began
    device.host_sync(stream)
    return spent / ISSUES * 1e3


def _both_ms(device: Device, copy_out: Launcher, copy_in: Launcher) -> float:
    """Time of a copy in each direction at once."""
    out, back = device.stream("d2h"), device.stream("h2d")
    times = []
    for _ in range(REPEATS):
        begin = device.stamp(out)
        device.wait(back, device.record(out))
        copy_out()
        copy_in()
        device.wait(out, device.record(back))
        end = device.stamp(out)
        device.host_sync(out)
        times.append(device.elapsed_ms(begin, end))
    return median(times)
