"""The checker on schedules that compress: it accepts them in every outcome, and finds what is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.plan.plan import ORDERS
from minidnn.profile.profile import Profile
from minidnn.run.choose import Options, choose
from minidnn.schedule.actions import Compress, Decompress, HostWait, Offload, Prefetch, Schedule
from minidnn.schedule.check import check
from minidnn.schedule.outcomes import outcomes

from .breaking import changed, find, moved, parts, put, with_actions, without
from .lowered import CODECS, compressing, in_place


@pytest.mark.parametrize("target", ["paper", "native", "native-bf16-nhwc"])
@pytest.mark.parametrize("network", ["tiny", "plain", "normed", "mixed"])
def test_every_compressing_mode_is_right_in_every_outcome(network: str, target: str) -> None:
    for mode in ("vdnn:all(m)", "vdnn++:all(p)", "vdnn++:conv(m)", "no-wait:all(m)", "no-wait:aconv(p)"):
        assert check(compressing(network, mode, target)) == (), mode


@pytest.mark.parametrize("order", ORDERS)
def test_what_comes_back_across_its_own_slot_waits_until_all_of_it_is_packed(order: str) -> None:
    """Here a tensor's place to be unpacked in overlaps its slot, shifted: its parts are in each other's way."""
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 15, 3, 2, 1, groups=3, bias=False),
        nn.Conv2d(15, 6, 1, groups=3), nn.Conv2d(6, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3, 2, 1, bias=False),
        nn.Flatten(), nn.Linear(24, 17), nn.Linear(17, 3), input_shape=(1, 9, 6),
    )  # fmt: skip
    graph = build(net, nn.CrossEntropyLoss(), (4, 1, 9, 6), optimizer=optim.SGD(0.1))
    found = choose(graph, "vdnn++:all(m)", Profile("none"), Options(compress="all", order=order))
    slots, targets = ({a.host.name: a.host.offset for a in found.actions if isinstance(a, kind)}
                      for kind in (Compress, Decompress))  # fmt: skip
    nbytes = {name: graph.tensors[name].nbytes for name in targets}
    assert any(0 < abs(slots[name] - at) < nbytes[name] for name, at in targets.items())
    assert check(found) == ()


def test_the_outcomes_are_all_ways_to_cancel_what_comes_back_in_place() -> None:
    s = compressing()
    first, second = sorted(in_place(s))
    assert set(outcomes(s.actions)) == {
        frozenset(), frozenset({first}), frozenset({second}), frozenset({first, second}),
    }  # fmt: skip


def test_what_the_host_has_seen_packed_cannot_be_cancelled() -> None:
    s = compressing()
    (first, *_) = sorted(in_place(s))
    tokens = tuple(t for i in parts(s, Compress, first) if (t := s.actions[i].signal) is not None)
    awaited = put(s, parts(s, Decompress, first)[0], HostWait(lane="host", waits=tokens[:1]))
    assert all(first not in cancelled for cancelled in outcomes(awaited.actions))


Break = Callable[[Schedule], Schedule]
BROKEN: dict[str, tuple[Break, str, str, str]] = {}


def broken(rule: str, reason: str, mode: str = "vdnn++:all(m)") -> Callable[[Break], Break]:
    def register(change: Break) -> Break:
        BROKEN[change.__name__] = (change, rule, reason, mode)
        return change

    return register


@broken("race", "may write pinned bytes from 0 while 'compress 0.y'")
def a_slot_is_overwritten_before_it_is_packed(s: Schedule) -> Schedule:
    return without(s, find(s, Offload, "4.y") - 1)


@broken("race", "'prefetch 0.y' .* before 'decompress 0.y' .* is done with it")
def a_prefetch_does_not_wait_for_the_codec(s: Schedule) -> Schedule:
    return without(s, find(s, Prefetch, "0.y") - 1)


@broken("race", "'prefetch 0.y' .* before 'decompress 0.y' .* is done with it")
def a_prefetch_waits_for_some_parts_only(s: Schedule) -> Schedule:
    i = find(s, Prefetch, "0.y") - 1
    return changed(s, i, waits=s.actions[i].waits[:-1])


@broken("race", "'decompress 0.y' .* may write pinned bytes .* while", "no-wait:all(m)")
def an_unpacking_overwrites_what_others_use(s: Schedule) -> Schedule:
    for i in parts(s, Decompress, "0.y"):
        s = changed(s, i, waits=s.actions[i].waits[-1:])
    return s


@broken("race", "'compress 2.y' .* may read pinned bytes from .* before 'offload 2.y' .* is done with it")
def a_packing_starts_before_the_copy_out_is_done(s: Schedule) -> Schedule:
    i = parts(s, Compress, "2.y")[1]
    token = s.actions[parts(s, Compress, "0.y")[0]].waits
    return changed(s, i, waits=token)


@broken("race", "'decompress 7.y' .* may unpack before 'compress 7.y' .* is done")
def another_worker_unpacks_at_any_time(s: Schedule) -> Schedule:
    other = s.actions[parts(s, Compress, "7.y")[1]].signal
    return changed(s, parts(s, Decompress, "7.y")[0], lane="codec-7", waits=(other,))


@broken("codec", "'decompress 0.y' .* unpacks a part of 0.y that is not packed")
def a_part_is_never_packed(s: Schedule) -> Schedule:
    i = parts(s, Compress, "0.y")[1]
    token = s.actions[i].signal
    actions = [replace(a, waits=tuple(t for t in a.waits if t != token)) for a in s.actions]
    return without(with_actions(s, tuple(actions)), i)


@broken("leak", "'compress 0.y' .* packs 0.y, and nothing unpacks it")
def a_part_is_never_unpacked(s: Schedule) -> Schedule:
    i = parts(s, Decompress, "0.y")[1]
    wait = find(s, Prefetch, "0.y") - 1
    s = changed(s, wait, waits=tuple(t for t in s.actions[wait].waits if t != s.actions[i].signal))
    return without(s, i)


@broken("codec", "'compress 2.y' .* packs bytes that are not this iteration's 2.y")
def the_wrong_bytes_are_packed(s: Schedule) -> Schedule:
    for i in parts(s, Compress, "2.y"):
        a = s.actions[i]
        assert isinstance(a, Compress)
        s = changed(s, i, host=replace(a.host, offset=0))
    return s


@broken("pinned", "'prefetch 2.y' .* brings in bytes that are not this iteration's 2.y")
def the_tensor_comes_back_elsewhere(s: Schedule) -> Schedule:
    i = find(s, Prefetch, "2.y")
    return changed(s, i, host=s.pinned["2.y"])


@broken("codec", "packs a part of 2.y for a second time")
def a_part_is_packed_twice(s: Schedule) -> Schedule:
    i = parts(s, Compress, "2.y")[0]
    return put(s, i + 1, replace(s.actions[i], signal=10_000))


@broken("pinned", "'compress 0.y' .* is about bytes .* of pinned memory")
def a_part_ends_behind_its_tensor(s: Schedule) -> Schedule:
    i = parts(s, Compress, "0.y")[-1]
    a = s.actions[i]
    assert isinstance(a, Compress)
    return changed(s, i, stop=a.stop + 64)


@broken("lane", "'compress 0.y' .* is not on a codec worker's lane")
def the_host_packs(s: Schedule) -> Schedule:
    return changed(s, parts(s, Compress, "0.y")[0], lane="host")


@broken("token", "'compress 0.y' .* waits for 0 tokens, which its kind cannot")
def a_packing_waits_for_nothing(s: Schedule) -> Schedule:
    return changed(s, parts(s, Compress, "0.y")[0], waits=())


@broken("token", "'decompress 0.y' .* signals None")
def an_unpacking_tells_nobody(s: Schedule) -> Schedule:
    i = parts(s, Decompress, "0.y")[0]
    wait = find(s, Prefetch, "0.y") - 1
    s = changed(s, wait, waits=tuple(t for t in s.actions[wait].waits if t != s.actions[i].signal))
    return changed(s, i, signal=None)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_compression_is_found(name: str) -> None:
    change, rule, reason, mode = BROKEN[name]
    s = compressing(mode=mode)
    assert check(s) == ()
    found = check(change(s))
    assert found
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError([f.text for f in found if f.rule == rule])


def test_an_order_that_only_a_cancelled_unpacking_gave_is_found() -> None:
    """The first tensor's prefetch waits for the second one's unpacking, which comes later on the same workers; where
    that is cancelled, nobody waits for the first."""
    s = compressing()
    first, second = [a.host.name for a in s.actions if isinstance(a, Prefetch) and a.host.kind == "pinned"][:2]
    assert {first, second} == in_place(s)
    for k in range(CODECS):
        s = moved(s, parts(s, Decompress, second)[k], find(s, Prefetch, first) - 1)
    tokens = tuple(s.actions[i].signal for i in parts(s, Decompress, second))
    s = changed(s, find(s, Prefetch, first) - 1, waits=tokens)
    found = check(s)
    assert {f.rule for f in found} == {"race"}
    assert all(f"when the compression of {second}" in f.text for f in found)
