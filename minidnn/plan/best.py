"""`best`: the fastest of all plans that fit. It proposes what every other policy proposes, and what it finds itself:
sets that differ by a tensor from the best so far, and sets made for smaller budgets, so that more memory is not slower.

On chains of layers no single policy wins (whole copies are not what DYNPROG is optimal for); as `best` hands on their
plans unchanged and all are judged by the same simulation, it is never worse than any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from minidnn.plan.autoswap import autoswap
from minidnn.plan.dynamic import SETS
from minidnn.plan.dynprog import dynprog
from minidnn.plan.greedy import algorithm_choices, greedy, greedy_options, with_room
from minidnn.plan.mode import Outcome, Policy, Proposals, Request
from minidnn.plan.nowait import LONG, NEAR, Option, arranged, keep, settle
from minidnn.plan.outline import Arrangement, Movable, Outline, outline_of
from minidnn.plan.plan import Plan
from minidnn.plan.tflms import tflms
from minidnn.plan.thresholds import threshold_options, thresholds
from minidnn.plan.vdnn import offload_plan

POLICIES: Sequence[Policy] = (greedy, thresholds, dynprog, autoswap, tflms)
SMALLER = (0.98, 0.96, 0.93, 0.9, 0.85, 0.75, 0.6, 0.4)
"""Shares of the pool for which smaller budgets' plans are made."""
LEADERS = 3
"""Plans whose sets are tried for smaller pools too."""
CHOICES = 4
OPS = 200_000
"""What looking for better sets may cost: ops that the clock walks over."""


def best(request: Request) -> Proposals:
    """The fastest of all."""
    outline = outline_of(request)
    if request.pool is None:
        yield from keep(outline, request)
        return
    record = _Record()
    for policy in POLICIES:
        yield from record.watch(policy(request))
    if record.best is not None and record.ms > outline.floor_ms * NEAR:
        yield from record.watch(_improved(outline, request, record))
        yield from record.watch(_from_smaller(outline, request, record))
    yield from record.watch(_with_waits(outline, request, record))


@dataclass
class _Record:
    """What was proposed so far, with what became of it; nothing is proposed twice."""

    outcomes: list[tuple[Plan, Outcome | None]] = field(default_factory=list)
    best: Plan | None = None
    ms: float = inf

    def watch(self, proposals: Proposals) -> Proposals:
        """Hand proposals on, and remember."""
        outcome: Outcome | None = None
        while True:
            try:
                plan = proposals.send(outcome)
            except StopIteration:
                return
            known = [result for earlier, result in self.outcomes if earlier == plan]
            if known:
                outcome = known[0]
                continue
            outcome = yield plan
            self.outcomes.append((plan, outcome))
            if outcome is not None and outcome.fits and outcome.ms is not None and outcome.ms < self.ms:
                self.best, self.ms = plan, outcome.ms


    def sets(self, outline: Outline) -> Iterator[Option]:
        """Offload set and algorithms of the fastest plans so far."""
        known = [(r.ms, k) for k, (_, r) in enumerate(self.outcomes) if r is not None and r.ms is not None]
        for _, k in sorted(known)[:LEADERS]:
            plan = self.outcomes[k][0]
            names = set(plan.offload)
            yield [m for m in outline.movable if m.name in names], [plan.algorithm(op) for op in outline.graph.ops]


def _improved(outline: Outline, request: Request, record: _Record) -> Proposals:
    """Take out or put in one tensor at a time for as long as that promises less, and propose where it ends."""
    assert record.best is not None
    assert request.pool is not None
    names = set(record.best.offload)
    start = tuple(m for m in outline.movable if m.name in names)
    choices = algorithm_choices(outline, request, CHOICES) if len(outline.ways) < LONG else []
    evaluations = OPS // (len(outline.ways) * (len(choices) + 2))

    def promise(offload: Sequence[Movable]) -> Arrangement | None:
        options = dict.fromkeys(choices)
        for _, algorithms in with_room(outline, request, request.pool or 0, offload, outline.fastest):
            options[tuple(algorithms)] = None
        return next(iter(arranged(outline, [(offload, a) for a in options], request.pool or 0)), None)

    reached = promise(start)
    improving = reached is not None
    while improving and evaluations > 0:
        improving = False
        for m in outline.worthwhile:
            assert reached is not None
            evaluations -= 1
            there = m in reached.offload
            offload = [o for o in reached.offload if o is not m] if there else [*reached.offload, m]
            found = promise(offload)
            if found is not None and found.ms < reached.ms:
                reached, improving = found, True
            if evaluations <= 0:
                break
    if reached is not None and reached.ms < record.ms:
        yield from settle(reached, request)


def _from_smaller(outline: Outline, request: Request, record: _Record) -> Proposals:
    """What a smaller pool would have, where that promises more."""
    assert request.pool is not None
    for share in SMALLER if len(outline.ways) < LONG else SMALLER[::3]:
        smaller = replace(request, pool=int(request.pool * share))
        assert smaller.pool is not None
        options = [*greedy_options(outline, smaller, smaller.pool, 2)]
        if len(outline.ways) < LONG:
            options += threshold_options(outline, smaller, smaller.pool)
        for offload, algorithms in record.sets(outline):
            options += with_room(outline, smaller, smaller.pool, offload, algorithms)
        for arrangement in arranged(outline, options, smaller.pool)[:2]:
            if arrangement.ms < record.ms:
                yield from settle(arrangement, smaller)


def _with_waits(outline: Outline, request: Request, record: _Record) -> Proposals:
    """The vDNN and vDNN++ modes that may be faster than the best so far."""
    assert request.pool is not None
    for plan in _vdnn_plans(request):
        smallest = outline.smallest if plan.rule == "g" else [plan.algorithm(op) for op in request.graph.ops]
        names = set(plan.offload)
        held = outline.without(m for m in outline.movable if m.name in names)
        if outline.peak(smallest, held) <= request.pool and _least_ms(outline, request, plan) < record.ms:
            yield plan


def _vdnn_plans(request: Request) -> Iterator[Plan]:
    for rule in ("p", "g", "m") if request.mode.rule == "g" else (request.mode.rule,):
        for sync in ("compute", "both"):
            for offload_set in ("none", *SETS):
                yield offload_plan(request, offload_set, sync, rule)


def _least_ms(outline: Outline, request: Request, plan: Plan) -> float:
    """What a plan with host waits takes at least: copies out are done when forward is, copies in begin after it, and at
    the end of each stage the host waits before it issues the next."""
    link, names = outline.link, set(plan.offload)
    moved = [m for m in outline.movable if m.name in names]
    out = sum(link.ms(m.out_bytes, True) for m in moved if m.out_bytes)
    back = sum(link.ms(m.in_bytes, False) for m in moved)
    forward = backward = 0.0
    for op, ways in zip(request.graph.ops, outline.ways, strict=True):
        ms = (ways[0] if plan.rule == "g" else plan.algorithm(op)).ms or 0.0
        forward, backward = (forward + ms, backward) if op.forward else (forward, backward + ms)
    issue = 2 * request.profile.launch_ms * len(plan.stages)
    return outline.load_ms + max(forward, out) + max(backward, back) + issue
