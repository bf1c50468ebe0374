"""A lower bound that knows that tensors leave and return whole: the longest path through ops and forced copies.

It follows three facts, whatever is offloaded and whichever algorithms run. (1) A tensor that cannot be in the pool
beside what some op needs is copied out between its making and the first such op, and in between the last such op and
its use; copies of one direction come one after another. (2) Whatever is away during an op has left before it and comes
back after it. (3) What is away is a set of whole tensors: its bytes are one of the sums that such sets have.

An op starts no sooner, and what follows it takes no less, than for the best of its algorithms: a larger workspace is
faster and sends more away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from minidnn.plan.outline import Movable, Outline

CELLS = 1 << 18
"""Sums of sizes are told apart to this fraction of the largest, or exactly where that takes no more."""


def whole_copies_ms(outline: Outline, pool: int) -> float:
    """ms without what the batch takes to come in. `outline` has sizes that are not rounded."""
    if not outline.ways:
        return 0.0
    return _Path(outline, pool).longest_ms()


@dataclass(frozen=True, slots=True)
class _Forced:
    """A copy after op `after` and before op `before`."""

    after: int
    before: int
    ms: float


class _Path:
    """The ops of an iteration in time, with the copies that are forced."""

    def __init__(self, outline: Outline, pool: int) -> None:
        self.outline, self.pool = outline, pool
        self.count = len(outline.ways)
        self.out, self.back = self._forced()
        self.sums = _Sums(outline)

    def longest_ms(self) -> float:
        """The most over all ops of what is before, during and after them, for the best of their algorithms."""
        starts, ends = self._starts()
        tails = self._tails()
        longest = ends[-1]
        for i, ways in enumerate(self.outline.ways):
            choices = []
            for a in ways:
                out, back = self._copies(i, a.workspace, ends, tails)
                choices.append(max(starts[i], out) + (a.ms or 0.0) + max(tails[i + 1], back))
            longest = max(longest, min(choices))
        return longest

    def _starts(self) -> tuple[list[float], list[float]]:
        """When each op starts and ends at the earliest; its own copies out are left out of `starts`."""
        starts, ends = [0.0] * self.count, [0.0] * self.count
        waits = _windows(self.out, self.back)
        for i, ways in enumerate(self.outline.ways):
            starts[i] = max([ends[i - 1] if i else 0.0, *(ends[after] + ms for after, ms in waits.get(i, ()))])
            ends[i] = min(max(starts[i], self._copies(i, a.workspace, ends, None)[0]) + (a.ms or 0.0) for a in ways)
        return starts, ends

    def _tails(self) -> list[float]:
        """ms from the start of each op to the end, and 0; the same seen from the end."""
        tails = [0.0] * (self.count + 1)
        mirrored = [[_Forced(-f.before, -f.after, f.ms) for f in forced] for forced in (self.out, self.back)]
        waits = _windows(*mirrored)
        for i in range(self.count - 1, -1, -1):
            rest = max([tails[i + 1], *(tails[-later] + ms for later, ms in waits.get(-i, ()))])
            ways = self.outline.ways[i]
            tails[i] = min((a.ms or 0.0) + max(rest, self._copies(i, a.workspace, None, tails)[1]) for a in ways)
        return tails

    def _copies(
        self, i: int, workspace: int, ends: Sequence[float] | None, tails: Sequence[float] | None
    ) -> tuple[float, float]:
        """When what must be away during op i has left, and what its return and what follows that take."""
        away = self.outline.resident[i] + workspace - self.pool
        if away <= 0:
            return 0.0, 0.0
        link, out, back = self.outline.link, 0.0, 0.0
        first, last = self.sums.span(i)
        if ends is not None and first >= 0:
            nbytes = self.sums.least(i, away, sent=True)
            out = ends[first] + nbytes / link.d2h * 1e3 if nbytes else 0.0
        if tails is not None and last >= 0:
            back = self.sums.least(i, away, sent=False) / link.h2d * 1e3 + tails[last]
        return out, back

    def _forced(self) -> tuple[list[_Forced], list[_Forced]]:
        """The copies out and in of tensors that have no room beside what some op needs."""
        outline, link = self.outline, self.outline.link
        least = [min(a.workspace for a in ways) for ways in outline.ways]
        free = [self.pool - n - w for n, w in zip(outline.without(outline.movable), least, strict=True)]
        out, back = [], []
        for m in outline.movable:
            absent = [i for i in range(m.left + 1, m.needed) if free[i] < m.in_bytes]
            if absent:
                back.append(_Forced(absent[-1], m.needed, m.in_bytes / link.h2d * 1e3))
                if m.out_bytes:
                    out.append(_Forced(m.made, absent[0], m.out_bytes / link.d2h * 1e3))
        return out, back


def _windows(*directions: Iterable[_Forced]) -> dict[int, list[tuple[int, float]]]:
    """By op: after which op, and how many ms later at least, it starts: the sum of the copies of one direction that
    have to happen between the two."""
    waits: dict[int, list[tuple[int, float]]] = {}
    for forced in directions:
        by_start = sorted(forced, key=lambda f: -f.after)
        for before in {f.before for f in forced}:
            total = 0.0
            for f in by_start:
                if f.before <= before:
                    total += f.ms
                    waits.setdefault(before, []).append((f.after, total))
    return waits


class _Sums:
    """Per op the tensors that may be away, and the sums of bytes that sets of them have.

    A set of sums is an integer: bit k stands for k units. Where sizes are no whole units, a sum of n tensors may be up
    to n units more than it says.
    """

    def __init__(self, outline: Outline) -> None:
        self.turn = outline.graph.forward_ops
        sizes = [m.in_bytes for m in outline.movable]
        exact = gcd(*sizes) if sizes else 1
        self.unit = max(exact, sum(sizes) // CELLS, 1)
        self.slack = 0 if self.unit == exact else len(sizes)
        self.forward = self._grown(sorted(outline.movable, key=lambda m: m.left), lambda m: m.left)
        self.backward = self._grown(sorted(outline.movable, key=lambda m: -m.needed), lambda m: -m.needed)
        self.kept = sum(m.in_bytes for m in outline.movable if not m.out_bytes)
        self.made = [m.made for m in outline.movable if m.out_bytes]
        self.first = min(self.made, default=-1)

    def _grown(self, order: Sequence[Movable], key: Callable[[Movable], int]) -> list[tuple[int, int, int, int]]:
        """Steps: from which key on (exclusive), the sums of all tensors, those of tensors that are copied out, and the
        last op that needs one."""
        steps, every, sent, last = [(-(1 << 60), 1, 1, -1)], 1, 1, -1
        for m in order:
            size = m.in_bytes // self.unit
            every |= every << size
            sent = sent | sent << size if m.out_bytes else sent
            last = max(last, m.needed)
            steps.append((key(m), every, sent, last))
        return steps

    def _step(self, i: int) -> tuple[int, int, int, int]:
        steps, at = (self.forward, i) if i < self.turn else (self.backward, -i)
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if steps[middle][0] < at:
                low = middle
            else:
                high = middle - 1
        return steps[low]

    def span(self, i: int) -> tuple[int, int]:
        """The op that makes the first tensor that is ever copied out, and the last op that needs one of those that may
        be away during op i; -1 where there is none."""
        return self.first, self._step(i)[3]

    def least(self, i: int, away: int, sent: bool) -> int:
        """Bytes that have to be copied out (`sent`), or in, so that so many are away during op i."""
        _, every, out, _ = self._step(i)
        wanted = away - self.kept if sent else away
        if wanted <= 0:
            return 0
        cell = max(-(-wanted // self.unit) - self.slack, 0)
        rest = (out if sent else every) >> cell
        if not rest:
            return wanted  # this algorithm cannot be had; what is said of it does not matter
        return max(wanted, (cell + (rest & -rest).bit_length() - 1) * self.unit)
