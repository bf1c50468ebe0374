"""Rules of the checker about one action, one buffer or one token: each has a schedule that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from minidnn.schedule.actions import (
    COMPUTE,
    HOST,
    Alloc,
    Free,
    HostRange,
    HostSync,
    Launch,
    Offload,
    Prefetch,
    Record,
    Release,
    Schedule,
    Wait,
)
from minidnn.schedule.check import check

from .breaking import changed, find, put, relocated, without
from .lowered import graph_of, lowered


def copied_to(s: Schedule, **fields: object) -> Schedule:
    """The copy-out of 0.y goes elsewhere."""
    i = find(s, Offload, "0.y")
    a = s.actions[i]
    assert isinstance(a, Offload)
    return changed(s, i, host=replace(a.host, **fields))  # type: ignore[arg-type]


def begun_twice(s: Schedule) -> Schedule:
    """0.y#0 comes twice."""
    i = find(s, Alloc, "0.y")
    return put(s, i, s.actions[i])


def begun_again(s: Schedule) -> Schedule:
    """0.y#0 comes and goes a second time."""
    i = find(s, Free, "0.y")
    return put(s, i + 1, s.actions[find(s, Alloc, "0.y")], s.actions[i])


def elsewhere(s: Schedule) -> Schedule:
    """The copy-out of 0.y reads other bytes than were allocated."""
    i = find(s, Offload, "0.y")
    a = s.actions[i]
    assert isinstance(a, Offload)
    other = replace(a.buffer, offset=a.buffer.offset + 512)
    return changed(s, i, buffer=other, reads=(other,))


def two_places(s: Schedule) -> Schedule:
    """An op in place gets two buffers."""
    i = find(s, Launch, "2:backward_activation")
    a = s.actions[i]
    assert isinstance(a, Launch)
    other = next(b for _, b in a.operands if b.tensor == "2.y")
    bound = tuple((name, replace(other, tensor="2.dy", instance=0) if name == "dx" else b) for name, b in a.operands)
    return changed(s, i, operands=bound)


def persistent(s: Schedule, name: str, **fields: int) -> Schedule:
    """A persistent buffer has another offset or size."""
    buffers = [replace(b, **fields) if b.tensor == name else b for b in s.persistent]  # type: ignore[arg-type]
    return replace(s, persistent=tuple(buffers))


def alloc_on_compute(s: Schedule) -> Schedule:
    """The target of a copy-in begins on compute, which the copy does not wait for."""
    i = next(i for i, a in enumerate(s.actions) if isinstance(a, Alloc) and a.buffer.key == "0.y#1")
    return changed(s, i, lane=COMPUTE)


Break = Callable[[Schedule], Schedule]
VDNN, VDNNPP, NO_WAIT = "vdnn:all(p)", "vdnn++:all(p)", "no-wait:all(p)"
CASES: list[tuple[str, str, Break, str, str]] = [
    ("a weight is not updated", VDNN, lambda s: without(s, find(s, Launch, "2:update")),
     "content", r"2\.weight#0 does not hold its newest value at the end of the iteration"),
    ("two allocations of a stay", VDNN, begun_twice, "live", r"'alloc 0\.y' .* begins 0\.y#0, which is there already"),
    ("a stay begins again", VDNN, begun_again, "live", r"'alloc 0\.y' .* begins 0\.y#0 a second time"),
    ("an allocation is too small", VDNN, lambda s: relocated(s, "0.dy#0", nbytes=512),
     "arena", r"'alloc 0\.dy' .* takes 512 bytes; the tensor has 16384"),
    ("a writer in place has nothing to update", VDNN, lambda s: without(s, find(s, Launch, "4:backward_data")),
     "ops", r"'2:backward_activation' .* writes 2\.dy out of the graph's order"),
    ("an action has the wrong bytes", VDNN, elsewhere, "live", r"'offload 0\.y' .* takes 0\.y#0 to be where it is not"),
    ("host memory of no kind", VDNN, lambda s: copied_to(s, kind="disk"),
     "pinned", r"'offload 0\.y' .* names host memory of kind 'disk'"),
    ("a copy leaves the slab", VDNN, lambda s: copied_to(s, offset=s.pinned_bytes),
     "pinned", r"'offload 0\.y' .* leaves the pinned slab of \d+ bytes"),
    ("a copy is not behind its target's allocation", NO_WAIT, alloc_on_compute,
     "race", r"'prefetch 0\.y' .* may write 0\.y#1 before 'alloc 0\.y' .* is done with it"),
    ("a release is no worker's", VDNNPP, lambda s: changed(s, find(s, Release), lane=HOST),
     "lane", r"'release 0\.y' .* is not on a release worker's lane"),
    ("a sync with no stream", VDNN, lambda s: changed(s, find(s, HostSync), of="release-0"),
     "lane", r"waits for 'release-0', which is no stream"),
    ("a record signals nothing", VDNN, lambda s: changed(s, find(s, Record), signal=None),
     "token", r"'record' .* signals None"),
    ("a launch signals", VDNN, lambda s: changed(s, find(s, Launch), signal=9000),
     "token", r"'0:forward' .* signals 9000"),
    ("a wait waits for nothing", NO_WAIT, lambda s: changed(s, find(s, Wait), waits=()),
     "token", r"'wait' .* waits for 0 tokens"),
    ("an allocation on a stream waits", NO_WAIT, lambda s: changed(s, find(s, Alloc, "2.y"), waits=(0,)),
     "token", r"'alloc 2\.y' .* waits for 1 tokens"),
    ("a copy-in hides what it writes", VDNN, lambda s: changed(s, find(s, Prefetch, "0.y"), writes=()),
     "binding", r"'prefetch.*' .* reads, writes or frees other buffers than its kind does"),
    ("a launch serves another op", VDNN, lambda s: changed(s, find(s, Launch, "2:forward"), op=0),
     "binding", r"'2:forward' .* is not op 0 of the graph"),
    ("a tensor in two places", VDNN, two_places, "binding", r"'2:backward_activation' .* binds 2\.dy to two places"),
    ("another algorithm", VDNN, lambda s: changed(s, find(s, Launch, "2:forward"), algorithm="zero"),
     "binding", r"'2:forward' .* uses algorithm zero; the plan says fast"),
    ("a part of the batch", VDNN, lambda s: changed(s, find(s, Launch, "2:forward"), rows=(0, 2)),
     "ops", r"'2:forward' .* computes rows 0 to 2 only"),
    ("a weight outside its region", VDNN, lambda s: persistent(s, "6.bias", offset=s.persistent_bytes),
     "arena", r"6\.bias#0 leaves the persistent region of \d+ bytes"),
    ("a weight is too small", VDNN, lambda s: persistent(s, "6.weight", nbytes=16),
     "arena", r"6\.weight#0 has 16 bytes, too few for its tensor"),
    ("the labels come from another field", VDNN,
     lambda s: changed(s, find(s, Prefetch, "labels"), host=HostRange("slot", "input", 0, 32)),
     "slot", r"'prefetch labels' .* takes labels from input in slot memory"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "change", "rule", "reason"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_a_rule_has_a_schedule_that_breaks_it(mode: str, change: Break, rule: str, reason: str) -> None:
    found = check(change(lowered(graph_of("tiny"), mode)))
    assert any(f.rule == rule and re.search(reason, f.text) for f in found), [f"{f.rule}: {f.text}" for f in found]
