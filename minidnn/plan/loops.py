"""Compiled inner loops of planning (numba): when memory comes back and is taken again, and how long that takes.

Tensors and ops are indices. `away[j]` says whether tensor j is offloaded; the other columns of tensors are those of
`Movable`. `moments` imports this module when the first plan is made, so that minidnn itself never waits for numba.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minidnn.compiled import compiled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@compiled
def chains(keys: Ints, away: Bools, order: Ints, count: int) -> tuple[Ints, Ints]:
    """Per op the tensors with that key, in `order`: the first, and for each the next; -1 ends."""
    head, following = np.full(count, -1, np.int64), np.full(len(keys), -1, np.int64)
    for at in range(len(order) - 1, -1, -1):
        j = order[at]
        if away[j] and 0 <= keys[j] < count:
            following[j] = head[keys[j]]
            head[keys[j]] = j
    return head, following


@compiled
def held_without(resident: Ints, left: Ints, needed: Ints, nbytes: Ints, away: Bools) -> Ints:
    """Bytes that stay in the pool per op when these tensors are away as long as they can be."""
    change = np.zeros(len(resident) + 1, np.int64)
    for j in range(len(away)):
        if away[j]:
            change[left[j] + 1] -= nbytes[j]
            change[needed[j]] += nbytes[j]
    held: Ints = resident.copy()
    less = 0
    for i in range(len(held)):
        less += change[i]
        held[i] += less
    return held


@compiled
def place_frees(
    made: Ints, left: Ints, needed: Ints, nbytes: Ints, out_ms: Floats, copied: Bools, away: Bools, order: Ints,
    ms: Floats, occupied: Ints, pool: int, load_ms: float, starts: Floats, until: Ints,
) -> None:  # fmt: skip
    """Set `until`, the op before which each copied tensor's bytes count as free: as soon as its copy is done by the
    clock, or, where an op would find no room, before that op, which then waits. `starts` is when the ops start at the
    earliest, by an earlier run (empty: not known). A tensor whose bytes nobody asks for stays: its `away` is cleared.
    """
    count = len(ms)
    made_head, made_next = chains(made, away, order, count)
    left_head, left_next = chains(left, away, order, count)
    done = np.zeros(len(made))
    pending = np.empty(len(made), np.int64)
    first = last = waiting = 0
    now, lane = load_ms, 0.0
    for i in range(count):
        if len(starts):
            now = max(now, starts[i])
        kept = first
        for at in range(first, last):
            j = pending[at]
            if needed[j] == i:
                waiting -= nbytes[j]
                away[j] = False
            else:
                pending[kept] = j
                kept += 1
        last = kept
        while first < last and (done[pending[first]] <= now or occupied[i] + waiting > pool):
            j = pending[first]
            first += 1
            waiting -= nbytes[j]
            until[j] = i
            now = max(now, done[j])
        occupied[i] += waiting
        now += ms[i]
        j = made_head[i]
        while j >= 0:
            lane = max(lane, now) + out_ms[j]
            done[j] = lane
            j = made_next[j]
        j = left_head[i]
        while j >= 0:
            if copied[j]:
                pending[last] = j
                last += 1
                waiting += nbytes[j]
            j = left_next[j]


@compiled
def place_fetches(
    left: Ints, needed: Ints, nbytes: Ints, away: Bools, order: Ints, occupied: Ints, pool: int, layers: Ints,
    lead: int, until: Ints, fetch: Ints,
) -> None:  # fmt: skip
    """Set `fetch`, the op before which each copy-in is issued: in the `order` of need, each as early as it fits, with
    `lead` >= 0 at most so many layers ahead."""
    earliest = 0
    for at in range(len(order)):
        j = order[at]
        if away[j]:
            earliest = max(earliest, until[j], left[j] + 1)
            stage = needed[j]
            while stage > earliest and occupied[stage - 1] + nbytes[j] <= pool:
                if lead >= 0 and layers[stage - 1] > layers[needed[j]] + lead:
                    break
                stage -= 1
                occupied[stage] += nbytes[j]
            fetch[j] = earliest = stage


@compiled
def run_clock(
    made: Ints, needed: Ints, out_ms: Floats, in_ms: Floats, away: Bools, order: Ints, needs: Ints, ms: Floats,
    load_ms: float, return_ms: float, duplex: bool, until: Ints, fetch: Ints, behind: Ints, starts: Floats,
) -> float:  # fmt: skip
    """ms of the iteration with these moments; `starts` is set to when each op starts. `order` and `needs` are the
    tensors by when they are made and by when they are needed; a copy-in also waits for the copy-out of the tensor that
    it is `behind` (-1: none)."""
    count = len(ms)
    made_head, made_next = chains(made, away, order, count)
    fetch_head, fetch_next = chains(fetch, away, needs, count)
    until_head, until_next = chains(until, away, order, count)
    done, arrival = np.zeros(len(made)), np.zeros(count)
    now = free_in = load_ms
    free_out = 0.0
    for i in range(count):
        j = fetch_head[i]
        while j >= 0:
            ready = max(now, done[j], free_in)
            if behind[j] >= 0:
                ready = max(ready, done[behind[j]])
            free_in = ready + in_ms[j]
            if not duplex:
                free_out = free_in
            arrival[needed[j]] = max(arrival[needed[j]], free_in)
            j = fetch_next[j]
        now = max(now, arrival[i])
        j = until_head[i]
        while j >= 0:
            now = max(now, done[j])
            j = until_next[j]
        starts[i] = now
        now += ms[i]
        j = made_head[i]
        while j >= 0:
            free_out = max(now, free_out) + out_ms[j]
            if not duplex:
                free_in = free_out
            done[j] = free_out
            j = made_next[j]
    return max(max(now, free_out) + return_ms, free_in)


@compiled
def turn_ms(
    x: Floats, y: Floats, u_f: Floats, u_b: Floats, ex_f: Floats, ex_b: Floats, rate: float, memory: float,
    held_f: float, left: float, ahead: float,
) -> float:  # fmt: skip
    """`Chain.turn_ms`: Lemma 4, corrected."""
    top = len(u_f)
    held_b = y[top] + max(0.0, ahead) + held_f - max(0.0, left)
    wait = max(0.0, (left + ahead) / rate)
    later = time_b = time_f = 0.0  # sum of |x_i| for i > j + 1, of u_B_i and u_F_i for i > j
    for j in range(top - 1, -1, -1):
        if time_b * rate < -ahead:
            need = ex_b[j] + y[j] + y[j + 1] - later
            wait = max(wait, (need + held_f - memory) / rate - time_b)
        if time_f * rate < -left:
            need = ex_f[j] - y[top] - later
            wait = max(wait, (need + held_b - memory) / rate - time_f)
        later += x[j + 1]
        time_b, time_f = time_b + u_b[j], time_f + u_f[j]
    return wait


@compiled
def idle_ms(
    x: Floats, y: Floats, u_f: Floats, u_b: Floats, ex_f: Floats, ex_b: Floats, rate: float, memory: float,
    amounts: Floats, slack: float,
) -> float:  # fmt: skip
    """`Chain.idle_ms`: Equations (1) to (9) of Beaumont et al. 2020, corrected."""
    held_f, left, ahead, idle = x[0], 0.0, 0.0, 0.0  # M_F, D_F, D_B
    for i in range(len(u_f)):
        amount = amounts[i]
        held_b = y[i] + max(0.0, ahead) + held_f - max(0.0, left)
        forward = held_f + ex_f[i] + x[i + 1] - memory
        backward = held_b + ex_b[i] + x[i + 1] + y[i + 1] - memory
        if max(forward - max(0.0, left), backward - max(0.0, ahead)) > slack:
            return np.inf
        wait_f, wait_b = max(0.0, forward / rate), max(0.0, backward / rate)
        idle += wait_f + wait_b
        sent, brought = (wait_f + u_f[i]) * rate, (wait_b + u_b[i]) * rate
        waiting = max(0.0, left) + amount
        held_f += x[i + 1] - min(waiting, sent)
        left = (waiting if amount else left) - sent
        ahead = amount + max(0.0, ahead - brought) if amount else ahead - brought
    return idle + turn_ms(x, y, u_f, u_b, ex_f, ex_b, rate, memory, held_f, left, ahead)


@compiled
def undominated(a: Floats, b: Floats, c: Floats) -> Bools:
    """Which rows have no earlier row that is at most as large in every column."""
    stays = np.ones(len(a), np.bool_)
    for i in range(len(a)):
        for j in range(i):
            if stays[j] and a[j] <= a[i] and b[j] <= b[i] and c[j] <= c[i]:
                stays[i] = False
                break
    return stays
