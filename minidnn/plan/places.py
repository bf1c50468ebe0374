"""Compiled inner loops of layouts (numba): stays with an address, an op with which they begin and one that ends them.

Stay i takes `nbytes[i]` from `low[i]` while ops `first[i]` to `last[i]` run. `by_low[1:]` are the stays that have a
place, by address, so many as `by_low[0]` says.
"""

from __future__ import annotations

import numpy as np

from minidnn.compiled import compiled
from minidnn.plan.loops import Bools, Floats, Ints, run_clock


@compiled
def gap(
    nbytes: Ints, first: Ints, last: Ints, low: Ints, by_low: Ints, i: int, begin: int, end: int, pool: int, where: int
) -> int:
    """An address at which stay i finds its bytes free from op `begin` to op `end`; -1 where there is none. `where`: 0
    the bottom of the lowest gap, 1 the top of the highest, 2 the bottom of the smallest."""
    found, smallest, floor, size = -1, pool + 1, 0, nbytes[i]
    for k in range(1, by_low[0] + 2):
        ceiling = pool
        if k <= by_low[0]:
            j = by_low[k]
            if first[j] > end or last[j] < begin or j == i:
                continue
            ceiling = low[j]
        if ceiling - floor >= size:
            if where == 0:
                return floor
            if where == 1:
                found = ceiling - size
            elif ceiling - floor < smallest:
                found, smallest = floor, ceiling - floor
        if k <= by_low[0]:
            floor = max(floor, ceiling + nbytes[j])
    return found


@compiled
def settle(low: Ints, by_low: Ints, i: int, address: int, new: bool) -> None:
    """Stay i gets this address; unless it is `new`, it had another."""
    at = by_low[0] + 1
    if new:
        by_low[0] = at
    else:
        at = 1
        while by_low[at] != i:
            at += 1
    while at > 1 and low[by_low[at - 1]] > address:
        by_low[at] = by_low[at - 1]
        at -= 1
    while at < by_low[0] and low[by_low[at + 1]] < address:
        by_low[at] = by_low[at + 1]
        at += 1
    by_low[at] = i
    low[i] = address


@compiled
def put(
    nbytes: Ints, first: Ints, last: Ints, low: Ints, by_low: Ints, order: Ints, high: Bools, wishes: Ints, pool: int
) -> bool:
    """Place all stays in this order, from the top those that are `high`; for the time from `wishes[0]` to `wishes[1]`
    where that can be had. False where one finds no room."""
    for i in order:
        where = 1 if high[i] else 0
        at = -1
        if wishes[0, i] < first[i] or wishes[1, i] > last[i]:
            at = gap(nbytes, first, last, low, by_low, i, wishes[0, i], wishes[1, i], pool, where)
            if at >= 0:
                first[i], last[i] = wishes[0, i], wishes[1, i]
        if at < 0:
            at = gap(nbytes, first, last, low, by_low, i, first[i], last[i], pool, where)
        if at < 0:
            return False
        settle(low, by_low, i, at, True)
    return True


@compiled
def stretch(
    nbytes: Ints, first: Ints, last: Ints, low: Ints, by_low: Ints, out: Ints, back: Ints, needs: Ints, pool: int,
    until: Ints, fetch: Ints,
) -> None:  # fmt: skip
    """Let each offloaded tensor's first stay (`out`) end as late as it can, before op `until` at the latest, and its
    second (`back`) begin as early as it can, with op `fetch` at the earliest. A stay that grows may move."""
    for j in range(len(out)):
        if out[j] >= 0 and until[j] >= 0:
            i, shortest, longest = out[j], last[out[j]], until[j] - 1
            while shortest < longest:
                middle = (shortest + longest + 1) // 2
                at = gap(nbytes, first, last, low, by_low, i, first[i], middle, pool, 2)
                if at >= 0:
                    settle(low, by_low, i, at, False)
                    last[i] = shortest = middle
                else:
                    longest = middle - 1
            until[j] = last[i] + 1
    begun = 0
    for j in needs:
        if back[j] >= 0:
            i, earliest, latest = back[j], max(begun, fetch[j]), first[back[j]]
            while earliest < latest:
                middle = (earliest + latest) // 2
                at = gap(nbytes, first, last, low, by_low, i, middle, last[i], pool, 2)
                if at >= 0:
                    settle(low, by_low, i, at, False)
                    first[i] = latest = middle
                else:
                    earliest = middle + 1
            begun = fetch[j] = max(begun, first[i])


@compiled
def reused(
    nbytes: Ints, first: Ints, last: Ints, low: Ints, out: Ints, back: Ints, until: Ints, fetch: Ints
) -> tuple[Ints, Ints]:
    """Who takes bytes of the tensors' first stays: `until` is set to the op before which that is, or before which the
    tensor itself returns. Returns the op that waits for each copy-out (-1: none), and which tensor's copy-out each
    tensor's copy-in waits for (-1: none). Copies end in the order of the tensors: the last is enough."""
    returns = np.full(len(low), -1, np.int64)
    for t in range(len(back)):
        if back[t] >= 0:
            returns[back[t]] = t
    waits, behind = np.full(len(out), -1, np.int64), np.full(len(out), -1, np.int64)
    for j in range(len(out)):
        if out[j] >= 0 and until[j] >= 0:
            i, soonest, waiting = out[j], fetch[j], -1
            for k in range(len(low)):
                if last[i] < first[k] and low[k] < low[i] + nbytes[i] and low[i] < low[k] + nbytes[k]:
                    t = returns[k]
                    if t < 0:
                        waiting = first[k] if waiting < 0 else min(waiting, first[k])
                    elif t != j:
                        behind[t] = j
                    soonest = min(soonest, first[k])
            until[j], waits[j] = soonest, waiting
    return waits, behind


@compiled
def layout(
    nbytes: Ints, first: Ints, last: Ints, low: Ints, order: Ints, high: Bools, wishes: Ints, out: Ints,
    back: Ints, pool: int, made: Ints, needed: Ints, out_ms: Floats, in_ms: Floats, away: Bools, natural: Ints,
    needs: Ints, ms: Floats, load_ms: float, return_ms: float, duplex: bool, until: Ints, fetch: Ints,
) -> float:  # fmt: skip
    """Place, stretch, and run the clock: ms of the iteration, infinite where the stays do not fit in this order."""
    by_low = np.zeros(len(order) + 1, np.int64)
    if not put(nbytes, first, last, low, by_low, order, high, wishes, pool):
        return np.inf
    stretch(nbytes, first, last, low, by_low, out, back, needs, pool, until, fetch)
    waits, behind = reused(nbytes, first, last, low, out, back, until, fetch)
    starts = np.zeros(len(ms))
    return run_clock(
        made, needed, out_ms, in_ms, away, natural, needs, ms, load_ms, return_ms, duplex, waits, fetch, behind, starts
    )
