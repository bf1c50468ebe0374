"""A lower bound on the time of an iteration within a budget (Beaumont et al., Propositions 2 and 3, made true for what
is executed here: the network's input is never copied out, and both directions may overlap)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.memory.place import lower_bound
from minidnn.plan.mode import Mode, Request
from minidnn.plan.registry import POLICIES
from minidnn.profile.profile import Profile
from minidnn.schedule.lifetimes import lifetimes
from minidnn.schedule.lower import ALIGNMENT, walk


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule is faster, whatever it offloads. Times in ms.

    `compute_ms` sums each op's fastest algorithm; `offload_ms` and `prefetch_ms` are the copies of the bytes that
    cannot stay: the peak at the smallest workspaces less the budget. One lane for all copies adds them, two overlap.
    """

    compute_ms: float
    offload_ms: float
    prefetch_ms: float

    def ms(self, lanes: int) -> float:
        """The bound for schedules with one copy lane or two."""
        copies = self.offload_ms + self.prefetch_ms if lanes == 1 else max(self.offload_ms, self.prefetch_ms)
        return max(self.compute_ms, copies)


def iteration_bound(graph: Graph, profile: Profile, budget: int | None) -> Bound:
    """The bound for a graph, a profile with times, and a budget in bytes of the arena (None: unlimited)."""
    compute = sum(
        min((a.ms for a in profile.algorithms(graph, op) if a.ms is not None), default=0.0) for op in graph.ops
    )
    if budget is None or profile.link is None:
        return Bound(compute, 0.0, 0.0)
    excess = max(0, in_core_peak(graph, profile) - budget)
    inputs = sum(t.nbytes for t in graph.tensors.values() if t.role is Role.INPUT)
    out = max(0, excess - inputs) / profile.link.d2h * 1e3
    return Bound(compute, out, excess / profile.link.h2d * 1e3)


def in_core_peak(graph: Graph, profile: Profile) -> int:
    """Bytes of the arena with nothing offloaded, the least workspaces, everything freed at its last use, and no
    fragmentation."""
    mode = Mode("keep(m)", "keep", None, "m")
    (plan,) = POLICIES["keep"](Request(graph, profile, mode))
    draft = walk(graph, replace(plan, scratch=profile.scratch_bytes))
    return draft.persistent_bytes + lower_bound(lifetimes(draft.actions), ALIGNMENT)
