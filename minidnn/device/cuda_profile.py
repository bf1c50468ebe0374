"""Which plans the convolutions of a graph have on a card, and how fast they are there.

What was never measured on the card with this cuDNN is measured now, in memory that is taken for it and given back, and
kept on disk. While an arena is in use there is no room to measure: new shapes then have cuDNN's own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.ops.array import Array
from minidnn.ops.cuda_ops import CONVOLUTIONS, OPS
from minidnn.ops.cudnn_ops import problem
from minidnn.ops.plans import Problem
from minidnn.profile.profile import Algorithm, Profile, op_key
from minidnn.units import MiB, round_up

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

SPARE = 256 * MiB
"""What measuring leaves free, for what the libraries take themselves."""
HOPELESS = 1.5
"""A plan whose first run takes so many times the best plan's time is not run again."""


def plan_profile(device: CudaDevice, graph: Graph) -> Profile:
    """Entries for the graph's convolutions, fastest first."""
    from tqdm import tqdm

    entries: dict[str, tuple[Algorithm, ...]] = {}
    plans = device.plans(device.stream("compute"))
    convolutions = {op_key(graph, op): op for op in graph.ops if op.function in CONVOLUTIONS}
    for key, op in tqdm(convolutions.items(), desc="measuring convolutions", disable=None, leave=False, delay=1.0):
        arrays = {argument: Array.of(graph.tensors[name], 0) for argument, name in op.bindings}
        p = problem(op.function, graph.target.precision, arrays, **dict(op.attributes))
        found = plans.algorithms(p)
        if not device.in_use and any(a.ms is None for a in found):
            times = _measure(device, op, p, arrays, found)
            plans.record(p, times)
            found = plans.algorithms(p)
        entries[key] = found
    return Profile(f"cuDNN's plans on {device.name}", entries, scratch_bytes=device.scratch_bytes)


def _measure(
    device: CudaDevice, op: Op, p: Problem, arrays: Mapping[str, Array], found: tuple[Algorithm, ...]
) -> dict[str, float]:
    """ms by algorithm, on random values; what does not fit, or fails to run, has no time."""
    places, end = {}, device.scratch_bytes
    for name, array in arrays.items():
        places[name] = end
        end = round_up(end + array.nbytes, 512)
    room = device.memory_info().free - end - SPARE
    fitting = [a for a in found if a.workspace <= room]
    times: dict[str, float] = {}
    if not fitting:
        return times
    region = device.arena(end + max(a.workspace for a in fitting))
    try:
        stream = device.stream("compute")
        context = device.context(stream, region, p.precision)
        real = {n: Array(region.address + places[n], a.shape, a.strides, a.dtype) for n, a in arrays.items()}
        for array in real.values():
            device.fill(array)
        for a in fitting:
            with suppress(Exception):
                launch = OPS[op.function](
                    context, **real, **dict(op.attributes), algorithm=a.name, workspace=region.address + end
                )
                times[a.name] = device.milliseconds(launch, stream, HOPELESS * min(times.values(), default=inf))
    finally:
        device.give_back(region)
    return times
