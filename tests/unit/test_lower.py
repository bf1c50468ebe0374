"""Plan -> schedule: the order of events that the vDNN papers give, and where buffers begin and end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.graph.tensor import Role
from minidnn.models import resolve
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan, stages_by_op
from minidnn.plan.registry import POLICIES, parse_mode
from minidnn.profile.profile import Algorithm, Profile, op_key
from minidnn.run.choose import Options, choose
from minidnn.schedule.actions import (
    COMPUTE,
    MEMORY,
    Alloc,
    AwaitReleases,
    Free,
    HostSync,
    HostWait,
    Launch,
    Offload,
    Prefetch,
    Release,
    Schedule,
    Wait,
)  # fmt: skip
from minidnn.schedule.lower import lower

MiB = 2**20


def graph_of(model: str, batch: int, target: Target = Target()) -> Graph:
    net = resolve(model)()
    assert net.input_shape is not None
    return build(net, nn.CrossEntropyLoss(), (batch, *net.input_shape), target, optimizer=optim.SGD(0.1, momentum=0.9))


@pytest.fixture(scope="module")
def alexnet() -> Graph:
    return graph_of("alexnet", 2)


def schedule(graph: Graph, mode: str, **options: object) -> Schedule:
    return choose(graph, mode, Profile("none"), Options(**options))  # type: ignore[arg-type]


def stage_of(s: Schedule, op_name: str) -> list[str]:
    """What happens in the stage that begins with an op, in a short notation."""
    start = next(i for i, op in enumerate(s.graph.ops) if op.name == op_name)
    stop = next(stop for begin, stop in s.plan.stages if begin == start)
    return [a.label for a in s.actions if start <= a.op < stop and not a.label.startswith("record")]


def test_vdnn_forward_waits_for_both_streams_and_then_frees(alexnet: Graph) -> None:
    assert stage_of(schedule(alexnet, "vdnn:all(m)"), "features.3:forward") == [
        "alloc features.3.y", "offload features.2.y", "features.3:forward",
        "hostsync compute", "hostsync memory", "free features.2.y",
    ]  # fmt: skip


def test_vdnnpp_forward_waits_for_compute_and_leaves_the_free_to_a_release_worker(alexnet: Graph) -> None:
    s = schedule(alexnet, "vdnn++:all(m)")
    assert stage_of(s, "features.3:forward") == [
        "alloc features.3.y", "offload features.2.y", "features.3:forward", "hostsync compute", "release features.2.y",
    ]  # fmt: skip
    released = [a for a in s.actions if isinstance(a, Release)]
    (awaited,) = [a for a in s.actions if isinstance(a, AwaitReleases)]
    waited = {t for a in s.actions if isinstance(a, Alloc) for t in a.waits} | set(awaited.waits)
    assert waited == {a.signal for a in released}
    assert {a.lane for a in released} == {"release-0", "release-1"}


def test_vdnn_and_vdnnpp_differ_in_waits_and_frees_only(alexnet: Graph) -> None:
    work = (Alloc, Launch, Offload, Prefetch)
    one, two = (schedule(alexnet, mode) for mode in ("vdnn:conv(m)", "vdnn++:conv(m)"))
    labels = [[a.label for a in s.actions if isinstance(a, work)] for s in (one, two)]
    assert labels[0] == labels[1]
    assert two.pool_bytes <= one.pool_bytes


def test_backward_prefetches_first_or_last(alexnet: Graph) -> None:
    first = stage_of(schedule(alexnet, "vdnn:all(m)"), "features.10:backward_activation")
    assert first[:5] == [
        "alloc features.6.y", "prefetch features.6.y", "alloc features.8.dy",
        "alloc features.10.dweight", "alloc features.10.dbias",
    ]  # fmt: skip
    last = stage_of(schedule(alexnet, "vdnn:all(m)", order="derivative-first"), "features.10:backward_activation")
    assert last[:5] == [*first[2:5], *first[:2]]


def test_the_wait_for_a_prefetch_comes_just_before_its_first_use(alexnet: Graph) -> None:
    s = schedule(alexnet, "vdnn++:all(m)")
    for at, action in enumerate(s.actions):
        if isinstance(action, HostWait):
            following = next(a for a in s.actions[at + 1 :] if not isinstance(a, HostWait))
            assert isinstance(following, Launch)


def test_the_input_is_never_copied_out_and_comes_back_from_the_host(alexnet: Graph) -> None:
    s = schedule(alexnet, "vdnn:all(m)")
    assert not [a for a in s.actions if isinstance(a, Offload) and a.buffer.tensor == "input"]
    coming = [a for a in s.actions if isinstance(a, Prefetch) and a.buffer.tensor == "input"]
    assert [a.host.kind for a in coming] == ["slot", "slot"]
    assert [a.buffer.instance for a in coming] == [0, 1]


def test_what_no_layer_prefetched_is_fetched_before_use(alexnet: Graph) -> None:
    (plan,) = POLICIES["vdnn"](Request(alexnet, Profile("none"), parse_mode("vdnn:all(m)")))
    s = lower(alexnet, replace(plan, prefetch={}))
    back = stage_of(s, "features.10:backward_activation")
    assert back.index("prefetch features.8.y") < back.index("features.10:backward_activation")
    assert {a.buffer.tensor for a in s.actions if isinstance(a, Prefetch)} >= set(plan.offload)


def test_base_serves_all_gradients_from_two_chunks(alexnet: Graph) -> None:
    s = schedule(alexnet, "base(m)")
    gradients = [a.buffer for a in s.actions if isinstance(a, Alloc)
                 and alexnet.tensors[a.buffer.tensor].role is Role.GRADIENT]  # fmt: skip
    assert len({b.offset for b in gradients}) == 2
    assert {b.nbytes for b in gradients} == {max(alexnet.tensors[b.tensor].nbytes for b in gradients)}
    assert not [a for a in s.actions if isinstance(a, (Offload, Prefetch)) and a.op > 0 and a.buffer.tensor != "loss"]


def test_base_keeps_every_activation_until_the_end(alexnet: Graph) -> None:
    s = schedule(alexnet, "base(m)")
    last = max(at for at, a in enumerate(s.actions) if isinstance(a, Launch))
    freed_early = {b.tensor for a in s.actions[:last] if isinstance(a, Free) for b in a.frees}
    assert {alexnet.tensors[name].role for name in freed_early} == {Role.GRADIENT}
    assert {"features.0.dweight"} <= {b.tensor for b in s.persistent}


def test_keep_frees_at_the_last_use_and_needs_less_than_base(alexnet: Graph) -> None:
    assert schedule(alexnet, "keep(m)").peak_bytes < schedule(alexnet, "base(m)").peak_bytes


def test_modes_without_host_waits_have_no_host_actions_and_end_in_a_barrier(alexnet: Graph) -> None:
    s = schedule(alexnet, "keep(m)")
    assert not [a for a in s.actions if a.lane == "host"]
    lanes = set(s.lanes) - {"host"}
    ends = {a.lane for a in s.actions[-2 * len(lanes) :] if isinstance(a, Wait)}
    assert ends == lanes


def test_without_host_waits_a_copy_out_starts_when_its_source_is_made(alexnet: Graph) -> None:
    plan = Plan("test", stages_by_op(alexnet), offload=("features.0.y",))
    s = lower(alexnet, plan)
    labels = [a.label for a in s.actions]
    assert labels.index("features.0:forward") < labels.index("offload features.0.y")
    assert labels.index("offload features.0.y") < labels.index("features.2:forward")
    assert {a.lane for a in s.actions if isinstance(a, Offload)} == {"d2h"}
    assert {a.lane for a in s.actions if isinstance(a, Prefetch)} == {"h2d"}


def test_a_stage_has_one_workspace_of_the_largest_need(alexnet: Graph) -> None:
    entries = {
        op_key(alexnet, op): (Algorithm("a", 1000 * (i + 1)),)
        for i, op in enumerate(alexnet.ops) if op.function.startswith("conv2d")
    }  # fmt: skip
    s = choose(alexnet, "vdnn:all(p)", Profile("test", entries))
    spaces = [a.buffer for a in s.actions if isinstance(a, Alloc) and a.buffer.tensor.startswith("workspace")]
    needs = [
        max((s.plan.algorithm(op).workspace for op in alexnet.ops[start:stop]), default=0)
        for start, stop in s.plan.stages
    ]
    assert [b.nbytes for b in spaces] == [n for n in needs if n]


def test_g_takes_the_fastest_that_fits_the_budget(alexnet: Graph) -> None:
    entries = {
        op_key(alexnet, op): (Algorithm("fast", 512 * MiB), Algorithm("small", 0))
        for op in alexnet.ops if op.function.startswith("conv2d")
    }  # fmt: skip
    profile = Profile("test", entries)
    floor = choose(alexnet, "vdnn:all(m)", profile).peak_bytes
    tight = choose(alexnet, "vdnn:all(g)", profile, Options(budget=floor))
    assert tight.peak_bytes <= floor
    assert "small" in {a.name for a in tight.plan.algorithms.values()}
    wide = choose(alexnet, "vdnn:all(g)", profile, Options(budget=floor + 512 * MiB))
    assert wide.peak_bytes <= floor + 512 * MiB
    assert "small" not in {a.name for a in wide.plan.algorithms.values()}


def test_figure_5_peaks_of_alexnet_256() -> None:
    """vDNN++, Figure 5: AlexNet(256) all(m) peaks at 435 MiB in forward and 855 MiB in backward."""
    s = schedule(graph_of("alexnet", 256), "vdnn:all(m)")
    assert round(s.pool_bytes / MiB) == 855


@pytest.mark.parametrize(("model", "mib"), [("alexnet", 372.7), ("vgg16", 7350.0)])
def test_pinned_bytes_of_all_at_batch_128(model: str, mib: float) -> None:
    assert schedule(graph_of(model, 128), "vdnn:all(m)").pinned_bytes / MiB == pytest.approx(mib, abs=0.05)


def test_releases_are_delayed_inside_vdnns_own_pool() -> None:
    graph = graph_of("vgg16", 64)
    vdnn, vdnnpp = (schedule(graph, mode) for mode in ("vdnn:all(m)", "vdnn++:all(m)"))
    assert vdnnpp.pool_bytes <= vdnn.pool_bytes
    stages = [start for start, _ in graph_stages(vdnnpp)]
    lags = [
        sum(1 for start in stages if a.op < start <= a.until)
        for a in vdnnpp.actions if isinstance(a, Release) and a.until < graph.forward_ops
    ]  # fmt: skip
    assert all(lag >= 3 for lag in lags), "inside vDNN's peak each release can come 3 layers after its copy-out"


def graph_stages(s: Schedule) -> list[tuple[int, int]]:
    return [stage for stage in s.plan.stages if stage[0] <= s.graph.forward_ops]


def test_results_return_to_the_slot_last(alexnet: Graph) -> None:
    for mode in ("base(m)", "vdnn:all(m)", "vdnn++:all(m)"):
        s = schedule(alexnet, mode)
        copies = [a for a in s.actions if isinstance(a, (Offload, Prefetch))]
        assert copies[-1].label == "offload loss"
        assert copies[-1].host.kind == "slot"


def test_prediction_returns_the_output() -> None:
    net = resolve("smallnet")()
    s = choose(build(net, None, (4, 1, 8, 8)), "keep(m)", Profile("none"))
    (out,) = [a for a in s.actions if isinstance(a, Offload)]
    assert out.buffer.tensor == s.graph.output


def test_lanes_of_the_papers_modes_are_one_compute_and_one_memory_stream(alexnet: Graph) -> None:
    assert set(schedule(alexnet, "vdnn:all(m)").lanes) == {"host", COMPUTE, MEMORY}
    synced = {a.of for a in schedule(alexnet, "vdnn:all(m)").actions if isinstance(a, HostSync)}
    assert synced == {COMPUTE, MEMORY}
