"""Partial batches: the iteration over fewer rows, in the memory of that over all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from minidnn.graph.graph import Graph
from minidnn.profile.profile import Algorithm, Profile
from minidnn.schedule.actions import Alloc, Schedule
from minidnn.schedule.lower import lower, walk


def for_fewer_rows(
    whole: Schedule, graph: Graph, profile: Profile, *, algorithms: Mapping[str, Algorithm],
    persistent: Mapping[str, int],
) -> Schedule | None:  # fmt: skip
    """The schedule for `graph`, which is that of `whole` with fewer rows: the same plan, and every buffer where it lies
    for all rows, so that it needs no more memory of any kind. `algorithms` fixes those of some ops by name.

    None where a buffer would be larger for fewer rows, as a workspace may be, or where `whole` has no offsets.
    """
    if whole.placement != "planned":
        return None
    places = {a.buffer.key: a.buffer for a in whole.actions if isinstance(a, Alloc)}
    picked = {}
    for op in graph.ops:
        ways, room = profile.algorithms(graph, op), whole.plan.algorithm(op).workspace
        picked[op.name] = next((a for a in ways if a.workspace <= room), min(ways, key=lambda a: a.workspace))
    plan = replace(
        whole.plan, algorithms={**picked, **algorithms}, scratch=profile.scratch_bytes,
        offsets={key: b.offset - whole.persistent_bytes for key, b in places.items()},
    )  # fmt: skip
    stays = [a.buffer for a in walk(graph, plan, None, persistent).actions if isinstance(a, Alloc)]
    if any(b.key not in places or b.nbytes > places[b.key].nbytes for b in stays):
        return None
    schedule = lower(graph, plan, persistent=persistent)
    return schedule if schedule.pinned_bytes <= whole.pinned_bytes else None
