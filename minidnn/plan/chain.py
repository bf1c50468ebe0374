"""The paper's chain, and what a schedule costs in its relaxations (Beaumont et al. 2020, sections 3 to 5).

Layers 0..L; F_i reads x_i and writes x_{i+1}, B_i reads x_i, x_{i+1} and the gradient y_{i+1} and writes y_i. One
transfer at a time, which may be interrupted and whose bytes are free, or taken, as they cross. Formulas are the
paper's, corrected: Algorithm 1 as printed takes the parts D and not max(0, D) in its test, Eq. (6) ex^F for ex^B, and
Lemma 4 leaves gradients out of its R terms. (Checked against a linear program, tests/unit/test_planners_chain.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

SLACK = 1e-6
"""Bytes that floating point may be off."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Sizes in bytes, times in ms, `rate` in bytes per ms, `memory` the device's bytes (the paper's M_GPU).

    `x`, `y` have L + 2 entries, `u_f`, `u_b` (times) and `ex_f`, `ex_b` (what an op needs besides) L + 1. Where only
    the sums ex^B_i + |y_i| + |y_{i+1}| are known, y may be zero and ex_b those sums.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    u_f: tuple[float, ...]
    u_b: tuple[float, ...]
    ex_f: tuple[float, ...]
    ex_b: tuple[float, ...]
    rate: float
    memory: float

    @property
    def last(self) -> int:
        """L, the index of the last layer."""
        return len(self.u_f) - 1

    @property
    def compute_ms(self) -> float:
        """Time of all ops."""
        return sum(self.u_f) + sum(self.u_b)

    @property
    def peak(self) -> float:
        """M_peak: what the iteration takes with nothing offloaded (section 3.2)."""
        held = list(accumulate(self.x))
        forward = max(e + held[i + 1] for i, e in enumerate(self.ex_f))
        return max(forward, max(e + self.y[i] + self.y[i + 1] + held[i + 1] for i, e in enumerate(self.ex_b)))

    def idle_ms(self, amounts: Sequence[float]) -> float:
        """Idle time of the no-wait ordered schedule that offloads `amounts[i]` bytes of x_i (i = 0..L); infinite where
        it cannot be. Equations (1) to (9)."""
        held_f, left, ahead, idle = self.x[0], 0.0, 0.0, 0.0  # M_F, D_F, D_B
        for i, amount in enumerate(amounts):
            held_b = self.y[i] + max(0.0, ahead) + held_f - max(0.0, left)
            forward = held_f + self.ex_f[i] + self.x[i + 1] - self.memory
            backward = held_b + self.ex_b[i] + self.x[i + 1] + self.y[i + 1] - self.memory
            if max(forward - max(0.0, left), backward - max(0.0, ahead)) > SLACK:
                return inf
            wait_f, wait_b = max(0.0, forward / self.rate), max(0.0, backward / self.rate)
            idle += wait_f + wait_b
            sent, brought = (wait_f + self.u_f[i]) * self.rate, (wait_b + self.u_b[i]) * self.rate
            waiting = max(0.0, left) + amount
            held_f += self.x[i + 1] - min(waiting, sent)
            left = (waiting if amount else left) - sent
            ahead = amount + max(0.0, ahead - brought) if amount else ahead - brought
        return idle + self.turn_ms(held_f, left, ahead)

    def turn_ms(self, held_f: float, left: float, ahead: float) -> float:
        """Idle time between the phases (Lemma 4), from M_F, D_F and D_B of index L + 1."""
        top = self.last + 1
        held_b = self.y[top] + max(0.0, ahead) + held_f - max(0.0, left)
        wait = max(0.0, (left + ahead) / self.rate)
        later = time_b = time_f = 0.0  # sum of |x_i| for i > j + 1, of u_B_i and u_F_i for i > j
        for j in range(self.last, -1, -1):
            if time_b * self.rate < -ahead:
                need = self.ex_b[j] + self.y[j] + self.y[j + 1] - later
                wait = max(wait, (need + held_f - self.memory) / self.rate - time_b)
            if time_f * self.rate < -left:
                need = self.ex_f[j] - self.y[top] - later
                wait = max(wait, (need + held_b - self.memory) / self.rate - time_f)
            later += self.x[j + 1]
            time_b, time_f = time_b + self.u_b[j], time_f + self.u_f[j]
        return wait

    def fractional_ms(self) -> float:
        """Time of the fastest schedule if tensors could leave in part (Theorem 2): the first M_peak - M_GPU bytes."""
        rest = max(0.0, self.peak - self.memory)
        amounts = []
        for nbytes in self.x[:-1]:
            amounts.append(min(nbytes, rest))
            rest -= amounts[-1]
        return self.compute_ms + self.idle_ms(amounts)
