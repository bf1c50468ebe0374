"""Local search for `best`: from an offload set and its algorithms to better ones, one change at a time.

A change takes one tensor in or out, exchanges two, or gives one op another algorithm; it stays if the clock promises
less. Where a change leaves an op too little room for its workspace, the op gets the fastest algorithm that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minidnn.plan.moments import Moments
from minidnn.plan.outline import Arrangement, Outline
from minidnn.profile.profile import Algorithm
from minidnn.units import round_up

if TYPE_CHECKING:
    from minidnn.plan.loops import Bools, Ints

OPS = 400_000
"""What a search may cost: ops that the clock walks over."""
EXCHANGES = 40
"""Up to so many tensors are exchanged in pairs."""
GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class _State:
    """Which tensors leave, which of its useful algorithms each op has (the fastest is 0), and the moments."""

    away: Bools
    chosen: Ints
    moments: Moments


class Neighbourhood:
    """The changes, in a pool of so many bytes. With a fixed rule for algorithms only tensors change."""

    def __init__(self, outline: Outline, pool: int, fixed: Sequence[Algorithm] | None = None) -> None:
        self.outline, self.clock, self.pool = outline, outline.clock, pool
        ways = outline.ways if fixed is None else [(a,) for a in fixed]
        self.ways = [_useful(way, outline.granularity) for way in ways]
        most = max(map(len, self.ways))
        full = [[*way, *[way[-1]] * (most - len(way))] for way in self.ways]
        columns = [self.clock.columns([way[k] for way in full]) for k in range(most)]
        self.ms, self.workspaces = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
        self.tensors = [self.clock.index[m.name] for m in outline.worthwhile]
        self.open = [i for i, way in enumerate(self.ways) if len(way) > 1]
        self.rows = np.arange(len(self.ways))
        self.evaluations = OPS // max(len(self.ways), 1)

    def improve(self, start: Arrangement) -> Arrangement | None:
        """The best that is found from there; None where that does not fit this pool."""
        away = self.clock.mask(start.offload)
        chosen = np.array([self._index(i, a) for i, a in enumerate(start.algorithms)], np.int64)
        reached = self._state(away, self._fitted(away, chosen))
        left, improving = self.evaluations, reached is not None
        while improving and left > 0:
            improving = False
            assert reached is not None
            for changed in self._changes(reached):
                left -= 1
                if changed is not None and changed.moments.ms < reached.moments.ms - GAIN:
                    reached, improving = changed, True
                    break
                if left <= 0:
                    break
        if reached is None:
            return None
        algorithms = [self.ways[i][k] for i, k in enumerate(reached.chosen)]
        return self.clock.arrangement(reached.moments, algorithms)

    def _index(self, i: int, algorithm: Algorithm) -> int:
        """Of the op's useful algorithms the one that is as good."""
        unit = self.outline.granularity
        room = round_up(algorithm.workspace, unit)
        fits = (k for k, a in enumerate(self.ways[i]) if round_up(a.workspace, unit) <= room)
        return next(fits, len(self.ways[i]) - 1)

    def _state(self, away: Bools, chosen: Ints) -> _State | None:
        moments = self.clock.best(away, self.ms[self.rows, chosen], self.workspaces[self.rows, chosen], self.pool)
        return None if moments is None else _State(moments.away, chosen, moments)

    def _fitted(self, away: Bools, chosen: Ints | None = None) -> Ints:
        """The fastest algorithms that fit; or those chosen, where they do."""
        fits = self.clock.held(away)[:, None] + self.workspaces <= self.pool
        first = np.where(fits.any(axis=1), fits.argmax(axis=1), self.workspaces.shape[1] - 1)
        fitted: Ints = first if chosen is None else np.maximum(first, chosen)
        return fitted

    def _changes(self, state: _State) -> Iterator[_State | None]:
        yield from self._moved(state)
        for i in self.open:
            for k in range(len(self.ways[i])):
                if k != state.chosen[i]:
                    chosen = state.chosen.copy()
                    chosen[i] = k
                    yield self._state(state.away, chosen)

    def _moved(self, state: _State) -> Iterator[_State | None]:
        def with_algorithms(*changed: int) -> Iterator[_State | None]:
            away = state.away.copy()
            away[list(changed)] ^= True
            kept, fastest = self._fitted(away, state.chosen), self._fitted(away)
            yield self._state(away, kept)
            if self.open:
                yield None if np.array_equal(kept, fastest) else self._state(away, fastest)

        for j in self.tensors:
            yield from with_algorithms(j)
        if len(self.tensors) <= EXCHANGES:
            for j in self.tensors:
                for k in self.tensors:
                    if state.away[j] and not state.away[k]:
                        yield from with_algorithms(j, k)


def _useful(ways: Sequence[Algorithm], unit: int) -> list[Algorithm]:
    """Fastest first, each of the later ones with less workspace."""
    found = [ways[0]]
    for a in sorted(ways, key=lambda a: a.ms or 0.0):
        if round_up(a.workspace, unit) < round_up(found[-1].workspace, unit):
            found.append(a)
    return found
