"""TFLMS (Le et al. 2018) as Beaumont et al. 2020, section 6, has it: so many tensors, fetched so many layers ahead.

It rewrites a graph before it runs and knows no times: nothing waits for memory. So a configuration fits where, with
copies that take the time they take, every op finds its room.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from minidnn.plan.greedy import algorithm_choices, with_room
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.nowait import flow, keep, settle
from minidnn.plan.outline import Arrangement, Outline, outline_of
from minidnn.plan.thresholds import spread

COUNTS = 16
LEADS = (0, 1, 2, 4, 8)
"""Layers."""
TRIES = 3


def tflms(request: Request) -> Proposals:
    """The fastest configuration that fits; where none does, the one that needs least is proposed."""
    outline = outline_of(request)
    if request.pool is None:
        yield from keep(outline, request)
        return
    best, tries, fits = inf, TRIES, False
    configurations = [(peak, a) for peak, a in tflms_configurations(outline, request)]
    for peak, arrangement in sorted(configurations, key=lambda c: c[1].ms):
        if peak <= request.pool and tries and arrangement.ms < best:
            ms = yield from settle(arrangement, request)
            fits = fits or ms < inf
            tries -= ms < inf
            best = min(best, ms)
    if not fits:
        yield min(configurations, key=lambda c: c[0])[1].plan(request)


def tflms_configurations(outline: Outline, request: Request) -> Iterator[tuple[int, Arrangement]]:
    """Each number of tensors and lead: the peak of the pool, and the arrangement."""
    (fastest, *_) = reversed(algorithm_choices(outline, request, 2))
    yield flow(outline, (), outline.smallest if request.mode.rule == "g" else fastest, 0)
    for count in spread(len(outline.worthwhile), COUNTS):
        *_, (offload, algorithms) = with_room(outline, request, request.pool or 0, outline.worthwhile[:count], fastest)
        for lead in LEADS:
            yield flow(outline, offload, algorithms, lead)
