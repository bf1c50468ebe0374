"""From an offload set to a plan without host waits (Beaumont et al., Proposition 1), and the search among plans.

Two questions are open once the set and the algorithms are fixed. When is a copied-out tensor's memory counted as free?
As soon as its copy is done by the clock, or, where an op would find no room, before that op, which then waits: copies
end in the order in which they are issued, so an op waits for as few of them as its memory takes. And when may a copy-in
begin? In the order of need, each as early as every op up to its consumer still fits (the literal rule, as soon as there
is room now, can end in a deadlock).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from minidnn.memory.trace import GRANULARITY
from minidnn.plan.layout import lay_out
from minidnn.plan.mode import Outcome, Proposals, Request
from minidnn.plan.outline import Arrangement, Movable, Outline, need
from minidnn.plan.plan import Plan, stages_by_op
from minidnn.profile.profile import Algorithm
from minidnn.units import round_up

ROUNDS = 2
"""The clock is run so often: each time the moments of the run before say which copies are done."""
ENDLESS = 1 << 62
NEAR = 1.0005
"""A plan within that of the time of all ops is not improved."""
SLACK = (1.0, 0.985, 0.97, 0.95, 0.92, 0.88)
"""Shares of the pool that moments are made for where a placement cannot keep those for all of it."""
LONG = 500
"""With so many ops fewer of them are tried."""
SHARES = ((1.0, 2), (0.95, 1), (0.88, 1))
"""Shares of the pool that sets are chosen for, and how many plans of each are lowered, placed and simulated."""

Option = tuple[Sequence[Movable], Sequence[Algorithm]]


def arrange(
    outline: Outline, offload: Iterable[Movable], algorithms: Sequence[Algorithm], pool: int
) -> Arrangement | None:
    """The best moments found for an offload set in a pool of so many bytes; None where it cannot fit.

    What need not leave after all stays.
    """
    best: Arrangement | None = None
    starts: list[float] | None = None
    chosen = sorted(offload, key=lambda m: (m.made, m.left))
    for _ in range(ROUNDS):
        if outline.peak(algorithms, outline.without(chosen)) > pool:
            return best
        moments = _Moments(outline, chosen, algorithms, pool)
        moments.place_frees(starts)
        chosen = moments.offload
        moments.place_fetches(None)
        ms, starts = clock(outline, chosen, moments.ms, moments.until, moments.fetch)
        if best is None or ms < best.ms:
            best = Arrangement(outline, tuple(chosen), tuple(algorithms), moments.until, moments.fetch, ms)
    return best


def flow(
    outline: Outline, offload: Iterable[Movable], algorithms: Sequence[Algorithm], lead: int
) -> tuple[int, Arrangement]:
    """Moments where nothing waits for memory: bytes are free when a copy-out is done, and are taken `lead` layers
    before they are needed. Returns the peak of the pool too."""
    moments = _Moments(outline, sorted(offload, key=lambda m: (m.made, m.left)), algorithms, ENDLESS)
    moments.place_frees(None)
    moments.place_fetches(lead)
    ms, _ = clock(outline, moments.offload, moments.ms, moments.until, moments.fetch)
    found = Arrangement(outline, tuple(moments.offload), tuple(algorithms), moments.until, moments.fetch, ms)
    return max(moments.occupied), found


class _Moments:
    """When memory comes back and when it is taken again. `occupied[i]` is what the pool holds while op i runs."""

    def __init__(
        self, outline: Outline, offload: list[Movable], algorithms: Sequence[Algorithm], pool: int
    ) -> None:
        self.outline, self.offload, self.pool = outline, offload, pool
        self.ms = [a.ms or 0.0 for a in algorithms]
        held = outline.without(offload)
        self.occupied = [h + round_up(a.workspace, GRANULARITY) for h, a in zip(held, algorithms, strict=True)]
        self.until: dict[str, int] = {}
        self.fetch: dict[str, int] = {}
        self.made = _by(offload, lambda m: m.made)
        self.left = _by(offload, lambda m: m.left)

    def place_frees(self, starts: list[float] | None) -> None:
        """Set `until`. `starts` is when the ops start at the earliest, by an earlier run."""
        link, now, lane = self.outline.link, self.outline.load_ms, 0.0
        done: dict[str, float] = {}
        pending: list[Movable] = []
        waiting = 0
        staying: set[str] = set()
        for i, ms in enumerate(self.ms):
            now = max(now, starts[i]) if starts else now
            for m in [m for m in pending if m.needed == i]:  # nobody needed its bytes
                pending.remove(m)
                waiting -= m.nbytes
                staying.add(m.name)
            while pending and (done[pending[0].name] <= now or self.occupied[i] + waiting > self.pool):
                m = pending.pop(0)
                waiting -= m.nbytes
                self.until[m.name] = i
                now = max(now, done[m.name])
            self.occupied[i] += waiting
            now += ms
            for m in self.made.get(i, ()):
                lane = done[m.name] = max(lane, now) + link.ms(m.out_bytes, True)
            for m in self.left.get(i, ()):
                if m.out_bytes:
                    pending.append(m)
                    waiting += m.nbytes
        self.offload = [m for m in self.offload if m.name not in staying]

    def place_fetches(self, lead: int | None) -> None:
        """Set `fetch`: in the order of need, each copy-in as early as it fits."""
        earliest = 0
        layers = [op.layer for op in self.outline.graph.ops] if lead is not None else []
        for m in sorted(self.offload, key=need):
            earliest = max(earliest, self.until.get(m.name, 0), m.left + 1)
            stage = m.needed
            while stage > earliest and self.occupied[stage - 1] + m.nbytes <= self.pool:
                if lead is not None and layers[stage - 1] > layers[m.needed] + lead:
                    break
                stage -= 1
                self.occupied[stage] += m.nbytes
            self.fetch[m.name] = earliest = stage


def clock(
    outline: Outline, offload: Sequence[Movable], times: Sequence[float], until: Mapping[str, int],
    fetch: Mapping[str, int],
) -> tuple[float, list[float]]:  # fmt: skip
    """ms of the iteration with these moments, and when each op starts; `times` are the ops' own."""
    link, now = outline.link, outline.load_ms
    free = {True: 0.0, False: now}  # the link, by direction: whether to the host
    done: dict[str, float] = {}
    arrival: dict[int, float] = {}
    made = _by(offload, lambda m: m.made)
    fetches = _by(sorted(offload, key=need), lambda m: fetch[m.name])
    frees: dict[int, list[str]] = {}
    for name, at in until.items():
        frees.setdefault(at, []).append(name)
    starts: list[float] = []

    def copy(ready: float, nbytes: int, out: bool) -> float:
        end = max(ready, free[out]) + link.ms(nbytes, out)
        free[out] = end
        if not link.duplex:
            free[not out] = end
        return end

    for i, ms in enumerate(times):
        for m in fetches.get(i, ()):
            arrived = copy(max(now, done.get(m.name, 0.0)), m.in_bytes, False)
            arrival[m.needed] = max(arrival.get(m.needed, 0.0), arrived)
        now = max(now, arrival.get(i, 0.0), *(done[name] for name in frees.get(i, ())))
        starts.append(now)
        now += ms
        for m in made.get(i, ()):
            done[m.name] = copy(now, m.out_bytes, True)
    return max(now, free[True], free[False]), starts


