"""What lies in the arena in front of the pool, in every iteration at the same place."""

from __future__ import annotations

from collections.abc import Mapping

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.plan.plan import Plan
from minidnn.schedule.actions import ALIGNMENT, Buffer
from minidnn.units import round_up


def persistent_region(
    graph: Graph, plan: Plan, given: Mapping[str, int] | None = None
) -> tuple[tuple[Buffer, ...], int]:
    """The buffers in front of the pool, and their total: what outlives an iteration, in the papers' base the
    weights' gradients, and the input where the next batch comes early; in front of them the plan's scratch bytes.

    `given` are offsets that another schedule of the same arena has fixed; the others follow behind those. Whether one
    of them is the input's decides for all: whichever schedule is next, its batch has the same place.
    """
    fixed = dict(given or {})
    buffers: list[Buffer] = []
    end = fixed.pop("", round_up(plan.scratch, ALIGNMENT))
    for t in graph.tensors.values():
        gradient = plan.lifetime == "iteration" and t.role is Role.WEIGHT_GRADIENT and t.name not in plan.reserve
        early = t.role is Role.INPUT and (t.name in fixed if given else plan.early)
        if gradient or early or graph.is_persistent(t.name):
            offset = fixed.get(t.name)
            if offset is None:
                offset, end = end, round_up(end + t.nbytes, ALIGNMENT)
            buffers.append(Buffer(t.name, 0, offset, t.nbytes))
    return tuple(buffers), end


def region_bytes(graph: Graph, scratch: int, given: Mapping[str, int] | None = None, early: bool = False) -> int:
    """Bytes of what outlives an iteration in every mode, with `scratch` bytes in front; `early`: and of the input."""
    return persistent_region(graph, Plan("", (), scratch=scratch, early=early), given)[1]
