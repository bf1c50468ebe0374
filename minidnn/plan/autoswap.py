"""AUTOSWAP (Zhang et al., arXiv 1903.06631): tensors leave in the order of a weighted average of four priority scores.

DOA, the time of absence that its copies leave; AOA, that times its size; WDOA, the time of absence weighted by how far
memory is above the limit meanwhile; SWDOA, the same with what was chosen before already gone. The weights are searched
for: the authors use Bayesian optimization, here a seeded sample with each score alone and some mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from minidnn.memory.trace import GRANULARITY
from minidnn.plan.greedy import algorithm_choices, smallest_prefix, with_room
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.nowait import Option, planned
from minidnn.plan.outline import Outline
from minidnn.profile.profile import Algorithm
from minidnn.units import round_up

SAMPLES = 12
CHOICES = 3


def autoswap(request: Request) -> Proposals:
    """The fastest of the sets that some weights choose."""
    yield from planned(request, autoswap_options)


def autoswap_options(outline: Outline, request: Request, pool: int) -> Iterator[Option]:
    """Per choice of algorithms and weights the fewest tensors of the highest priority that suffice."""
    random = Random(0)
    weights = [tuple(np.eye(4)[k]) for k in range(4)]
    weights += [tuple(random.expovariate(1) for _ in range(4)) for _ in range(SAMPLES)]
    for algorithms in algorithm_choices(outline, request, CHOICES):
        table = scores(outline, algorithms, pool)
        seen = set()
        for weight in weights:
            order = np.argsort(-(table @ np.array(weight)), kind="stable")
            offload = smallest_prefix(outline, [outline.worthwhile[i] for i in order], algorithms, pool)
            if offload is not None and frozenset(offload) not in seen:
                seen.add(frozenset(offload))
                yield from with_room(outline, request, pool, offload, algorithms)


def scores(outline: Outline, algorithms: Sequence[Algorithm], pool: int) -> NDArray[np.float64]:
    """The four scores of each worthwhile tensor, each scaled to at most 1: [tensors, 4]."""
    movable, link = outline.worthwhile, outline.link
    ms = np.array([a.ms or 0.0 for a in algorithms])
    held = np.array(outline.resident) + [round_up(a.workspace, GRANULARITY) for a in algorithms]
    ends = np.concatenate([[0.0], np.cumsum(ms)])
    first, last = np.array([m.left + 1 for m in movable], int), np.array([m.needed for m in movable], int)
    sizes = np.array([m.nbytes for m in movable], float)
    copies = np.array([link.ms(m.out_bytes, True) * bool(m.out_bytes) + link.ms(m.in_bytes, False) for m in movable])
    absence = ends[last] - ends[first] - copies if len(movable) else np.zeros(0)

    def weighted() -> NDArray[np.float64]:
        area = np.concatenate([[0.0], np.cumsum(ms * np.maximum(held - pool, 0))])
        return np.asarray(area[last] - area[first], float)

    table = np.zeros((len(movable), 4))
    if len(movable):
        table[:, :3] = np.stack([absence, absence * sizes, weighted()], axis=1)
    rest = list(range(len(movable)))
    while rest:
        area = weighted()
        best = max(rest, key=lambda i: area[i])
        table[best, 3] = area[best]
        rest.remove(best)
        held[first[best] : last[best]] -= movable[best].nbytes
        if not (held > pool).any():
            break
    scale: NDArray[np.float64] = np.maximum(np.abs(table).max(axis=0, initial=0.0), 1e-12)
    return np.asarray(table / scale)
