"""When each offloaded tensor goes and comes back (Beaumont et al. 2020, Proposition 1), by a clock of ops and copies.

Two questions are open once the set and the algorithms are fixed. When is a copied-out tensor's memory counted as free?
As soon as its copy is done by the clock, or, where an op would find no room, before that op, which then waits: copies
end in the order in which they are issued, so an op waits for as few of them as its memory takes. And when may a copy-in
begin? In the order of need, each as early as every op up to its consumer still fits (the literal rule, as soon as there
is room now, can end in a deadlock).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from minidnn.plan.outline import Arrangement, Movable, Outline, need
from minidnn.profile.profile import Algorithm
from minidnn.units import round_up

if TYPE_CHECKING:
    from minidnn.plan.loops import Bools, Floats, Ints

ROUNDS = 2
"""The clock is run so often: each time the moments of the run before say which copies are done."""
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Moments:
    """Per movable tensor (index in `Outline.movable`) whether it leaves, and the ops of `Arrangement`, -1 where there
    is none; `ms` of the iteration, and the most bytes of the pool."""

    away: Bools
    until: Ints
    fetch: Ints
    ms: float
    peak: int


class Clock:
    """An outline as columns."""

    def __init__(self, outline: Outline) -> None:
        from minidnn.plan import loops  # numba, when there is something to plan

        self.loops, self.outline = loops, outline
        movable, link = outline.movable, outline.link
        columns = np.array([(m.made, m.left, m.needed, m.nbytes) for m in movable], np.int64).reshape(-1, 4)
        self.made, self.left, self.needed, self.nbytes = (columns[:, k].copy() for k in range(4))
        self.out_ms = np.array([link.ms(m.out_bytes, True) for m in movable], np.float64)
        self.in_ms = np.array([link.ms(m.in_bytes, False) for m in movable], np.float64)
        self.copied = np.array([m.out_bytes > 0 for m in movable], np.bool_)
        self.order = np.arange(len(movable), dtype=np.int64)
        self.needs = np.array(sorted(range(len(movable)), key=lambda j: need(movable[j])), np.int64)
        self.resident = np.array(outline.resident, np.int64)
        self.index = {m.name: j for j, m in enumerate(movable)}

    @cached_property
    def layers(self) -> Ints:
        return np.array([op.layer for op in self.outline.graph.ops], np.int64)

    def mask(self, offload: Iterable[Movable]) -> Bools:
        """As a column."""
        away = np.zeros(len(self.made), np.bool_)
        for m in offload:
            away[self.index[m.name]] = True
        return away

    def columns(self, algorithms: Sequence[Algorithm]) -> tuple[Floats, Ints]:
        """Their ms and workspaces (rounded)."""
        unit = self.outline.granularity
        ms = np.array([a.ms or 0.0 for a in algorithms], np.float64)
        return ms, np.array([round_up(a.workspace, unit) for a in algorithms], np.int64)

    def held(self, away: Bools) -> Ints:
        """What stays in the pool per op, workspaces left out, when these are away as long as they can be."""
        held: Ints = self.loops.held_without(self.resident, self.left, self.needed, self.nbytes, away)
        return held

    def best(self, away: Bools, ms: Floats, workspaces: Ints, pool: int) -> Moments | None:
        """The best moments found in a pool of so many bytes; None where it cannot fit. What need not leave stays."""
        found: Moments | None = None
        starts = np.zeros(0)
        for _ in range(ROUNDS):
            occupied = self.held(away) + workspaces
            if occupied.max(initial=0) > pool:
                return found
            moments, starts = self._run(away.copy(), ms, occupied, pool, starts, -1)
            away = moments.away
            if found is None or moments.ms < found.ms:
                found = moments
        return found

    def free(self, away: Bools, ms: Floats, workspaces: Ints, lead: int) -> Moments:
        """Moments where nothing waits for memory: bytes are free when a copy-out is done, and are taken `lead` layers
        before they are needed."""
        moments, _ = self._run(away.copy(), ms, self.held(away) + workspaces, ENDLESS, np.zeros(0), lead)
        return moments

    def _run(
        self, away: Bools, ms: Floats, occupied: Ints, pool: int, starts: Floats, lead: int
    ) -> tuple[Moments, Floats]:
        until, fetch = np.full(len(away), -1, np.int64), np.full(len(away), -1, np.int64)
        layers = self.layers if lead >= 0 else self.order
        self.loops.place_frees(
            self.made, self.left, self.needed, self.nbytes, self.out_ms, self.copied, away, self.order, ms, occupied,
            pool, self.outline.load_ms, starts, until,
        )  # fmt: skip
        self.loops.place_fetches(
            self.left, self.needed, self.nbytes, away, self.needs, occupied, pool, layers, lead, until, fetch
        )
        total, starts = self.ms(away, ms, until, fetch)
        return Moments(away, until, fetch, total, int(occupied.max(initial=0))), starts

    def ms(self, away: Bools, ms: Floats, until: Ints, fetch: Ints) -> tuple[float, Floats]:
        """ms of the iteration with these moments, and when each op starts."""
        starts = np.zeros(len(ms))
        total = self.loops.run_clock(
            self.made, self.needed, self.out_ms, self.in_ms, away, self.order, self.needs, ms, self.outline.load_ms,
            self.outline.return_ms, self.outline.link.duplex, until, fetch, np.full(len(away), -1, np.int64), starts,
        )  # fmt: skip
        return float(total), starts

    def arrangement(self, moments: Moments, algorithms: Sequence[Algorithm]) -> Arrangement:
        """As names."""
        offload = tuple(m for m, away in zip(self.outline.movable, moments.away, strict=True) if away)
        at = {m.name: self.index[m.name] for m in offload}
        until = {name: int(moments.until[j]) for name, j in at.items() if moments.until[j] >= 0}
        fetch = {name: int(moments.fetch[j]) for name, j in at.items()}
        return Arrangement(self.outline, offload, tuple(algorithms), until, fetch, moments.ms)


def arrange(
    outline: Outline, offload: Iterable[Movable], algorithms: Sequence[Algorithm], pool: int
) -> Arrangement | None:
    """The best moments found for an offload set in a pool of so many bytes; None where it cannot fit.

    What need not leave after all stays.
    """
    clock = outline.clock
    found = clock.best(clock.mask(offload), *clock.columns(algorithms), pool)
    return None if found is None else clock.arrangement(found, algorithms)


def flow(
    outline: Outline, offload: Iterable[Movable], algorithms: Sequence[Algorithm], lead: int
) -> tuple[int, Arrangement]:
    """Moments where nothing waits for memory, with copies in `lead` layers ahead. Returns the peak of the pool too."""
    clock = outline.clock
    found = clock.free(clock.mask(offload), *clock.columns(algorithms), lead)
    return found.peak, clock.arrangement(found, algorithms)
