"""Optimal rematerialization of a chain: the curve that offloading is compared with. Nothing here is executed.

The recursion of Beaumont et al. 2019 ("Optimal checkpointing for heterogeneous chains", Rotor), of the family that
Griewank and Walther's revolve began: to run layers s..t forward and backward from a stored x_s within m bytes, either
keep x_{s+1} and go on from there, or run forward to some later layer keeping only its input, do the rest, and return.
Sizes are rounded up to memory / SLOTS; the gradient that waits during a recomputation is as large as its activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from minidnn.plan.chain import Chain

SLOTS = 400


def rematerialized_ms(chain: Chain) -> NDArray[np.float64]:
    """Least ms of an iteration for memory k / SLOTS of the chain's, k = 0 .. SLOTS; infinite where there is no way."""
    unit = chain.memory / SLOTS
    last = chain.last
    x = _slots(chain.x, unit)
    need_f = _slots(chain.ex_f, unit)
    need_b = _slots([e + y + z for e, y, z in zip(chain.ex_b, chain.y, chain.y[1:], strict=False)], unit)
    forward = [0.0, *accumulate(chain.u_f)]
    room = np.arange(SLOTS + 1)
    table: dict[tuple[int, int], NDArray[np.float64]] = {}
    for length in range(last + 1):
        for s in range(last + 1 - length):
            t = s + length
            waiting = x[t + 1] if t < last else 0  # the gradient that backward goes on with
            keeps = x[s + 1] + max(waiting + need_f[s], need_b[s])
            if not length:
                table[s, t] = np.where(room >= keeps, chain.u_f[s] + chain.u_b[s], np.inf)
                continue
            best = np.where(room >= keeps, chain.u_f[s] + chain.u_b[s] + _less(table[s + 1, t], x[s + 1]), np.inf)
            passing = waiting + x[s + 1] + need_f[s]
            for k in range(s + 1, t + 1):  # x_k is kept, what lies between is computed again
                if k > s + 1:
                    passing = max(passing, waiting + x[k - 1] + x[k] + need_f[k - 1])
                again = forward[k] - forward[s] + _less(table[k, t], x[k]) + table[s, k - 1]
                np.minimum(best, np.where(room >= passing, again, np.inf), out=best)
            table[s, t] = best
    return _less(table[0, last], x[0])


def _slots(sizes: Sequence[float], unit: float) -> list[int]:
    return [int(np.ceil(nbytes / unit)) for nbytes in sizes]


def _less(values: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """The same with so many slots taken by something else."""
    taken = min(max(slots, 0), SLOTS + 1)
    return np.concatenate([np.full(taken, np.inf), values[: SLOTS + 1 - taken]])