def _by(offload: Iterable[Movable], key: Callable[[Movable], int]) -> dict[int, list[Movable]]:
    groups: dict[int, list[Movable]] = {}
    for m in offload:
        groups.setdefault(key(m), []).append(m)
    return groups


def tightest(outline: Outline) -> Arrangement:
    """Everything leaves at once and comes back when it is needed, with the least workspaces: the smallest pool."""
    until = {m.name: m.left + 1 for m in outline.movable if m.out_bytes}
    fetch = {m.name: m.needed for m in outline.movable}
    return Arrangement(outline, outline.movable, outline.smallest, until, fetch, inf)


def search(
    outline: Outline, request: Request, options: Callable[[int], Iterable[Option]],
    shares: Sequence[tuple[float, int]] = SHARES,
) -> Proposals:  # fmt: skip
    """Propose the plans of `options(pool)`, best expectation first, while one may be better than the best found.

    What a placement costs shows when it is made: options for a pool that is smaller by some share, which take more
    copies and leave more freedom, are tried as long as they promise more. Where nothing fits: all that is movable, at
    last the tightest plan.
    """
    if request.pool is None:
        yield from keep(outline, request)
        return
    best = inf
    seen: set[tuple[object, ...]] = set()
    for share, tries in shares:
        if best <= outline.floor_ms * NEAR:
            break
        pool = int(request.pool * share)
        best = yield from _try(arranged(outline, options(pool), pool), request, tries, best, seen)
    for offload in (outline.worthwhile, outline.movable):
        if best == inf:
            room = outline.within(request.pool, outline.without(offload))
            choices = [(offload, outline.smallest if request.mode.rule == "m" else room), (offload, outline.smallest)]
            best = yield from _try(arranged(outline, choices, request.pool), request, len(choices), best, seen)
    if best == inf:
        yield tightest(outline).plan(request)


