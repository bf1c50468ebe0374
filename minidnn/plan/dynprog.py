"""DYNPROG (Beaumont et al. 2020, section 5): the best set of whole activations if copies could be interrupted.

Algorithm 1 with its corrections (see `chain`). A state after layer i is what the device holds for good (K = M_F less
what is still to leave), D_F, D_B and the idle time so far. Of two states one that is lower in all four is at least as
good: by waiting, the other's future can be had. So only states stay that no other is below. That favours sets that are
larger than they need be; what can stay for the same time does, at last.

Rounding: where more than `STATES` stay, those in the same cell of a grid over (K, D_F, D_B) are one, the one with the
least idle time; the cells double until there are few enough. States are never moved to the grid, so nothing that is
found is wrong, and without rounding the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minidnn.plan.chain import SLACK, Chain
from minidnn.plan.greedy import algorithm_choices, with_room
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.nowait import Option, planned
from minidnn.plan.outline import Outline, layers_of

Floats: TypeAlias = NDArray[np.float64]

STATES = 200
CELLS = 4096
"""The finest grid's cells along the device's memory."""
CHOICES = 3
"""Choices of algorithms for which a set is sought."""


def dynprog(request: Request) -> Proposals:
    """The set that Algorithm 1 finds, executed with whole copies."""
    yield from planned(request, dynprog_options)


def dynprog_options(outline: Outline, request: Request, pool: int) -> Iterator[Option]:
    """Per choice of algorithms the best set under the chain model, with the network's input kept and dropped."""
    for algorithms in algorithm_choices(outline, request, CHOICES):
        chain, groups = layers_of(outline, algorithms, pool)
        found = best_set(chain)
        if found is not None:
            offload = [m for chosen, group in zip(found.offload, groups, strict=True) if chosen for m in group]
            yield from with_room(outline, request, pool, offload, algorithms)


@dataclass(frozen=True, slots=True)
class Found:
    """`offload[i]`: whether x_i leaves, i = 0..L. `idle_ms`: what that costs under the model."""

    offload: tuple[bool, ...]
    idle_ms: float


@dataclass(frozen=True, slots=True)
class _States:
    """Columns of equal length: M_F, D_F, D_B, idle ms; and where each came from: state of the layer before, choice."""

    held: Floats
    left: Floats
    ahead: Floats
    idle: Floats
    parent: NDArray[np.intp]
    chosen: NDArray[np.bool_]

    def take(self, which: NDArray[np.intp]) -> _States:
        return _States(
            self.held[which], self.left[which], self.ahead[which], self.idle[which], self.parent[which],
            self.chosen[which],
        )  # fmt: skip

    @property
    def kept(self) -> Floats:
        return self.held - np.maximum(self.left, 0.0)


def best_set(chain: Chain, states: int = STATES) -> Found | None:
    """The offload set with the least idle time; None where no set fits."""
    start = np.zeros(1)
    layers = [_States(start + chain.x[0], start, start, start, np.zeros(1, np.intp), np.zeros(1, bool))]
    cell = chain.memory / CELLS
    for i in range(chain.last + 1):
        after, cell = _thinned(_Step(chain, i, layers[-1]).both(), states, cell)
        if not len(after.held):
            return None
        layers.append(after)
    end = layers[-1]
    total = [
        float(idle) + chain.turn_ms(float(held), float(left), float(ahead))
        for held, left, ahead, idle in zip(end.held, end.left, end.ahead, end.idle, strict=True)
    ]
    at = int(np.argmin(total))
    idle_ms, offload = total[at], []
    for layer in reversed(layers[1:]):
        offload.append(bool(layer.chosen[at]))
        at = int(layer.parent[at])
    return _spared(chain, offload[::-1]) if idle_ms < inf else None


def _spared(chain: Chain, offload: list[bool]) -> Found:
    """Let stay what can for the same idle time: runs of the set, the longest and the last first."""

    def idle_ms(chosen: list[bool]) -> float:
        return chain.idle_ms([nbytes * leaves for nbytes, leaves in zip(chain.x, chosen, strict=False)])

    least = idle_ms(offload)
    length = len(offload)
    while length:
        for start in range(len(offload) - length, -1, -length):
            fewer = [leaves and not start <= i < start + length for i, leaves in enumerate(offload)]
            if fewer != offload and (ms := idle_ms(fewer)) <= least:
                offload, least = fewer, ms
        length //= 2
    return Found(tuple(offload), least)


class _Step:
    """Equations (1) to (8) for layer i, over all states at once."""

    def __init__(self, chain: Chain, i: int, states: _States) -> None:
        room = chain.memory - chain.x[i + 1]
        sending, bringing = np.maximum(states.left, 0.0), np.maximum(states.ahead, 0.0)
        forward = states.held + chain.ex_f[i] - room
        backward = states.kept + bringing + chain.y[i] + chain.y[i + 1] + chain.ex_b[i] - room
        fits = np.flatnonzero(np.maximum(forward - sending, backward - bringing) <= SLACK)
        wait_f, wait_b = np.maximum(forward / chain.rate, 0.0)[fits], np.maximum(backward / chain.rate, 0.0)[fits]
        self.x, self.next = chain.x[i], chain.x[i + 1]
        self.before, self.parent = states.take(fits), fits
        self.sending = sending[fits]
        self.sent, self.brought = (wait_f + chain.u_f[i]) * chain.rate, (wait_b + chain.u_b[i]) * chain.rate
        self.idle = self.before.idle + wait_f + wait_b

    def both(self) -> _States:
        """Offload x_i, or not."""
        before, waiting = self.before, self.sending + self.x
        count = len(self.parent)
        states = [
            _States(
                before.held + self.next - np.minimum(self.sending, self.sent), before.left - self.sent,
                before.ahead - self.brought, self.idle, self.parent, np.zeros(count, bool),
            )
        ]  # fmt: skip
        if self.x:
            states.append(
                _States(
                    before.held + self.next - np.minimum(waiting, self.sent), waiting - self.sent,
                    self.x + np.maximum(before.ahead - self.brought, 0.0), self.idle, self.parent, np.ones(count, bool),
                )
            )  # fmt: skip
        return _States(*(np.concatenate(columns) for columns in zip(*map(_columns, states), strict=True)))


def _columns(states: _States) -> tuple[NDArray[np.generic], ...]:
    return states.held, states.left, states.ahead, states.idle, states.parent, states.chosen


def _thinned(states: _States, most: int, cell: float) -> tuple[_States, float]:
    """Drop what another state is below, and merge cells until `most` are left; and the size of the cells."""
    from minidnn.plan import loops  # numba, when there is something to plan

    states = states.take(np.lexsort((states.ahead, states.left, states.kept, states.idle)))
    states = states.take(np.flatnonzero(loops.undominated(states.kept, states.left, states.ahead)))
    while len(states.held) > most:
        cells = [np.floor(column / cell).astype(np.int64) for column in (states.kept, states.left, states.ahead)]
        _, first = np.unique((cells[0] << 40) + (cells[1] << 20) + cells[2], return_index=True)
        if len(first) <= most:
            return states.take(np.sort(first)), cell  # in the order of idle time: the first of a cell is the best
        cell *= 2
    return states, cell
