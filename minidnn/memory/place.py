"""Offline placement: every buffer of a known trace gets an offset for its whole stay.

This is dynamic storage allocation, NP-hard in general. The most bytes alive at once bound any placement from below, and
for the vDNN traces of the paper's networks that bound is reached to the byte. The construction is first fit in order of
size; where it stays above the bound, a seeded search changes the order: each step takes a buffer that lies too high (or
one that is in its way) and moves it before, or swaps it with, one that was placed earlier under it. Any left-shifted
placement comes from some order, so the search space contains an optimum. Deterministic: no clock, one fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from minidnn.arguments import shown
from minidnn.errors import ArgumentError
from minidnn.memory.trace import GRANULARITY, Allocate, Event, live_profile
from minidnn.units import round_up

EFFORT = 400_000
"""Buffers that a search places before it gives up, each step counting as STEP more. With many alive at once a buffer
takes 20 us."""
STEP = 100
CLOSE = 8192
"""A height that is above the target by no more than one part in so many is worth a quarter of the effort."""

WORSE = 0.02  # share of steps accepted although they are worse, to leave dead ends
SWAP = 0.3  # share of steps that swap two buffers instead of moving one forward
DEEPER = 0.2  # share of steps that go on from a buffer to one that is in its way


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer's stay: it holds `nbytes` from `start` until before `end`, in any integer time."""

    id: str
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes by id; `nbytes` is the highest end, `lower_bound` what no placement can go below."""

    offsets: Mapping[str, int]
    nbytes: int
    lower_bound: int


def intervals(trace: Iterable[Event]) -> tuple[Interval, ...]:
    """The stays of a trace, in order of allocation; time counts events. What is never freed stays to the end."""
    events = tuple(trace)
    live_profile(events)
    ends = {event.id: at for at, event in enumerate(events) if not isinstance(event, Allocate)}
    return tuple(
        Interval(event.id, event.nbytes, at, ends.get(event.id, len(events)))
        for at, event in enumerate(events)
        if isinstance(event, Allocate)
    )


def lower_bound(stays: Iterable[Interval], alignment: int = GRANULARITY) -> int:
    """Most bytes alive at once, sizes rounded up to `alignment`."""
    changes: list[tuple[int, int]] = []
    for stay in stays:
        nbytes = round_up(stay.nbytes, alignment)
        changes += [(stay.start, nbytes), (stay.end, -nbytes)]
    live = peak = 0
    for _, change in sorted(changes):  # at equal times frees, being negative, come first
        live += change
        peak = max(peak, live)
    return peak


def place(
    stays: Sequence[Interval], limit: int | None = None, alignment: int = GRANULARITY, effort: int = EFFORT
) -> Placement:
    """Offsets (multiples of `alignment`) such that buffers alive at the same time do not overlap.

    Stops as soon as the height is at the lower bound, or within `limit` if one is given; searches with at most `effort`
    otherwise, and not at all where `limit` is below the bound. The result may then be higher than
    `limit`: compare `nbytes`. Raises ArgumentError for equal ids, negative sizes and stays that end before they begin.
    """
    _check(stays, alignment)
    bound = lower_bound(stays, alignment)
    target = bound if limit is None else max(bound, limit)
    search = _Search(stays, alignment, target)
    search.construct()
    if limit is None or limit >= bound:
        search.improve(effort)
    return Placement(search.offsets(), search.best_height, bound)


def _check(stays: Sequence[Interval], alignment: int) -> None:
    if alignment < 1:
        raise ArgumentError(f"alignment is {alignment}; it must be 1 byte or more")
    seen: set[str] = set()
    for stay in stays:
        if stay.id in seen:
            raise ArgumentError(f"two intervals have the id {shown(stay.id)}; give each stay an id of its own")
        if stay.nbytes < 0 or stay.start >= stay.end:
            raise ArgumentError(f"{stay} is not a stay; nbytes must be 0 or more and start before end")
        seen.add(stay.id)


def overlapping(stays: Sequence[Interval]) -> list[list[int]]:
    """For each stay the indices of those that are alive at some moment of it."""
    found: list[list[int]] = [[] for _ in stays]
    alive: list[int] = []
    for i in sorted(range(len(stays)), key=lambda i: stays[i].start):
        alive = [j for j in alive if stays[j].end > stays[i].start]
        for j in alive:
            found[i].append(j)
            found[j].append(i)
        alive.append(i)
    return found


class _Search:
    """First fit in an order, and better orders. `tops[i]` is the end of buffer i, 0 while it is not placed."""

    def __init__(self, stays: Sequence[Interval], alignment: int, target: int) -> None:
        self.stays = stays
        self.target = target
        self.sizes = [round_up(stay.nbytes, alignment) for stay in stays]
        self.neighbours = overlapping(stays)
        self.random = Random(0).random
        self.order: list[int] = []
        self.tops: list[int] = []
        self.excess = 0  # bytes above the target, summed over the buffers
        self.best_tops: list[int] = []
        self.best_height = 0
        self.placed = 0

    def offsets(self) -> dict[str, int]:
        """The lowest placement found."""
        return {s.id: top - n for s, top, n in zip(self.stays, self.best_tops, self.sizes, strict=True)}

    def construct(self) -> None:
        """Start from the best of three orders: largest first, largest area first, last to end first."""
        stays, sizes = self.stays, self.sizes
        keys: tuple[Callable[[int], tuple[int, int]], ...] = (
            lambda i: (-sizes[i], stays[i].start),
            lambda i: (-sizes[i] * (stays[i].end - stays[i].start), stays[i].start),
            lambda i: (-stays[i].end, stays[i].start),
        )
        for key in keys:
            order = sorted(range(len(stays)), key=key)
            tops = self._fill(order, 0, [0] * len(stays))
            excess = self._excess(tops)
            if not self.order or excess < self.excess:
                self.order, self.tops, self.excess = order, tops, excess
            self._remember(tops)
            if not excess:
                return

    def improve(self, effort: int) -> None:
        """Change the order, step by step, until the target is reached or `effort` buffers have been placed."""
        close = self.target + self.target // CLOSE
        while self.best_height > self.target and self.placed < (effort if self.best_height > close else effort // 4):
            self.placed += STEP
            position = [0] * len(self.order)
            for k, i in enumerate(self.order):
                position[i] = k
            step = self._step(position)
            if step is None:
                continue
            low, high = step
            order = self.order.copy()
            if self.random() < SWAP:
                order[low], order[high] = order[high], order[low]
            else:
                order.insert(low, order.pop(high))
            tops = self._fill(order, low, self.tops.copy())
            excess = self._excess(tops)
            if excess <= self.excess or self.random() < WORSE:
                self.order, self.tops, self.excess = order, tops, excess
                self._remember(tops)

    def _step(self, position: list[int]) -> tuple[int, int] | None:
        """Two positions of the order, low and high: the buffer at `high` lies too high, or is in the way of one that
        does, and the one at `low` was placed before it and is alive with it."""
        i = self._pick([i for i, top in enumerate(self.tops) if top > self.target])
        earlier = [j for j in self.neighbours[i] if position[j] < position[i]]
        while earlier and self.random() < DEEPER:
            i = self._pick(earlier)
            earlier = [j for j in self.neighbours[i] if position[j] < position[i]]
        return (position[self._pick(earlier)], position[i]) if earlier else None

    def _pick(self, choices: list[int]) -> int:
        return choices[int(self.random() * len(choices))]

    def _fill(self, order: list[int], start: int, tops: list[int]) -> list[int]:
        """First fit for the buffers from position `start` on; the earlier ones keep their places."""
        sizes, neighbours = self.sizes, self.neighbours
        for i in order[start:]:
            tops[i] = 0
        for i in order[start:]:
            nbytes, offset = sizes[i], 0
            for bottom, top in sorted([(tops[j] - sizes[j], tops[j]) for j in neighbours[i] if tops[j]]):
                if bottom - offset >= nbytes:
                    break
                offset = max(offset, top)
            tops[i] = offset + nbytes
        self.placed += len(order) - start
        return tops

    def _excess(self, tops: list[int]) -> int:
        return sum([top - self.target for top in tops if top > self.target])

    def _remember(self, tops: list[int]) -> None:
        height = max(tops, default=0)
        if not self.best_tops or height < self.best_height:
            self.best_tops, self.best_height = tops, height
