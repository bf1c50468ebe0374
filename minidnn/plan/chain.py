"""The paper's chain, and what a schedule costs in its relaxations (Beaumont et al. 2020, sections 3 to 5).

Layers 0..L; F_i reads x_i and writes x_{i+1}, B_i reads x_i, x_{i+1} and the gradient y_{i+1} and writes y_i. One
transfer at a time, which may be interrupted and whose bytes are free, or taken, as they cross. Formulas are the
paper's, corrected: Algorithm 1 as printed takes the parts D and not max(0, D) in its test, Eq. (6) ex^F for ex^B, and
Lemma 4 leaves gradients out of its R terms. (Checked against a linear program, tests/unit/test_planners_chain.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SLACK = 1e-6
"""Bytes that floating point may be off."""


@dataclass(frozen=True)
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
        from minidnn.plan import loops  # numba, when there is something to plan

        return float(loops.idle_ms(*self._columns, np.array(amounts, np.float64), SLACK))

    def turn_ms(self, held_f: float, left: float, ahead: float) -> float:
        """Idle time between the phases (Lemma 4), from M_F, D_F and D_B of index L + 1."""
        from minidnn.plan import loops

        return float(loops.turn_ms(*self._columns, held_f, left, ahead))

    @cached_property
    def _columns(self) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats, float, float]:
        """The sequences as arrays, the numbers as they are."""
        columns = (self.x, self.y, self.u_f, self.u_b, self.ex_f, self.ex_b)
        x, y, u_f, u_b, ex_f, ex_b = (np.array(column, np.float64) for column in columns)
        return x, y, u_f, u_b, ex_f, ex_b, float(self.rate), float(self.memory)

    def fractional_ms(self) -> float:
        """Time of the fastest schedule if tensors could leave in part (Theorem 2): the first M_peak - M_GPU bytes."""
        rest = max(0.0, self.peak - self.memory)
        amounts = []
        for nbytes in self.x[:-1]:
            amounts.append(min(nbytes, rest))
            rest -= amounts[-1]
        return self.compute_ms + self.idle_ms(amounts)
