"""The search among plans without host waits (Beaumont et al. 2020, Proposition 1): what to lower and simulate.

Plans are expected to take what the clock says (`moments`), first in a pool without fragmentation, then, of those that
promise most, with every stay placed (`layout`). Then the clock is exact but for what starting an action costs: only the
fastest of them are lowered and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from math import inf

from minidnn.graph.tensor import Role
from minidnn.plan.layout import lay_out
from minidnn.plan.mode import Outcome, Proposals, Request
from minidnn.plan.moments import arrange
from minidnn.plan.outline import Arrangement, Movable, Outline, outline_of
from minidnn.plan.plan import Plan, stages_by_op
from minidnn.profile.profile import Algorithm

NEAR = 1.0005
"""A layout within that of what the moments promise is not improved, nor a plan within that of the time of all ops."""
SAME = 1 + 1e-9
SLACK = (1.0, 0.985, 0.97, 0.95, 0.92, 0.88)
"""Shares of the pool that moments are made for where a placement cannot keep those for all of it."""
LONG = 500
"""With so many ops fewer of them are tried."""
SHARES = ((1.0, 2), (0.95, 1), (0.88, 1))
"""Shares of the pool that sets are chosen for, and how many plans of each are placed."""
EFFORT = 2_000_000
"""What is spent on the layout of an arrangement: pairs of stays that are compared."""
WORTHWHILE = 200
"""A batch that takes less than one part in so many of the iteration to come in need not come early."""
PROPOSALS = 8
"""So many plans are lowered, where none of them fits (a fit heuristic or compression may see to that)."""

Option = tuple[Sequence[Movable], Sequence[Algorithm]]
Options = Callable[[Outline, Request, int], Iterable[Option]]
"""What a policy thinks of for a pool of so many bytes."""


class Search:
    """What a planner has found in a pool of so many bytes: `leaders`, each with its places, and `ms`, what the fastest
    of them takes by the clock."""

    def __init__(self, request: Request, pool: int, outline: Outline | None = None) -> None:
        self.request, self.pool = request, pool
        self.outline = outline_of(request) if outline is None else outline
        self.ms = inf
        self.effort = EFFORT
        self.leaders: list[Arrangement] = []
        self.seen: set[tuple[object, ...]] = set()

    def apart(self) -> Search:
        """Another search for the same, which knows of nothing yet."""
        return Search(self.request, self.pool, self.outline)

    def join(self, other: Search) -> None:
        """Know what another search has found."""
        self.leaders += other.leaders
        self.seen |= other.seen
        self.ms = min(self.ms, other.ms)

    @property
    def done(self) -> bool:
        """Nothing can be faster."""
        return self.ms <= self.outline.floor_ms * SAME

    def over(self, options: Options) -> None:
        """Place the best of a policy's options. What a placement costs shows when it is made: options for a pool that
        is smaller by some share, which take more copies and leave more freedom, are tried as long as they promise
        more."""
        for share, tries in SHARES:
            if not self.done:
                pool = int(self.pool * share)
                self.among(arranged(self.outline, options(self.outline, self.request, pool), pool), tries)

    def among(self, found: Iterable[Arrangement], tries: int) -> None:
        """Place those that promise more than the fastest so far, best expectation first, at most so many."""
        for arrangement in found:
            if arrangement.ms >= self.ms or not tries:
                break
            if arrangement.identity not in self.seen:
                self.seen.add(arrangement.identity)
                placed = self._placed(arrangement)
                if placed is not None:
                    self.leaders.append(placed)
                    self.ms = min(self.ms, placed.ms)
                    tries -= 1

    def everything(self) -> None:
        """All that is worth a copy leaves, or all that is movable."""
        for offload in (self.outline.worthwhile, self.outline.movable):
            room = self.outline.within(self.pool, self.outline.without(offload))
            rest = self.outline.smallest
            choices = [(offload, rest if self.request.mode.rule == "m" else room), (offload, rest)]
            self.among(arranged(self.outline, choices, self.pool), len(choices))
            if self.ms < inf:
                break

    def plans(self) -> Generator[Plan, Outcome | None, float]:
        """Propose the fastest, and the next as long as it may be faster. Where none fits, the plan that needs least.
        Returns the ms of the fastest."""
        best = inf
        for k, arrangement in enumerate(self.fastest):
            if best <= arrangement.ms * SAME or (best == inf and k == PROPOSALS):
                break
            outcome = yield arrangement.plan(self.request)
            if outcome is not None and outcome.fits:
                best = min(best, arrangement.ms if outcome.ms is None else outcome.ms)
        if best == inf:
            yield tightest(self.outline).plan(self.request)
        return best

    def early(self, best: float, look: Callable[[Search], Search]) -> Proposals:
        """Plans that may be faster than `best` when their next batch comes early, the most promising first. The
        batch has a place for good then: the fastest of before, and plans for a pool that is smaller by it, which `look`
        finds."""
        outline = self.outline
        graph = outline.graph
        if not graph.target.early_batch or outline.load_ms * WORTHWHILE < best:
            return
        inputs = {t.name: t.nbytes for t in graph.tensors.values() if t.role is Role.INPUT}
        room = self.pool - sum(inputs.values())
        if room <= 0:
            return
        smaller = look(Search(self.request, room, outline))
        found = [*self.fastest[:PROPOSALS], *smaller.fastest[:PROPOSALS]]
        for arrangement in sorted(found, key=lambda arrangement: arrangement.ms):
            if any(m.name in inputs for m in arrangement.offload):
                continue
            if arrangement.ms - outline.load_ms >= best:
                break
            outcome = yield replace(arrangement.plan(self.request), early=True, offsets={})
            if outcome is not None and outcome.fits and outcome.ms is not None:
                best = min(best, outcome.ms)

    @property
    def fastest(self) -> list[Arrangement]:
        """The leaders by their ms."""
        return sorted(self.leaders, key=lambda arrangement: arrangement.ms)

    def _placed(self, arrangement: Arrangement) -> Arrangement | None:
        """The arrangement with places; where its moments cannot be kept, the fastest of some made for less memory, as
        long as they promise more."""
        found: Arrangement | None = None
        for share in SLACK if len(arrangement.algorithms) < LONG else SLACK[:2]:
            wish: Arrangement | None = arrangement
            if share < 1:
                wish = arrange(self.outline, arrangement.offload, arrangement.algorithms, int(self.pool * share))
            if wish is None or (found is not None and wish.ms >= min(found.ms, self.ms)):
                break
            placed = lay_out(wish, self.pool, self.effort)
            if placed is not None and (found is None or placed.ms < found.ms):
                found = placed
            if found is not None and found.ms <= arrangement.ms * NEAR:
                break
        return found


def planned(request: Request, options: Options) -> Proposals:
    """A policy that proposes the best of the options that it has for a pool."""
    if request.pool is None:
        yield keep(request)
        return

    def look(search: Search) -> Search:
        return searched(search, options)

    search = look(Search(request, request.pool))
    best = yield from search.plans()
    yield from search.early(best, look)


def searched(search: Search, options: Options) -> Search:
    """The search, once it has seen a policy's options."""
    search.over(options)
    if search.ms == inf:
        search.everything()
    return search


def keep(request: Request) -> Plan:
    """Without a budget nothing needs to leave."""
    outline, graph = outline_of(request), request.graph
    algorithms = outline.smallest if request.mode.rule == "m" else outline.fastest
    return Plan(str(request.mode), stages_by_op(graph), outline.named(algorithms), early=graph.target.early_batch)


def tightest(outline: Outline) -> Arrangement:
    """Everything leaves at once and comes back when it is needed, with the least workspaces: the smallest pool."""
    until = {m.name: m.left + 1 for m in outline.movable if m.out_bytes}
    fetch = {m.name: m.needed for m in outline.movable}
    return Arrangement(outline, outline.movable, outline.smallest, until, fetch, inf)


def arranged(outline: Outline, options: Iterable[Option], pool: int) -> list[Arrangement]:
    """What fits, each once, best expectation first; of equal ones the first."""
    found: dict[tuple[object, ...], Arrangement] = {}
    for offload, algorithms in options:
        arrangement = arrange(outline, offload, algorithms, pool)
        if arrangement is not None:
            found.setdefault(arrangement.identity, arrangement)
    return sorted(found.values(), key=lambda a: a.ms)
