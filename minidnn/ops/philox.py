"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The bits of one element depend on (seed, step, micro-step, op, element) and on nothing else: the same on every device,
in every memory mode, in any order, and again when a layer is recomputed.
"""

from __future__ import annotations

import numpy as np

from minidnn.ops.host_loops import Array, kernel

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # key increments
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@kernel
def philox4x32(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Ten rounds on counter (c0, c1, c2, c3) with key (k0, k1): four random 32-bit words. All are uint64 below 2^32."""
    for _ in range(10):
        left, right = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@kernel
def dropout(x: Array, y: Array, numbers: Array, threshold: int, scale: float) -> None:
    """y[i] = x[i] * scale where element i's word is at least `threshold`, else x[i] * 0. Flat arrays; y may be x.

    `numbers` is uint64 [5]: op, step, micro-step, and the seed's low and high words. `threshold` is uint64.
    """
    op, step, micro_step, low, high = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    zero = x.dtype.type(0)
    size = np.uint64(x.size)
    for block in range((size + np.uint64(3)) >> np.uint64(2)):
        words = philox4x32(np.uint64(block), op, step, micro_step, low, high)
        at = np.uint64(block) << np.uint64(2)
        for lane in range(min(np.uint64(4), size - at)):
            # A product, not a choice: a NaN stays NaN where it is dropped, as in PyTorch.
            y[at + lane] = x[at + lane] * (scale if words[lane] >= threshold else zero)
