"""What a card takes for the ops of a graph: the convolutions plan by plan, everything else, the host link, and what ops
leave of it to copies.

What was never measured on the card with this cuDNN is measured now, in memory that is taken for it and given back, and
kept on disk; the link is measured again with new operations. While an arena is in use there is no room to measure: new
shapes then have cuDNN's own order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from minidnn.device.measure import copy_shares, host_times, link_rates, noise, op_times, times_in_place
from minidnn.errors import OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.ops.array import Array
from minidnn.ops.cuda_ops import CONVOLUTIONS, OPS
from minidnn.ops.cudnn_ops import problem
from minidnn.ops.cudnn_plans import HOPELESS, LARGE
from minidnn.ops.plans import PlanStore, Problem
from minidnn.profile.profile import Algorithm, Profile, op_key
from minidnn.progress import bar
from minidnn.units import MiB, round_up

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

SPARE = 256 * MiB
"""What measuring leaves free, for what the libraries take themselves."""
LASTS = 0.1
"""What an op takes at least, in ms, for copies to be measured beside it: shorter ones are little of an iteration."""
NOISE = 1.02
"""Measuring does not tell plans apart that take so many times as long as the fastest, or less."""


def card_profile(device: CudaDevice, graph: Graph) -> Profile:
    """Entries for all ops of a graph, the link, and what the host costs. Where memory was too short to measure, times
    are missing, and shares are 1."""
    store = device.plans(device.stream("compute")).store
    ops = {op_key(graph, op): op for op in graph.ops}
    convolutions = {key: op for key, op in ops.items() if op.function in CONVOLUTIONS}
    entries: dict[str, tuple[Algorithm, ...]] = {}
    with bar("measuring convolutions", len(convolutions)) as done:
        for key, op in convolutions.items():
            entries[key] = _convolution(device, graph, op)
            done.update()
    if not device.in_use:
        with suppress(OutOfDeviceMemory, OutOfPinnedMemory):
            _measure_the_rest(device, graph, {key: op for key, op in ops.items() if key not in entries}, store)
        with suppress(OutOfDeviceMemory):
            _measure_in_place(device, graph, entries, store)
    for key, found in entries.items():
        entries[key] = in_place(found, store.slowdown.get(key, 1.0))
    entries |= {
        key: (Algorithm(ms=store.times[key]),) for key in ops if key not in entries and key in store.times
    }  # fmt: skip
    if not device.in_use:
        with suppress(OutOfDeviceMemory, OutOfPinnedMemory):
            _measure_shares(device, graph, ops, entries, store)
    for key, found in entries.items():
        entries[key] = tuple(replace(a, shares=store.shares.get(_way_key(key, a), a.shares)) for a in found)
    source = f"measured on {device.name}, {device.libraries}"
    profile = Profile(source, entries, store.link, scratch_bytes=device.scratch_bytes, target=graph.target)
    costs = store.host.get(_network(graph, convolutions))
    return profile if costs is None else replace(profile, **costs._asdict())


def _measure_the_rest(device: CudaDevice, graph: Graph, ops: Mapping[str, Op], store: PlanStore) -> None:
    """Whatever of these ops is not known yet, and with what is new the link, again: when it was measured before, others
    may have used it."""
    work = {key: (graph, op) for key, op in ops.items() if key not in store.times}
    if work:
        store.add_times(op_times(device, work, device.scratch_bytes))
    if work or store.link is None:
        store.add_link(link_rates(device))


def _measure_in_place(
    device: CudaDevice, graph: Graph, entries: Mapping[str, tuple[Algorithm, ...]], store: PlanStore
) -> None:
    """What the host costs, and how many times as long convolutions take in the iteration as alone. They are what a card
    spends its power on; the memory, for which most other ops wait, keeps its clock."""
    fastest = {key: found[0] for key, found in entries.items()}
    if any(a.ms is None for a in fastest.values()):
        return
    network = _network(graph, fastest)
    if graph.ops and network not in store.host:
        store.add_host(network, host_times(device, graph, fastest, device.scratch_bytes))
    if fastest.keys() <= store.slowdown.keys():
        return
    times = times_in_place(device, graph, fastest, device.scratch_bytes)
    store.add_slowdown({key: times[key] / a.ms for key, a in fastest.items() if a.ms})


def _measure_shares(
    device: CudaDevice, graph: Graph, ops: Mapping[str, Op], entries: Mapping[str, tuple[Algorithm, ...]],
    store: PlanStore,
) -> None:  # fmt: skip
    """What copies keep of their rates beside every way to compute an op that lasts and that a plan may choose."""
    work = {
        _way_key(key, way): (ops[key], way) for key, found in entries.items() for way in worth_choosing(found)
        if way.ms is not None and way.ms >= LASTS
    }  # fmt: skip
    new = {key: way for key, way in work.items() if key not in store.shares}
    if new:
        found = copy_shares(device, graph, list(new.values()), device.scratch_bytes)
        store.add_shares(dict(zip(new, found, strict=True)))


def in_place(found: tuple[Algorithm, ...], slowdown: float) -> tuple[Algorithm, ...]:
    """Plans, fastest first, with what they take in an iteration, where the fastest takes `slowdown` times as long as
    alone. A slower one computes the same with less power and slows the clock by less: as the square of its rate, it is
    assumed, and never so little that it would be faster than the fastest."""
    fastest = found[0].ms
    if not fastest:
        return found

    def slowed(ms: float) -> float:
        return max(ms * (1 + (slowdown - 1) * (fastest / ms) ** 2), fastest * slowdown)

    return tuple(replace(a, ms=None if a.ms is None else slowed(a.ms)) for a in found)


def worth_choosing(found: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
    """Those, of algorithms in order of time, that need less workspace than any faster one; and those that do so among
    the deterministic ones."""
    chosen: list[Algorithm] = []
    for only in (False, True):
        least = inf
        for a in found:
            if a.workspace < least and (a.deterministic or not only):
                least = a.workspace
                chosen.append(a)
    return tuple(dict.fromkeys(chosen))


def _way_key(key: str, way: Algorithm) -> str:
    """What is kept by an op's profile key and the algorithm's name."""
    return f"{key} {way.name}"


def _network(graph: Graph, convolutions: Mapping[str, object]) -> str:
    """What the host's costs are kept by: the more plans a network has, the less of them is in the processor's cache
    when their turn comes. All memory modes of a network have the same convolutions."""
    keys = sorted(convolutions) or sorted({op_key(graph, op) for op in graph.ops})
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


def _convolution(device: CudaDevice, graph: Graph, op: Op) -> tuple[Algorithm, ...]:
    """The plans of a convolution, fastest first; those without a time only where none has one."""
    arrays = {argument: Array.of(graph.tensors[name], 0) for argument, name in op.bindings}
    p = problem(op.function, graph.target.precision, arrays, **dict(op.attributes))
    found = device.plans(device.stream("compute")).algorithms(p)
    if not device.in_use:
        found = _measured(device, op, p, arrays)
    return worth_their_workspace(tuple(a for a in found if a.ms is not None)) or found


def worth_their_workspace(found: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
    """Without those whose workspace is LARGE and buys nothing: one that needs less is as fast as the fastest."""
    fastest = [a for a in found if a.ms is not None and found[0].ms is not None and a.ms <= NOISE * found[0].ms]
    least = min((a.workspace for a in fastest), default=0)
    return tuple(a for a in found if a not in fastest or a.workspace < least + LARGE)


def _measured(
    device: CudaDevice, op: Op, p: Problem, arrays: Mapping[str, Array]
) -> tuple[Algorithm, ...]:
    """The plans with their times, on disk at once: measuring them all can take a minute, and may be interrupted."""
    plans = device.plans(device.stream("compute"))
    for look in (plans.algorithms, plans.in_parts):  # which are worth running in parts is known when others have times
        times = _measure(device, op, p, arrays, look(p))
        if times:
            plans.record(p, times)
            plans.store.save()
    return plans.algorithms(p)


def _measure(
    device: CudaDevice, op: Op, p: Problem, arrays: Mapping[str, Array], found: tuple[Algorithm, ...]
) -> dict[str, float | None]:
    """ms of the plans that have none yet, on random values; None where one fails to run. What does not fit the card is
    left out."""
    places, end = {}, device.scratch_bytes
    for name, array in arrays.items():
        places[name] = end
        end = round_up(end + array.nbytes, 512)
    room = device.memory_info().free - end - SPARE
    fitting = [a for a in found if a.ms is None and a.workspace <= room]
    times: dict[str, float | None] = {}
    best = min((a.ms for a in found if a.ms is not None), default=inf)
    if not fitting:
        return times
    region = device.arena(end + max(a.workspace for a in fitting))
    try:
        stream = device.stream("compute")
        context = device.context(stream, region, p.precision)
        real = {n: Array(region.address + places[n], a.shape, a.strides, a.dtype) for n, a in arrays.items()}
        for name, array in real.items():
            device.repeat(region, places[name], array.nbytes, noise(array.dtype))
        for a in fitting:
            times[a.name] = None
            with suppress(Exception):  # whatever the library says: this plan is not for this card
                launch = OPS[op.function](
                    context, **real, **dict(op.attributes), algorithm=a.name, workspace=region.address + end
                )
                ms = device.milliseconds(launch, stream, HOPELESS * best)
                times[a.name], best = ms, min(best, ms)
    finally:
        device.give_back(region)
    return times
