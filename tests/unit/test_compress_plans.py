"""Compression in plans, in what lowering makes of them, and in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from minidnn.codec.rates import MEASURED, CodecRates
from minidnn.errors import ArgumentError
from minidnn.plan.compress import TYPICAL, compressed, compressible, packed_bytes, predicted
from minidnn.profile.gpus import named_gpu
from minidnn.profile.model import modelled
from minidnn.run.choose import Options, choose
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import (
    Alloc,
    Compress,
    Decompress,
    HostRange,
    HostWait,
    Launch,
    Offload,
    PartAction,
    Prefetch,
    Record,
    Schedule,
)
from minidnn.schedule.check import check
from minidnn.schedule.lower import lower
from minidnn.schedule.recompress import recompressed

from . import simulated
from .breaking import find, parts
from .lowered import CODECS, SLOTS, compressing, graph_of, in_place, lowered


def share(a: HostRange, b: HostRange) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def copied_out(s: Schedule) -> list[str]:
    return [a.host.name for a in s.actions if isinstance(a, Offload) and a.host.kind == "pinned"]


# -- which tensors


def test_off_compresses_nothing_and_all_everything_but_the_batch() -> None:
    graph = graph_of("plain")
    plan = lowered(graph, "vdnn:all(m)").plan
    assert "input" in plan.offload
    assert compressed(graph, plan, "off") == ()
    assert compressed(graph, plan, "all") == tuple(name for name in plan.offload if name != "input")
    assert compressed(graph, plan, ("4.y", "input", "2.y")) == ("2.y", "4.y")


def test_auto_leaves_out_dense_tensors_and_those_whose_places_nobody_needs() -> None:
    graph = graph_of("plain")
    plan = replace(lowered(graph, "vdnn:all(m)").plan, slots=2)
    names = compressible(graph, plan)
    assert compressed(graph, plan, "auto") == names[:-2]
    assert compressed(graph, plan, "auto", {names[1]: 0.95}) == (names[0], *names[2:-2])


def test_auto_changes_its_choice_for_a_clear_reason_only() -> None:
    graph = graph_of("plain")
    plan = replace(lowered(graph, "vdnn:all(m)").plan, slots=2)
    first, *others = compressible(graph, plan)[:-2]
    shares = [share / 100 for share in range(50, 100)]
    enters = [s for s in shares if first in compressed(graph, plan, "auto", {first: s}, others)]
    stays = [s for s in shares if first in compressed(graph, plan, "auto", {first: s}, [first, *others])]
    assert enters == shares[: len(enters)]
    assert stays == shares[: len(stays)]
    assert 0 < len(enters) < len(stays) < len(shares)


def test_what_cannot_be_compressed_is_refused() -> None:
    graph = graph_of("plain")
    plan = lowered(graph, "vdnn:conv(m)").plan
    for name in ("input", "13.y", "nothing"):
        with pytest.raises(ArgumentError, match=name):
            lower(graph, replace(plan, compress=(name,)))


def test_predictions_add_up_and_follow_the_density() -> None:
    graph = graph_of("plain")
    plan = replace(lowered(graph, "vdnn:all(m)").plan, compress=("0.y", "4.y"))
    found = predicted(graph, plan, {"0.y": 0.1})
    rows = found["compressed"]
    assert [row["tensor"] for row in rows] == ["0.y", "4.y"]
    assert [row["layer"] for row in rows] == ["2", "5"]
    assert [row["density"] for row in rows] == [0.1, TYPICAL]
    expected = [packed_bytes(graph, "0.y", 0.1, 8), packed_bytes(graph, "4.y", 0.5, 8)]
    assert [row["packed_bytes"] for row in rows] == expected
    assert found["packed_bytes"] == sum(row["packed_bytes"] for row in rows)
    assert found["ratio"] == sum(row["raw_bytes"] for row in rows) / found["packed_bytes"]
    assert predicted(graph, replace(plan, compress=()), {}) == {
        "packed_bytes": None, "density": None, "ratio": None, "compressed": []
    }  # fmt: skip


# -- lowering


def test_without_compression_nothing_changes() -> None:
    graph = graph_of("plain")
    plain = lowered(graph, "vdnn++:all(m)")
    again = recompressed(compressing(), ())
    assert [a for a in again.actions if not isinstance(a, Alloc)] == [
        a for a in lower(graph, plain.plan).actions if not isinstance(a, Alloc)
    ]
    assert plain.pinned_bytes == plain.pinned_raw_bytes == again.pinned_bytes


def test_recompressing_moves_nothing_on_the_device() -> None:
    for placement in ("planned", "live"):
        graph = graph_of("plain")
        plain = lowered(graph, "vdnn++:all(m)", placement=placement)
        packed = recompressed(plain, compressible(graph, plain.plan))
        allocs = [[a.buffer for a in s.actions if isinstance(a, Alloc)] for s in (plain, packed)]
        assert allocs[0] == allocs[1]
        assert (packed.peak_bytes, packed.placement) == (plain.peak_bytes, placement)
        assert packed.pinned_bytes < plain.pinned_bytes
        assert check(packed) == ()


def test_each_part_is_packed_on_its_own_worker_after_the_copy_out() -> None:
    s = compressing()
    for name in copied_out(s):
        at = find(s, Offload, name)
        record = s.actions[at + 1]
        assert isinstance(record, Record)
        packs = [s.actions[i] for i in parts(s, Compress, name)]
        assert [a.lane for a in packs] == [f"codec-{k}" for k in range(CODECS)]
        assert all(a.waits == (record.signal,) for a in packs)
        bounds = [(a.start, a.stop) for a in packs if isinstance(a, Compress)]
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == s.graph.tensors[name].nbytes


def test_a_copy_out_into_used_bytes_waits_until_they_are_packed_while_the_layer_computes() -> None:
    s = compressing()
    names = copied_out(s)
    reused = 0
    for name in names[SLOTS:]:
        at = find(s, Offload, name)
        wait = s.actions[at - 1]
        if not isinstance(wait, HostWait):
            continue
        reused += 1
        packed = {s.actions[i].signal: n for n in names for i in parts(s, Compress, n)}
        owners = {packed[token] for token in wait.waits}
        assert owners <= {n for n in names[: names.index(name)] if share(s.pinned[n], s.pinned[name])}
        assert any(isinstance(a, Launch) and a.op == s.actions[at].op for a in s.actions[:at])
    assert reused >= 2


def test_a_tensor_is_unpacked_one_prefetch_ahead_and_awaited_in_whole() -> None:
    s = compressing()
    order = [a.host.name for a in s.actions if isinstance(a, Prefetch) and a.host.kind == "pinned"]
    for before, name in pairwise(order):
        fetch = find(s, Prefetch, name)
        unpacks = parts(s, Decompress, name)
        assert find(s, Prefetch, before) < unpacks[0] < unpacks[-1] < fetch
        assert s.actions[unpacks[0]].op < s.actions[fetch].op  # a layer computes meanwhile
        assert {s.actions[i].signal for i in unpacks} == set(s.actions[fetch - 1].waits)
    first = parts(s, Decompress, order[0])[0]
    assert s.actions[first].op >= s.graph.forward_ops
    assert not any(isinstance(a, Launch) and a.op >= s.graph.forward_ops for a in s.actions[:first])


def test_the_last_tensors_come_back_in_place_the_others_need_not_be_there() -> None:
    s = compressing()
    names = copied_out(s)
    assert in_place(s) == set(names[-SLOTS:])
    for name in names[:-SLOTS]:
        assert f"{name} unpacked" in s.pinned


@pytest.mark.parametrize("network", ["plain", "normed", "mixed"])
def test_the_slab_holds_what_is_in_flight(network: str) -> None:
    """Never less than any two neighbours in forward, and less than everything."""
    s = compressing(network)
    sizes = [s.graph.tensors[name].nbytes for name in copied_out(s)]
    assert max(a + b for a, b in pairwise(sizes)) <= s.pinned_bytes < sum(sizes)
    assert s.pinned_raw_bytes >= sum(sizes)
    assert s.pinned_bytes == max(r.offset + r.nbytes for r in s.pinned.values())


def test_what_is_not_compressed_keeps_its_slot_until_it_is_back() -> None:
    s = compressing(names=("0.y", "4.y"))
    assert {a.host.name for a in s.actions if isinstance(a, PartAction)} == {"0.y", "4.y"}
    assert check(s) == ()
    place = s.pinned["2.y"]
    gone, back = find(s, Offload, "2.y"), find(s, Prefetch, "2.y")
    for at, a in enumerate(s.actions):
        host = a.host if isinstance(a, (Offload, Decompress)) else None
        if host and host.kind == "pinned" and host.name != "2.y" and gone < at < back:
            assert not share(host, place)


def test_small_tensors_have_fewer_parts_than_there_are_workers() -> None:
    graph = graph_of("tiny", "paper-bf16")
    plan = replace(lowered(graph, "vdnn:all(m)").plan, codecs=1000)
    s = lower(graph, replace(plan, compress=compressible(graph, plan)))
    for a in s.actions:
        if isinstance(a, PartAction):
            assert a.stop > a.start
    assert check(s) == ()


# -- the simulator


def priced(compress: str, rates: CodecRates = MEASURED, density: float = 0.5) -> tuple[Schedule, object, float]:
    graph = simulated.graph_of("alexnet", 64)
    profile = modelled(graph, named_gpu("gtx1080ti"))
    s = choose(graph, "vdnn++:all(p)", profile, Options(compress=compress))
    found = simulate(s, profile, dict.fromkeys(s.plan.compress, density), rates)
    return s, found.timeline, found.iteration_ms


def test_codecs_without_cost_change_nothing_but_the_waits_for_slots() -> None:
    fast = CodecRates((0.0, 1.0), (1e15, 1e15), (1e15, 1e15))
    assert priced("all", fast)[2] == pytest.approx(priced("off")[2], rel=0.01)


def test_a_worker_is_busy_for_its_bytes_over_its_rate() -> None:
    s, timeline, _ = priced("all", density=0.25)
    spans = [x for x in timeline.spans if x.lane == "codec-3" and x.label == "compress features.0.y"]  # type: ignore[attr-defined]
    (action,) = [a for a in s.actions if isinstance(a, Compress) and a.label == spans[0].label and a.part == 3]
    assert len(spans) == 1
    assert spans[0].end_ms - spans[0].start_ms == pytest.approx((action.stop - action.start) / 19.4e9 * 1e3)


def test_slow_codecs_stall_the_copies_and_the_last_tensors_are_cancelled() -> None:
    slow = CodecRates((0.0, 1.0), (2e7, 2e7), (2e7, 2e7))
    s, timeline, ms = priced("all", slow)
    assert ms > 2 * priced("all")[2]
    assert timeline.stall_ms["codec"] > ms / 4  # type: ignore[attr-defined]
    worked = {span.label for span in timeline.spans if span.lane.startswith("codec")}  # type: ignore[attr-defined]
    last = copied_out(s)[-1]
    assert f"decompress {last}" not in worked
    assert f"compress {last}" not in worked
    assert {f"decompress {name}" for name in s.plan.compress if name not in in_place(s)} <= worked
    done = priced("all")[1]
    assert f"decompress {last}" in {span.label for span in done.spans}  # type: ignore[attr-defined]


def test_rates_between_two_densities_are_between_their_rates() -> None:
    rates = CodecRates((0.0, 0.5, 1.0), (4e9, 2e9, 1e9), (8e9, 4e9, 2e9))
    assert rates.pack_ms(3_000_000, 0.25) == pytest.approx(1.0)
    assert rates.unpack_ms(3_000_000, 0.75) == pytest.approx(1.0)
    assert rates.pack_ms(2_000_000, 2.0) == rates.pack_ms(2_000_000, 1.0) == pytest.approx(2.0)
    assert rates.pack_ms(4_000_000, 0.0) == pytest.approx(1.0)


def test_every_tensor_may_be_named_that_a_plan_may_compress() -> None:
    """Statistics of batch normalization too, which are no layer's input."""
    graph = simulated.graph_of("vgg11_bn", 2)
    names = tuple(graph.tensors)
    assert any(name.endswith(".invstd") for name in names)
    Options(compress=names).check_names(graph)
    with pytest.raises(ArgumentError, match="compress names 'features', which is no tensor of this network"):
        Options(compress=("features",)).check_names(graph)
