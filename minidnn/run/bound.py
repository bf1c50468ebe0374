"""Lower bounds on the time of an iteration within a budget.

`iteration_bound` is true of whatever is executed here: Beaumont et al. 2020, Propositions 2 and 3, with what the paper
leaves out (the network's input is never copied out, both directions may overlap, each convolution has several
algorithms) and with what follows from the order of events. `paper_bound` is Proposition 3 as printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.plan.outline import Outline, resident
from minidnn.profile.profile import Link, Profile
from minidnn.run.whole_copies import whole_copies_ms
from minidnn.schedule.region import region_bytes

LEVELS = 32


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule is faster, whatever it offloads. Times in ms.

    `compute_ms` sums each op's fastest algorithm (of those whose workspace can be had); `offload_ms` and `prefetch_ms`
    are the copies of the bytes that cannot stay: the peak at the smallest workspaces less the budget. One lane for all
    copies adds them, two overlap. `load_ms`: the batch comes in, before any op; or, where the next batch may come
    early (`overlaps`), beside the ops.

    `phases_ms` is what order, workspaces and whole tensors (`whole_copies`) add. What is away while an op runs has left
    before and comes back after it, so the ops before it overlap that copy-out alone and those after it the copy-in. And
    any choice of algorithms has some peak P with nothing offloaded: its ops take at least as long as the fastest below
    P, and P less the budget has to leave; the least over all P counts.
    """

    compute_ms: float
    offload_ms: float
    prefetch_ms: float
    phases_ms: float = 0.0
    load_ms: float = 0.0
    overlaps: bool = False

    def ms(self, lanes: int) -> float:
        """The bound for schedules with one copy lane or two."""
        copies = self.offload_ms + self.prefetch_ms if lanes == 1 else max(self.offload_ms, self.prefetch_ms)
        most = max(self.compute_ms, copies, self.phases_ms)
        return max(most, self.load_ms) if self.overlaps else self.load_ms + most


def iteration_bound(graph: Graph, profile: Profile, budget: int | None) -> Bound:
    """The bound for a graph, a profile with times, and a budget in bytes of the arena (None: unlimited)."""
    loaded = sum(t.nbytes for t in graph.tensors.values() if t.role is Role.INPUT)
    early = graph.target.early_batch
    if budget is None or profile.link is None:
        ways = (profile.algorithms(graph, op) for op in graph.ops)
        load = loaded / profile.link.h2d * 1e3 if profile.link else 0.0
        return Bound(sum(min(a.ms or 0.0 for a in way) for way in ways), 0.0, 0.0, 0.0, load, early)
    outline = Outline.of(graph, profile, 1)  # no rounding: what crosses the link is not rounded either
    pool = budget - region_bytes(graph, profile.scratch_bytes)
    outline = _possible(outline, pool)
    away = [max(0, n + a.workspace - pool) for n, a in zip(outline.resident, outline.smallest, strict=True)]
    copies = _Copies(profile.link, loaded)
    levels = outline.levels(LEVELS)
    # A peak between two levels has the algorithms of the upper one at best, and the excess of the lower one at least.
    pairs = zip([levels[0], *levels[:-1]], levels, strict=True)
    phases = min(_phases_ms([a.ms or 0.0 for a in outline.within(top)], away, low - pool, copies) for low, top in pairs)
    phases = max(phases, whole_copies_ms(outline, pool))
    most = max(away)
    compute = sum(a.ms or 0.0 for a in outline.fastest)
    return Bound(compute, copies.out_ms(most), copies.in_ms(most), phases, copies.in_ms(loaded), early)


def _possible(outline: Outline, pool: int) -> Outline:
    """Without the algorithms whose workspace does not fit beside what no offloading takes away from their op."""
    ways = []
    for found, nbytes in zip(outline.ways, outline.without(outline.movable), strict=True):
        least = min(a.workspace for a in found)
        ways.append(tuple(a for a in found if a.workspace <= max(least, pool - nbytes)))
    return replace(outline, ways=tuple(ways))


@dataclass(frozen=True, slots=True)
class _Copies:
    """The times of copies of so many bytes; `kept` bytes, the network's input, are never copied out."""

    link: Link
    kept: int

    def out_ms(self, nbytes: int) -> float:
        return max(0, nbytes - self.kept) / self.link.d2h * 1e3

    def in_ms(self, nbytes: int) -> float:
        return max(0, nbytes) / self.link.h2d * 1e3


def _phases_ms(times: list[float], away: list[int], excess: int, copies: _Copies) -> float:
    """`away[i]` bytes are not there while op i runs, nor are `excess` bytes at some op."""
    ends = list(accumulate(times))
    longest = max(ends[-1], copies.out_ms(excess), copies.in_ms(excess))
    for nbytes, ms, end in zip(away, times, ends, strict=True):
        before, after = max(end - ms, copies.out_ms(nbytes)), max(ends[-1] - end, copies.in_ms(nbytes))
        longest = max(longest, before + ms + after)
    return longest


def paper_bound(graph: Graph, profile: Profile, budget: int) -> float:
    """Proposition 3: max(sum u, 2 (M_peak - M_GPU) / bandwidth) in ms, with the fastest algorithms at the least
    workspaces. It takes one transfer at a time and lets all that is offloaded cross the link twice."""
    assert profile.link is not None
    compute = iteration_bound(graph, profile, None).compute_ms
    excess = max(0, in_core_peak(graph, profile) - budget)
    return max(compute, excess * (1 / profile.link.d2h + 1 / profile.link.h2d) * 1e3)


def in_core_peak(graph: Graph, profile: Profile) -> int:
    """Bytes of the arena with nothing offloaded, the least workspaces, everything freed at its last use, and no
    fragmentation."""
    workspaces = (min(a.workspace for a in profile.algorithms(graph, op)) for op in graph.ops)
    pool = max(n + w for n, w in zip(resident(graph), workspaces, strict=True))
    return pool + region_bytes(graph, profile.scratch_bytes)
