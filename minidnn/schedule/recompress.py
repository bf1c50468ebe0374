"""The same schedule with other tensors compressed: everything stays where it is on the device."""

from __future__ import annotations

from dataclasses import replace

from minidnn.plan.compress import compressed
from minidnn.schedule.actions import Alloc, Schedule
from minidnn.schedule.compress import plan_slab
from minidnn.schedule.lower import walk


def recompressed(schedule: Schedule, names: tuple[str, ...]) -> Schedule:
    """The schedule with those of its offloaded tensors compressed that `names` has; no others."""
    graph, offsets = schedule.graph, None
    plan = replace(schedule.plan, compress=compressed(graph, schedule.plan, names))
    if schedule.placement == "planned":
        allocs = [a.buffer for a in schedule.actions if isinstance(a, Alloc)]
        offsets = {b.key: b.offset - schedule.persistent_bytes for b in allocs}
    region = {b.tensor: b.offset for b in schedule.persistent} | {"": schedule.persistent_bytes}
    draft = walk(graph, plan, None, region)
    final = walk(graph, plan, offsets, region, plan_slab(graph, plan, draft.actions))
    return replace(schedule, plan=plan, actions=tuple(final.actions), pinned=final.pinned)
