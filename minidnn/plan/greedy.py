"""GREEDY (Beaumont et al. 2020, section 4): the first activations leave, as few of them as the budget asks for.

Optimal where a tensor may be offloaded in part (Theorem 2); rounded up to whole tensors it is a heuristic. The paper
has one peak, M_peak; with workspaces that may be traded for time there is one for each choice of algorithms, and
several are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minidnn.plan.mode import Proposals, Request
from minidnn.plan.nowait import Option, planned
from minidnn.plan.outline import Movable, Outline
from minidnn.profile.profile import Algorithm

LEVELS = 8


def greedy(request: Request) -> Proposals:
    """The first k activations leave, for the smallest k that suffices."""
    yield from planned(request, greedy_options)


def greedy_options(outline: Outline, request: Request, pool: int, levels: int = LEVELS) -> Iterator[Option]:
    """Per choice of algorithms the smallest set that fits; also with the fastest algorithms in the room it leaves."""
    for algorithms in algorithm_choices(outline, request, levels):
        offload = smallest_prefix(outline, outline.worthwhile, algorithms, pool)
        if offload is not None:
            yield from with_room(outline, request, pool, offload, algorithms)


def smallest_prefix(
    outline: Outline, order: Sequence[Movable], algorithms: Sequence[Algorithm], pool: int
) -> Sequence[Movable] | None:
    """The first k tensors, for the smallest k with which the pool holds the rest; None where all are too few."""
    clock, (_, workspaces) = outline.clock, outline.clock.columns(algorithms)

    def fits(count: int) -> bool:
        return int((clock.held(clock.mask(order[:count])) + workspaces).max()) <= pool

    low, high = 0, len(order)
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return order[:low]


def algorithm_choices(outline: Outline, request: Request, most: int) -> list[tuple[Algorithm, ...]]:
    """The algorithms by the mode's rule: the fastest (p), the smallest (m), or (g) the fastest below each of some
    peaks: the lower the peak, the less has to leave."""
    if request.mode.rule == "p":
        return [outline.fastest]
    if request.mode.rule == "m":
        return [outline.smallest]
    return list(dict.fromkeys(outline.within(level) for level in outline.levels(most)))


def with_room(
    outline: Outline, request: Request, pool: int, offload: Sequence[Movable], algorithms: Sequence[Algorithm]
) -> Iterator[Option]:  # fmt: skip
    """An offload set with its algorithms; with rule `g` also with the fastest that fit once these tensors are away."""
    yield offload, algorithms
    if request.mode.rule == "g":
        yield offload, outline.within(pool, outline.without(offload))
