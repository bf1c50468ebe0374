"""Random chains, and Problem 2 of Beaumont et al. as a linear program that knows none of the paper's formulas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import product
from math import inf

import numpy as np
from scipy.optimize import linprog

from minidnn.plan.chain import Chain


def random_chain(rng: random.Random, layers: int) -> Chain:
    """Small whole numbers, so that ties and exact fits come up; memory from far too little to all that is needed."""

    def numbers(count: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, most) for _ in range(count))

    chain = Chain(
        numbers(layers + 1, 6), numbers(layers + 1, 3), numbers(layers, 4), numbers(layers, 6), numbers(layers, 3),
        numbers(layers, 4), rng.choice((1, 2, 3)), 0,
    )  # fmt: skip
    return replace_memory(chain, rng.uniform(0.5, 1.02) * chain.peak)


def replace_memory(chain: Chain, memory: float) -> Chain:
    """The chain on a device with another memory, in whole bytes."""
    return Chain(chain.x, chain.y, chain.u_f, chain.u_b, chain.ex_f, chain.ex_b, chain.rate, round(memory))


def replayed_ms(chain: Chain) -> float:
    """Least ms of an iteration that recomputes, by a shortest path over all states of an abstract machine.

    It runs any F_i whose input is there, drops any activation, and runs the backward ops in their order. A gradient as
    large as its activation waits between backward ops.
    """
    last = chain.last
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, last, (0,))]
    known: set[tuple[int, tuple[int, ...]]] = set()
    while heap:
        ms, due, held = heappop(heap)
        if due < 0:
            return ms
        if (due, held) in known:
            continue
        known.add((due, held))
        used = sum(chain.x[i] for i in held)
        waiting = chain.x[due + 1] if due < last else 0
        for i in held:
            if i:
                heappush(heap, (ms, due, tuple(j for j in held if j != i)))
            new = i <= due and i + 1 not in held
            if new and used + chain.x[i + 1] + chain.ex_f[i] + waiting <= chain.memory:
                heappush(heap, (ms + chain.u_f[i], due, tuple(sorted((*held, i + 1)))))
        gradients = chain.y[due] + chain.y[due + 1]
        if {due, due + 1} <= set(held) and used + chain.ex_b[due] + gradients <= chain.memory:
            heappush(heap, (ms + chain.u_b[due], due - 1, tuple(j for j in held if j <= due)))
    return inf


def every_set(chain: Chain) -> list[tuple[float, ...]]:
    """All ways to offload each of x_0 .. x_L or not."""
    return list(product(*((0.0, nbytes) if nbytes else (0.0,) for nbytes in chain.x[:-1])))


def linear_program_ms(chain: Chain, amounts: Sequence[float]) -> float:
    """Least idle time for an offload set, by linear programming: one program for each piece of time in which copies
    may turn from out to in. (Ordered schedules suffice, Lemma 3, and there the tensor that leaves last comes back
    first: all copies out come before all copies in.)"""
    return min(_turning_ms(chain, amounts, piece) for piece in range(4 * len(chain.u_f)))


def _turning_ms(chain: Chain, amounts: Sequence[float], turn: int) -> float:
    """Copies go out in pieces up to `turn`, and in from then on.

    Time is cut at the start and end of each op. Per piece the bytes of each tensor that leave and that come back are
    variables, and so is the idle time before each op. Copies within a piece leave first and come back then, so that
    memory is largest at its ends.
    """
    last = chain.last
    ops = [("F", i) for i in range(last + 1)] + [("B", i) for i in range(last, -1, -1)]
    moved = [j for j, amount in enumerate(amounts) if amount]
    pieces = 2 * len(ops)  # idle, op, idle, op, ...
    column: dict[tuple[str, int, int], int] = {}
    for k in range(len(ops)):
        column["idle", k, 0] = len(column)
    for kind, j, k in product(("out", "in"), moved, range(pieces)):
        column[kind, j, k] = len(column)
    limits: list[np.ndarray] = []
    bounds: list[float] = []
    equal: list[np.ndarray] = []
    totals: list[float] = []

    def row(entries: dict[tuple[str, int, int], float]) -> np.ndarray:
        found = np.zeros(len(column))
        for key, value in entries.items():
            found[column[key]] += value
        return found

    for k in range(pieces):  # the link
        entries = {(kind, j, k): 1.0 for kind in ("out", "in") for j in moved}
        if k % 2 == 0:
            entries["idle", k // 2, 0] = -chain.rate
            limits.append(row(entries))
            bounds.append(0.0)
        else:
            phase, i = ops[k // 2]
            limits.append(row(entries))
            bounds.append((chain.u_f if phase == "F" else chain.u_b)[i] * chain.rate)
    for j in moved:
        made = 2 * j + 1  # F_j reads x_j: what of it leaves does so from then on
        needed = 2 * ops.index(("B", j)) + 1
        for kind, pieces_allowed in (("out", range(made, turn + 1)), ("in", range(turn, needed))):
            equal.append(row({(kind, j, k): 1.0 for k in pieces_allowed}))
            totals.append(amounts[j])
            equal.append(row({(kind, j, k): 1.0 for k in range(pieces) if k not in pieces_allowed}))
            totals.append(0.0)
        for k in range(pieces):  # nothing comes back that has not left
            limits.append(row({("in", j, m): 1.0 for m in range(k + 1)} | {("out", j, m): -1.0 for m in range(k + 1)}))
            bounds.append(0.0)
    for index, (phase, i) in enumerate(ops):
        if phase == "F":
            here, extra = range(i + 2), chain.ex_f[i]
        else:
            here, extra = range(i + 2), chain.ex_b[i] + chain.y[i] + chain.y[i + 1]
        for through in (2 * index, 2 * index + 1):  # at the op's start and at its end
            entries = {}
            for j, m in product(moved, range(through + 1)):
                if j in here:
                    entries["in", j, m], entries["out", j, m] = 1.0, -1.0
            limits.append(row(entries))
            bounds.append(chain.memory - extra - sum(chain.x[j] for j in here))
    cost = np.array([1.0 if key[0] == "idle" else 0.0 for key in column])
    result = linprog(
        cost, np.array(limits), np.array(bounds), np.array(equal) if equal else None,
        np.array(totals) if equal else None, method="highs",
    )  # fmt: skip
    return float(result.fun) if result.success else inf
