"""TFLMS (Le et al. 2018) as Beaumont et al. 2020, section 6, has it: so many tensors, fetched so many layers ahead.

It rewrites a graph before it runs and knows no times: nothing waits for memory. So a configuration fits where, with
copies that take the time they take, every op finds its room.
"""

from __future__ import annotations

from collections.abc import Iterator

from minidnn.plan.greedy import algorithm_choices, with_room
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.moments import flow
from minidnn.plan.nowait import Search, keep
from minidnn.plan.outline import Arrangement, Outline
from minidnn.plan.thresholds import spread

COUNTS = 16
LEADS = (0, 1, 2, 4, 8)
"""Layers."""
TRIES = 3
PARTS = (1.0, 0.8, 0.6, 0.4)
"""Of the pool, for workspaces."""


def tflms(request: Request) -> Proposals:
    """The fastest configuration that fits; where none does, the one that needs least is proposed."""
    if request.pool is None:
        yield keep(request)
        return
    search = Search(request, request.pool)
    if tflms_searched(search).leaders:
        best = yield from search.plans()
        yield from search.early(best, tflms_searched)
    else:
        configurations = tflms_configurations(search.outline, request)
        yield min(configurations, key=lambda c: c[0])[1].plan(request)


def tflms_searched(search: Search) -> Search:
    """The search, once it has seen the configurations that fit without waiting, the fastest first."""
    configurations = tflms_configurations(search.outline, search.request)
    fitting = sorted((a for peak, a in configurations if peak <= search.pool), key=lambda a: a.ms)
    search.among(fitting, TRIES)
    return search


def tflms_configurations(outline: Outline, request: Request) -> Iterator[tuple[int, Arrangement]]:
    """Each number of tensors and lead: the peak of the pool, and the arrangement. Workspaces may take what the tensors
    leave of the pool, or of some part of it, as copies take room too while they run."""
    (fastest, *_) = reversed(algorithm_choices(outline, request, 2))
    yield flow(outline, (), outline.smallest if request.mode.rule == "g" else fastest, 0)
    for count in spread(len(outline.worthwhile), COUNTS):
        offload = outline.worthwhile[:count]
        rooms = [int((request.pool or 0) * share) for share in PARTS]
        options = [[*with_room(outline, request, room, offload, fastest)][-1] for room in rooms]
        for algorithms in dict.fromkeys(tuple(algorithms) for _, algorithms in options):
            for lead in LEADS:
                yield flow(outline, offload, algorithms, lead)