def _try(
    found: Sequence[Arrangement], request: Request, tries: int, best: float, seen: set[tuple[object, ...]]
) -> Generator[Plan, Outcome | None, float]:
    """Propose those that promise more than `best`, so many that fit; returns the best ms, `best` included."""
    for arrangement in found:
        if arrangement.ms >= best or not tries:
            break
        if arrangement.identity not in seen:
            seen.add(arrangement.identity)
            ms = yield from settle(arrangement, request)
            tries -= ms < inf
            best = min(best, ms)
    return best


def keep(outline: Outline, request: Request) -> Proposals:
    """Without a budget nothing needs to leave."""
    algorithms = outline.smallest if request.mode.rule == "m" else outline.fastest
    yield Plan(str(request.mode), stages_by_op(request.graph), outline.named(algorithms))


def settle(arrangement: Arrangement, request: Request) -> Generator[Plan, Outcome | None, float]:
    """Propose the plan of an arrangement, placed. Returns the ms of the iteration, infinite where it does not fit."""
    assert request.pool is not None
    placed = _placed(arrangement, request.pool)
    if placed is None:
        return inf
    outcome = yield placed.plan(request)
    if outcome is None or not outcome.fits:
        return inf
    return placed.ms if outcome.ms is None else outcome.ms


def _placed(arrangement: Arrangement, pool: int) -> Arrangement | None:
    """The arrangement with offsets; where its moments cannot be kept, the best of some made for less memory."""
    outline = arrangement.outline
    times = [a.ms or 0.0 for a in arrangement.algorithms]
    best: Arrangement | None = None
    for share in SLACK if len(times) < LONG else SLACK[:2]:
        wish: Arrangement | None = arrangement
        if share < 1:
            wish = arrange(outline, arrangement.offload, arrangement.algorithms, int(pool * share))
        placed = lay_out(wish, pool) if wish else None
        if placed is not None:
            ms, _ = clock(outline, placed.offload, times, placed.free_before, placed.fetch)
            if best is None or ms < best.ms:
                best = replace(placed, ms=ms)
            if best.ms <= arrangement.ms * NEAR:
                break
    return best


def arranged(outline: Outline, options: Iterable[Option], pool: int) -> list[Arrangement]:
    """What fits, each once, best expectation first; of equal ones the first."""
    found: dict[tuple[object, ...], Arrangement] = {}
    for offload, algorithms in options:
        arrangement = arrange(outline, offload, algorithms, pool)
        if arrangement is not None:
            found.setdefault(arrangement.identity, arrangement)
    return sorted(found.values(), key=lambda a: a.ms)
