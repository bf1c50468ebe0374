"""Random numbers that are a function of where they are used, not of what was drawn before.

Every bit comes from Philox with a key and a counter that name the use, the seed, the epoch and the sample, so that a
resumed run, a second thread or another batch size sees the same bits. Only raw words are drawn: NumPy keeps those the
same for ever, but not the methods that make permutations of them.

Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from minidnn.arguments import seed_of


class Use(IntEnum):
    """What the bits are for; two uses never share any."""

    ORDER = 0
    HOLDOUT = 1
    SYNTHETIC = 2
    AUGMENT = 3


def random_words(use: Use, count: int, *, seed: int, epoch: int = 0, index: int = 0) -> NDArray[np.uint64]:
    """`count` random words [count] for one use, seed, epoch and index (of a sample, or of whatever the use counts)."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        seed_of(value, name)
    # The generator counts up from the lowest counter word: 2^64 blocks lie between one index and the next.
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, index, use], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def epoch_order(samples: int, *, shuffle: bool, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order [samples] in which an epoch visits the samples: a function of its arguments alone."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return np.argsort(random_words(Use.ORDER, samples, seed=seed, epoch=epoch), kind="stable").astype(np.int64)


def holdout(labels: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers (kept, held out) of a stratified split: each class gives its share of `count`, give or take one row.

    The choice depends on the labels only, not on a run's seed, so that all runs are tested on the same samples.
    """
    samples = len(labels)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    # Each class gives the whole rows of its share; the rows that are left come from the largest remainders.
    quotas, remainders = np.divmod(sizes * count, samples)
    quotas[np.argsort(-remainders, kind="stable")[: count - int(quotas.sum())]] += 1
    by_class = np.lexsort((random_words(Use.HOLDOUT, samples, seed=0), classes))
    position = np.arange(samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(samples, bool)
    chosen[by_class[position < np.repeat(quotas, sizes)]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
