"""Schedules broken by hand: a wait, a free, a copy removed, moved or swapped; the checker says what is wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from minidnn.schedule.actions import (
    COMPUTE,
    D2H,
    H2D,
    HOST,
    MEMORY,
    Alloc,
    AwaitReleases,
    Free,
    HostRange,
    HostSync,
    HostWait,
    Launch,
    Offload,
    Prefetch,
    Record,
    Release,
    Schedule,
    Wait,
)
from minidnn.schedule.check import check

from . import conflicts
from .breaking import (
    before_of,
    changed,
    find,
    moved,
    next_of,
    offset_of,
    put,
    relocated,
    swapped,
    with_actions,
    without,
)
from .lowered import graph_of, lowered

Break = Callable[[Schedule], Schedule]
BROKEN: dict[str, tuple[str, Break, str, str]] = {}


def broken(mode: str, rule: str, reason: str) -> Callable[[Break], Break]:
    """Register a way to break the schedule of a mode: the rule that must object, and what it must say."""

    def register(change: Break) -> Break:
        BROKEN[change.__name__] = (mode, change, rule, reason)
        return change

    return register


VDNN, VDNNPP, NO_WAIT, KEEP = "vdnn:all(p)", "vdnn++:all(p)", "no-wait:all(p)", "keep(p)"


@broken(VDNNPP, "race", r"'free input' .* may free input#0 while '0:forward' .* still reads it: no wait")
def no_wait_for_compute_at_a_layers_end(s: Schedule) -> Schedule:
    return without(s, find(s, HostSync, "compute"))


@broken(VDNN, "race", r"'free 0\.y' .* may free 0\.y#0 while 'offload 0\.y' .* still reads it")
def no_wait_for_the_copy_out_before_its_source_is_freed(s: Schedule) -> Schedule:
    return without(s, next_of(s, find(s, Offload, "0.y"), HostSync, "memory"))


@broken(VDNNPP, "race", r"'free 0\.y' \(action \d+, host\) may free 0\.y#0 while 'offload 0\.y' .* still reads it")
def the_host_frees_what_the_release_worker_should(s: Schedule) -> Schedule:
    i = find(s, Release, "0.y")
    return with_actions(s, s.actions[:i], (Free(lane=HOST, frees=s.actions[i].frees),), s.actions[i + 1 :])


@broken(VDNNPP, "token", r"'release 0\.y' .* waits for 0 tokens")
def a_release_waits_for_nothing(s: Schedule) -> Schedule:
    return changed(s, find(s, Release, "0.y"), waits=())


@broken(VDNNPP, "overlap", r"may put .* on bytes of .* before 'release .*' .* has freed it: no wait between them")
def an_allocation_does_not_wait_for_the_release_that_holds_its_bytes(s: Schedule) -> Schedule:
    for i, a in enumerate(s.actions):
        if isinstance(a, AwaitReleases) or (isinstance(a, Alloc) and a.waits):
            s = changed(s, i, waits=a.waits[:0] if isinstance(a, Alloc) else a.waits[:1])
    return s


@broken(VDNNPP, "barrier", r"'release .*' .* may not be done when the next iteration enters compute")
def nobody_awaits_the_releases(s: Schedule) -> Schedule:
    return without(s, find(s, AwaitReleases))


@broken(VDNNPP, "race", r"'2:backward_filter' .* may read 0\.y#1 before 'prefetch 0\.y' .* is done with it")
def nobody_waits_for_a_prefetch(s: Schedule) -> Schedule:
    token = s.actions[next_of(s, find(s, Prefetch, "0.y"), Record)].signal
    return without(s, next(i for i, a in enumerate(s.actions) if type(a) is HostWait and token in a.waits))


@broken(VDNN, "content", r"'2:backward_filter' .* reads 0\.y#1, which holds nothing yet; the graph says version 1")
def a_prefetch_is_missing(s: Schedule) -> Schedule:
    return without(s, find(s, Prefetch, "0.y"))


@broken(VDNN, "pinned", r"'prefetch 2\.y' .* brings in bytes that are not this iteration's 2\.y")
def two_prefetches_take_each_others_bytes(s: Schedule) -> Schedule:
    i, j = find(s, Prefetch, "2.y"), find(s, Prefetch, "0.y")
    one, two = s.actions[i], s.actions[j]
    assert isinstance(one, Prefetch)
    assert isinstance(two, Prefetch)
    return changed(changed(s, i, host=two.host), j, host=one.host)


@broken(VDNN, "live", r"'prefetch 0\.y' .* touches 0\.y#1, which nothing has allocated")
def a_prefetch_comes_before_its_allocation(s: Schedule) -> Schedule:
    i = find(s, Prefetch, "0.y")
    return swapped(s, i, before_of(s, i, Alloc))


@broken(VDNN, "pinned", r"'prefetch 0\.y' .* brings in bytes that are not this iteration's 0\.y")
def a_copy_out_is_missing(s: Schedule) -> Schedule:
    return without(s, find(s, Offload, "0.y"))


@broken(VDNN, "content", r"'offload 0\.y' .* copies out 0\.y#0 before anything has written it")
def a_copy_out_comes_before_its_source_is_made(s: Schedule) -> Schedule:
    return moved(s, find(s, Offload, "0.y"), find(s, Launch, "0:forward"))


@broken(NO_WAIT, "race", r"'offload 0\.y' \(action \d+, d2h\) may read 0\.y#0 before '0:forward' .* is done with it")
def a_copy_out_does_not_wait_for_its_source(s: Schedule) -> Schedule:
    return without(s, before_of(s, find(s, Offload, "0.y"), Wait))


@broken(NO_WAIT, "race", r"'prefetch .*' \(.*h2d\) may read pinned bytes from \d+ before 'offload .*' \(.*d2h\)")
def a_prefetch_does_not_wait_for_the_copy_out(s: Schedule) -> Schedule:
    stored = {a.signal for a in s.actions if isinstance(a, Record) and a.lane == D2H}
    waits = {i for i, a in enumerate(s.actions) if isinstance(a, Wait) and a.lane == H2D and {*a.waits} <= stored}
    return without(s, *waits)


@broken(NO_WAIT, "race", r"'free 2\.y' \(action \d+, d2h\) may free 2\.y#0 while '4:forward' .* still reads it")
def a_free_behind_a_copy_out_does_not_wait_for_compute(s: Schedule) -> Schedule:
    return without(s, before_of(s, find(s, Free, "2.y"), Wait))


@broken(VDNN, "pinned", r"'prefetch .*' .* brings in bytes that are not this iteration's")
def two_copy_outs_share_pinned_bytes(s: Schedule) -> Schedule:
    i, j = find(s, Offload, "0.y"), find(s, Offload, "2.y")
    one, two = s.actions[i], s.actions[j]
    assert isinstance(one, Offload)
    assert isinstance(two, Offload)
    onto = replace(two.host, offset=one.host.offset)
    s = changed(s, j, host=onto)
    return changed(s, find(s, Prefetch, "2.y"), host=onto)


@broken(VDNN, "leak", r"0\.dy#0 is still there at the end of the iteration")
def a_buffer_is_never_freed(s: Schedule) -> Schedule:
    i = next(i for i, a in enumerate(s.actions) if any(b.key == "0.dy#0" for b in a.frees))
    return changed(s, i, frees=tuple(b for b in s.actions[i].frees if b.key != "0.dy#0"))


@broken(VDNN, "live", r"'free .*' .* touches 0\.y#0 after 'free 0\.y' .* has freed it")
def a_buffer_is_freed_twice(s: Schedule) -> Schedule:
    i = find(s, Free, "0.y")
    return put(s, i + 1, s.actions[i])


@broken(VDNN, "live", r"'6:backward_data' .* touches 6\.dy#0 after 'free .*' .* has freed it")
def a_free_comes_before_the_last_use(s: Schedule) -> Schedule:
    i = next(i for i, a in enumerate(s.actions) if any(b.key == "6.dy#0" for b in a.frees))
    return moved(s, i, find(s, Launch, "6:backward_data"))


@broken(VDNN, "live", r"frees 0\.weight#0, which outlives the iteration")
def a_weight_is_freed(s: Schedule) -> Schedule:
    weight = next(b for b in s.persistent if b.tensor == "0.weight")
    i = find(s, Free, last=True)
    return changed(s, i, frees=(*s.actions[i].frees, weight))


@broken(KEEP, "ops", r"op 2:forward is never launched")
def an_op_is_missing(s: Schedule) -> Schedule:
    return without(s, find(s, Launch, "2:forward"))


@broken(KEEP, "ops", r"'2:forward' .* launches an op that '2:forward' .* has launched")
def an_op_runs_twice(s: Schedule) -> Schedule:
    i = find(s, Launch, "2:forward")
    return put(s, i, s.actions[i])


@broken(VDNN, "content", r"'2:backward_data' .* 2\.dy#0, which holds version 1 of 2\.dy; the graph says version 2")
def an_update_in_place_comes_too_late(s: Schedule) -> Schedule:
    return swapped(s, find(s, Launch, "2:backward_activation"), find(s, Launch, "2:backward_data"))


@broken(VDNN, "content", r"'2:backward_data' .* holds version 1 of 2\.weight; the graph says version 0")
def weights_are_updated_before_their_last_reader(s: Schedule) -> Schedule:
    return swapped(s, find(s, Launch, "2:update"), find(s, Launch, "2:backward_data"))


@broken(KEEP, "content", r"'loss:loss' .* reads scalars#0, which holds nothing yet")
def the_step_scalars_never_arrive(s: Schedule) -> Schedule:
    return without(s, find(s, Prefetch, "scalars"))


@broken(VDNN, "binding", r"'2:forward' .* does not bind the operands that its op declares")
def a_launch_binds_another_tensor(s: Schedule) -> Schedule:
    i = find(s, Launch, "2:forward")
    launch, other = s.actions[i], s.actions[find(s, Launch, "0:forward")]
    assert isinstance(launch, Launch)
    assert isinstance(other, Launch)
    bound = tuple((name, dict(other.operands)["w"] if name == "w" else b) for name, b in launch.operands)
    return changed(s, i, operands=bound)


@broken(VDNN, "binding", r"'2:forward' .* says that it touches other buffers than it binds")
def a_launch_hides_a_read(s: Schedule) -> Schedule:
    i = find(s, Launch, "2:forward")
    return changed(s, i, reads=s.actions[i].reads[1:])


@broken(VDNN, "binding", r"'2:forward' .* has 16 bytes of workspace; it needs 40000")
def a_workspace_is_too_small(s: Schedule) -> Schedule:
    i = find(s, Launch, "2:forward")
    launch = s.actions[i]
    assert isinstance(launch, Launch)
    assert launch.workspace is not None
    small = replace(launch.workspace, nbytes=16)
    return changed(s, i, workspace=small, writes=tuple(small if b == launch.workspace else b for b in launch.writes))


@broken(VDNN, "token", r"waits for token \d+, which nothing before it signals")
def a_wait_comes_before_its_record(s: Schedule) -> Schedule:
    i = find(s, HostWait)
    return moved(s, i, next(at for at, a in enumerate(s.actions) if a.signal in s.actions[i].waits))


@broken(VDNN, "token", r"signals token \d+ as 'record' .* does")
def a_token_is_signalled_twice(s: Schedule) -> Schedule:
    i, j = find(s, Record), find(s, Record, last=True)
    return changed(s, j, signal=s.actions[i].signal)


@broken(VDNN, "lane", r"'2:forward' .* is on the wrong lane; it may be on compute")
def a_launch_is_on_the_copy_lane(s: Schedule) -> Schedule:
    return changed(s, find(s, Launch, "2:forward"), lane=MEMORY)


@broken(VDNN, "overlap", r"'alloc 2\.y' .* puts 2\.y#0 on bytes of 0\.y#0, which is still there")
def two_live_buffers_share_bytes(s: Schedule) -> Schedule:
    return relocated(s, "2.y#0", offset=offset_of(s, "0.y#0"))


@broken(VDNN, "arena", r"'alloc 2\.y' .* puts 2\.y#0 at bytes 0 to 16384; the pool is \d+ to \d+")
def a_buffer_lies_in_the_persistent_region(s: Schedule) -> Schedule:
    return relocated(s, "2.y#0", offset=0)


@broken(VDNN, "arena", r"'alloc 2\.y' .* puts 2\.y#0 at bytes \d+ to \d+; the pool is \d+ to \d+")
def a_buffer_leaves_the_arena(s: Schedule) -> Schedule:
    return relocated(s, "2.y#0", offset=s.peak_bytes - 512)


@broken(VDNN, "arena", r"the schedule says that its peak is \d+ bytes; its buffers end at \d+")
def the_peak_is_overstated(s: Schedule) -> Schedule:
    return replace(s, pool_bytes=s.pool_bytes + 512)


@broken(VDNN, "overlap", r"0\.bias#0 and 0\.weight#0 share bytes of the persistent region")
def two_weights_share_bytes(s: Schedule) -> Schedule:
    at = next(b.offset for b in s.persistent if b.tensor == "0.weight")
    return replace(s, persistent=tuple(replace(b, offset=at) if b.tensor == "0.bias" else b for b in s.persistent))


@broken(VDNN, "slot", r"'prefetch input' .* takes input from input in pinned memory")
def the_input_comes_back_from_pinned_memory(s: Schedule) -> Schedule:
    i = find(s, Prefetch, "input", last=True)
    return changed(s, i, host=HostRange("pinned", "input", 0, 12288))


@broken(VDNN, "slot", r"loss is not copied back to the batch slot")
def the_loss_is_never_returned(s: Schedule) -> Schedule:
    return without(s, find(s, Offload, "loss"))


@broken(VDNN, "slot", r"'offload loss' .* may still use the batch slot when the next iteration enters compute")
def nobody_waits_for_the_results(s: Schedule) -> Schedule:
    return without(s, find(s, HostSync, "memory", last=True))


@broken(KEEP, "barrier", r"may not be done when the next iteration enters compute")
def a_lane_enters_the_next_iteration_early(s: Schedule) -> Schedule:
    return without(s, next(i for i in reversed(range(len(s.actions))) if s.actions[i].lane == COMPUTE))


@broken(NO_WAIT, "race", r"'prefetch scalars' \(.*h2d, next iteration\) may write scalars#0 while '0:update' .* reads")
def the_next_batch_overwrites_this_ones_scalars(s: Schedule) -> Schedule:
    return without(s, next(i for i in reversed(range(len(s.actions))) if s.actions[i].lane == H2D))


@broken(VDNN, "pinned", r"'offload 0\.y' .* copies 64 bytes; 0\.y#0 has 16384")
def a_copy_moves_a_part_only(s: Schedule) -> Schedule:
    i = find(s, Offload, "0.y")
    a = s.actions[i]
    assert isinstance(a, Offload)
    return changed(s, i, host=replace(a.host, nbytes=64))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_rejected_with_the_reason(name: str) -> None:
    mode, change, rule, reason = BROKEN[name]
    good = lowered(graph_of("tiny"), mode)
    assert check(good) == ()
    found = check(change(good))
    assert any(f.rule == rule and re.search(reason, f.text) for f in found), [f"{f.rule}: {f.text}" for f in found]


@pytest.mark.parametrize("name", [name for name, entry in BROKEN.items() if entry[2] == "race"])
def test_a_missing_wait_is_a_real_hazard(name: str) -> None:
    mode, change, _, _ = BROKEN[name]
    bad = change(lowered(graph_of("tiny"), mode))
    assert any(conflicts.replay(bad, random.Random(seed)) for seed in range(20)), "no order of events reads wrongly"
