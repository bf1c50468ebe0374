"""`best`: the fastest of all plans that fit. It weighs what every other policy weighs, by the same clock and the same
placement, and what it finds itself: better sets and algorithms by local search, the vDNN and vDNN++ modes, and, last,
whether there is room for a batch that comes early.

On chains of layers no single policy wins (whole copies are not what DYNPROG is optimal for). Whatever the others place
is among the leaders of `best`; a plan of theirs is left out only where the clock, which leaves out but what starting an
action costs, says that it is no faster than one that was simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from minidnn.plan.autoswap import autoswap_options
from minidnn.plan.dynamic import SETS
from minidnn.plan.dynprog import dynprog_options
from minidnn.plan.greedy import greedy_options
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.neighbours import Neighbourhood
from minidnn.plan.nowait import LONG, NEAR, Search, arranged, keep, searched
from minidnn.plan.outline import Movable, Outline, outline_of
from minidnn.plan.plan import stages_by_layer
from minidnn.plan.tflms import tflms_searched
from minidnn.plan.thresholds import threshold_options
from minidnn.plan.vdnn import offload_plan, offloaded_layers, prefetch_stages
from minidnn.profile.profile import Algorithm
from minidnn.units import round_up

POLICIES = (greedy_options, threshold_options, dynprog_options, autoswap_options)
POOLS = ((1.0, 1.0), (1.0, 0.9), (0.97, 1.0), (0.93, 1.0), (0.88, 1.0))
POOLS_LONG = ((1.0, 1.0), (1.0, 0.9), (0.88, 1.0))
"""Shares of the pool, and of the link's rates, for which better sets are looked for (and with LONG ops). The clock does
not see what a placement costs; sets that leave some room, or the link some time, bear it better."""
LEADERS = 3
"""So many of the fastest plans are improved."""
GUESSES = 3
"""And so many sets drawn by lot."""
EFFORT, EFFORT_LONG = 90_000_000, 20_000_000
"""What is spent on the layout of each, and with LONG ops."""


def best(request: Request) -> Proposals:
    """The fastest of all."""
    if request.pool is None:
        yield keep(request)
        return
    outline = outline_of(request)
    if _may_all_stay(outline, request.mode.rule, request.pool):
        yield keep(request)
    search = _looked(Search(request, request.pool, outline))
    fastest = yield from search.plans()
    yield from _with_waits(search, fastest)
    yield from search.early(fastest, _looked)


def _may_all_stay(outline: Outline, rule: str, pool: int) -> bool:
    """Whether that is worth trying where a search may see no room for it: sizes in an outline are rounded up."""
    algorithms = outline.smallest if rule == "m" else outline.fastest
    return outline.peak(algorithms) <= pool + outline.granularity * len(outline.graph.tensors)


def _looked(search: Search) -> Search:
    """The search, once it has seen what every other policy weighs, and improved it."""
    for options in POLICIES:
        search.join(searched(search.apart(), options))
    search.join(tflms_searched(search.apart()))
    if search.ms > search.outline.floor_ms * NEAR:
        _improve(search)
    return search


def _improve(search: Search) -> None:
    """What local search makes of the leaders and of some guesses."""
    outline, random = search.outline, Random(0)
    search.effort = EFFORT if len(outline.ways) < LONG else EFFORT_LONG
    fixed = {"p": outline.fastest, "m": outline.smallest}.get(search.request.mode.rule)
    guesses = [[m for m in outline.worthwhile if random.random() < (k + 1) / GUESSES] for k in range(GUESSES)]
    for share, rate in POOLS if len(outline.ways) < LONG else POOLS_LONG:
        pool = int(search.pool * share)
        near = Neighbourhood(outline.with_link(rate), pool, fixed)
        options = [(offload, fixed or outline.within(pool, outline.without(offload))) for offload in guesses]
        starts = search.fastest[:LEADERS] + arranged(outline, options, pool)
        found = [a for a in map(near.improve, starts) if a is not None]
        search.among(arranged(outline, [(a.offload, a.algorithms) for a in found], pool), LEADERS)


def _with_waits(search: Search, best: float) -> Proposals:
    """The vDNN and vDNN++ modes that may be faster than the best so far."""
    outline, request, graph = search.outline, search.request, search.request.graph
    for rule in ("p", "g", "m") if request.mode.rule == "g" else (request.mode.rule,):
        for offload_set in ("none", *SETS):
            layers = offloaded_layers(graph, offload_set)
            names = {graph.layers[i].x for i in layers}
            moved = [m for m in outline.movable if m.name in names]
            held = _held_by_stage(outline, moved)
            algorithms = outline.fastest if rule == "p" else outline.smallest
            if outline.peak(algorithms, held) > search.pool:
                continue
            algorithms = outline.within(search.pool, held) if rule == "g" else algorithms
            for sync in ("compute", "both"):
                if _least_ms(outline, moved, prefetch_stages(graph, layers), algorithms, sync) < best:
                    outcome = yield offload_plan(request, offload_set, sync, rule)
                    if outcome is not None and outcome.fits and outcome.ms is not None:
                        best = min(best, outcome.ms)


def _held_by_stage(outline: Outline, moved: Sequence[Movable]) -> list[int]:
    """What a plan with host waits holds per op at least, workspaces left out: all that a layer touches in a direction
    is there at the same time."""
    graph, held = outline.graph, outline.without(moved)
    for start, stop in stages_by_layer(graph):
        names = {name for op in graph.ops[start:stop] for name in op.tensors if not graph.is_persistent(name)}
        together = sum(round_up(graph.tensors[name].nbytes, outline.granularity) for name in names)
        held[start:stop] = [max(nbytes, together) for nbytes in held[start:stop]]
    return held


def _least_ms(
    outline: Outline, moved: Sequence[Movable], prefetch: Mapping[int, Sequence[str]],
    algorithms: Sequence[Algorithm], sync: str,
) -> float:  # fmt: skip
    """What a plan with host waits takes at least: it may have to wait for memory besides."""
    link, graph = outline.link, outline.graph
    now = lane = outline.load_ms
    arrival: dict[str, float] = {}
    by_name = {m.name: m for m in moved}
    for start, stop in stages_by_layer(graph):
        if start == graph.forward_ops:
            now = max(now, lane)  # all releases are awaited
        needed = [m for m in moved if start <= m.needed < stop]
        for m in (*needed, *(by_name[name] for name in prefetch.get(start, ()) if name in by_name)):
            if m.name not in arrival:
                lane = arrival[m.name] = max(lane, now) + link.ms(m.in_bytes, False)
        now = max([now, *(arrival[m.name] for m in needed)])
        for m in moved:
            if start <= m.left < stop and m.out_bytes:
                lane = max(lane, now) + link.ms(m.out_bytes, True)
        now += sum(a.ms or 0.0 for a in algorithms[start:stop])
        now = max(now, lane) if sync == "both" else now
    return max(now, lane)
