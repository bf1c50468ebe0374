"""The VDNN of Beaumont et al. 2020, section 6: inputs of layers that compute long for their size, by every threshold.

Candidates are the activations whose layer takes more forward time per byte than a threshold; all of them leave, or
every second one. Each threshold that makes a difference is tried (of many, some), without host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minidnn.plan.greedy import algorithm_choices, with_room
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.nowait import Option, planned
from minidnn.plan.outline import Movable, Outline

THRESHOLDS = 20


def thresholds(request: Request) -> Proposals:
    """The fastest of all thresholds' sets."""
    yield from planned(request, threshold_options)


def threshold_options(outline: Outline, request: Request, pool: int) -> Iterator[Option]:
    """Per threshold all candidates and every second one, with the fastest algorithms that they leave room for."""
    (fastest, *_) = reversed(algorithm_choices(outline, request, 2))
    for offload in threshold_sets(outline):
        *_, option = with_room(outline, request, pool, offload, fastest)
        yield option


def threshold_sets(outline: Outline) -> Iterator[tuple[Movable, ...]]:
    """The sets, in the order of falling thresholds."""
    forward: dict[int, float] = {}
    for op, algorithm in zip(outline.graph.ops, outline.fastest, strict=True):
        if op.forward:
            forward[op.layer] = forward.get(op.layer, 0.0) + (algorithm.ms or 0.0)

    def ratio(m: Movable) -> float:
        return forward[outline.graph.ops[m.left].layer] / m.nbytes

    ranked = sorted(outline.worthwhile, key=ratio, reverse=True)
    for count in spread(len(ranked), THRESHOLDS):
        above = sorted(ranked[:count], key=lambda m: (m.made, m.left))
        yield tuple(above)
        yield tuple(above[::2])


def spread(most: int, count: int) -> Sequence[int]:
    """At most `count` whole numbers from 1 to `most`, evenly apart, `most` among them."""
    return sorted({-(-most * k // count) for k in range(1, count + 1)}) if most else ()
