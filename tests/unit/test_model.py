"""Modelled profiles: near to what was published and measured, complete, and sorted."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from bench.rows import RESULTS
from minidnn import nn, optim
from minidnn.errors import ArgumentError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.graph.op import Op
from minidnn.profile.gpus import GPUS, Gpu, named_gpu
from minidnn.profile.model import modelled
from minidnn.profile.profile import Algorithm, Profile
from minidnn.profile.published import table1
from minidnn.run.choose import choose
from minidnn.run.simulator import simulate
from minidnn.units import MiB

from .simulated import graph_of

H100_SUMS = {  # ms of VGG-16's 13 convolutions at batch 64: forward, data and filter gradients, cuDNN 9.19
    ("fp32", "NCHW"): (34.8, 23.7, 26.6),
    ("tf32", "NHWC"): (5.8, 5.91, 11.78),
    ("bf16", "NHWC"): (3.29, 2.81, 3.25),
}
DIRECTIONS = ("conv2d_forward", "conv2d_backward_data", "conv2d_backward_filter")
# Layer of VGG-16 (by index of its convolution) -> MB of workspace at batch 64 that cuDNN 9.19 asks for.
NONFUSED_MB = {1: 3700, 2: 1388, 3: 1852, 4: 698, 5: 934, 7: 366, 8: 500, 10: 189}
FFT_TILING_MB = {1: 89, 2: 143, 3: 214, 4: 357, 5: 570, 7: 784, 8: 1426}
MATRIX_NCHW_MB = {1: 1644, 2: 617, 3: 823, 4: 309, 5: 413, 7: 159, 8: 215, 10: 61}


def ways(graph: Graph, profile: Profile, op: Op) -> dict[str, Algorithm]:
    return {a.name: a for a in profile.algorithms(graph, op)}


def milliseconds(algorithm: Algorithm) -> float:
    assert algorithm.ms is not None
    return algorithm.ms


def convolutions(graph: Graph, function: str) -> list[Op]:
    """Convolutions of one direction, first layer first (the first layer has no data gradient: index it from 1)."""
    return sorted((op for op in graph.ops if op.function == function), key=lambda op: op.layer)


# -- the papers


@pytest.mark.parametrize(("kernel", "published"), [(1, 19), (3, 80), (5, 200)])
def test_table_one_convolutions(kernel: int, published: float) -> None:
    """vDNN++, Table I: 112 x 112 x 64, batch 128, memory-optimal algorithm, GTX 1080 Ti."""
    net = nn.Sequential(nn.Conv2d(64, 64, kernel, padding=kernel // 2), nn.Flatten(), nn.Linear(64 * 112 * 112, 2))
    graph = build(net, nn.CrossEntropyLoss(), (128, 64, 112, 112), optimizer=optim.SGD(0.1))
    found = ways(graph, modelled(graph, "gtx1080ti"), graph.ops[0])["implicit_gemm"]
    assert found.workspace == 0
    assert found.ms == pytest.approx(published, rel=0.07)


def test_table_one_pooling_and_transfer() -> None:
    net = nn.Sequential(nn.Conv2d(64, 64, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 56 * 56, 2))
    graph = build(net, nn.CrossEntropyLoss(), (128, 64, 112, 112), optimizer=optim.SGD(0.1))
    profile = modelled(graph, "gtx1080ti")
    assert profile.time_ms(graph, graph.ops[1], "default") == pytest.approx(3, rel=0.07)
    published = table1(graph).link
    assert published is not None
    assert published.ms(128 * 64 * 112 * 112 * 4, to_host=True) == pytest.approx(62, rel=0.01)


def test_the_largest_workspace_of_vgg16_is_what_table_v_adds() -> None:
    """Table V: VGG-16(64) needs 7243 MB with the fastest algorithms and 3715 MB with the least workspace."""
    graph = graph_of("vgg16", 64)
    profile = modelled(graph, "gtx1080ti")
    op = convolutions(graph, "conv2d_backward_filter")[1]
    fastest = profile.algorithms(graph, op)[0]
    assert fastest.name == "winograd_nonfused"
    assert fastest.workspace / MiB == pytest.approx(7243 - 3715, abs=1)


def test_the_published_times_of_table_one_apply_to_table3_at_batch_32() -> None:
    graph = graph_of("table3", 32)
    profile = table1(graph)
    layers = [op for op in graph.ops if op.function in ("conv2d_forward", "max_pool2d_forward")]
    times = [milliseconds(profile.algorithms(graph, op)[0]) for op in layers]
    assert times[1:12] == [19, 200] * 5 + [3]
    assert times[0] < 80  # 3 channels: not in the table, modelled
    assert profile.source == "published: vDNN++ Table I"


def test_table_one_says_nothing_about_other_channels_of_the_same_size() -> None:
    net = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.MaxPool2d(224), nn.Flatten(), nn.Linear(64, 2))
    graph = build(net, nn.CrossEntropyLoss(), (128, 16, 224, 224), optimizer=optim.SGD(0.1))
    assert table1(graph).algorithms(graph, graph.ops[0]) == modelled(graph, "gtx1080ti").algorithms(graph, graph.ops[0])


# -- measured on an H100


@pytest.mark.parametrize(("precision", "layout"), list(H100_SUMS))
def test_vgg16_on_an_h100(precision: str, layout: str) -> None:
    graph = graph_of("vgg16", 64, Target("native" if layout == "NHWC" else "paper", precision, layout))
    profile = modelled(graph, "h100")
    sums = [sum(milliseconds(profile.algorithms(graph, op)[0]) for op in convolutions(graph, f)) for f in DIRECTIONS]
    assert sum(sums) == pytest.approx(sum(H100_SUMS[precision, layout]), rel=0.07)


def test_small_workspaces_cost_as_much_as_measured_on_an_h100() -> None:
    """fp32: 174 ms with at most 16 MB of workspace."""
    graph = graph_of("vgg16", 64)
    profile = modelled(graph, "h100")
    total = sum(
        min(milliseconds(a) for a in profile.algorithms(graph, op) if a.workspace <= 16e6)
        for function in DIRECTIONS
        for op in convolutions(graph, function)
    )
    assert total == pytest.approx(174, rel=0.1)


@pytest.mark.parametrize(
    ("precision", "function", "algorithm", "measured"),
    [
        ("fp32", "conv2d_backward_filter", "winograd_nonfused", NONFUSED_MB),
        ("fp32", "conv2d_backward_data", "fft_tiling", FFT_TILING_MB),
        ("tf32", "conv2d_backward_data", "matrix_gemm", MATRIX_NCHW_MB),
    ],
)
def test_workspaces_are_cudnns(precision: str, function: str, algorithm: str, measured: dict[int, float]) -> None:
    graph = graph_of("vgg16", 64, Target(precision=precision))
    profile = modelled(graph, "h100")
    ops = convolutions(graph, function)
    first = 0 if len(ops) == 13 else 1
    for layer, megabytes in measured.items():
        found = ways(graph, profile, ops[layer - first])[algorithm].workspace
        assert found / 1e6 == pytest.approx(megabytes, rel=0.01, abs=0.6)


# -- all GPUs


@pytest.fixture(scope="module")
def everything() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.LocalResponseNorm(5),
        nn.Conv2d(8, 16, 5, padding=2, groups=2), nn.LeakyReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize(
    "target",
    [Target(), Target("native", "bf16", "NHWC"), Target("native", "tf32", "NHWC"), Target("native", "tf32", "NCHW")],
    ids=lambda target: f"{target.name}-{target.precision}-{target.layout}",
)
def test_every_op_has_times_fastest_first_and_a_way_without_workspace(
    everything: nn.Sequential, gpu: str, target: Target
) -> None:
    graph = build(everything, nn.CrossEntropyLoss(), (4, 3, 64, 64), target, optimizer=optim.Adam())
    profile = modelled(graph, gpu)
    assert profile.source == f"modelled {GPUS[gpu].title}"
    for op in graph.ops:
        found = profile.algorithms(graph, op)
        times = [milliseconds(a) for a in found]
        assert times == sorted(times)
        assert times[0] > 0
        assert min(a.workspace for a in found) == 0
        assert len({a.name for a in found}) == len(found)


def test_transforms_serve_dense_convolutions_alone(everything: nn.Sequential) -> None:
    graph = build(everything, nn.CrossEntropyLoss(), (4, 3, 64, 64), optimizer=optim.SGD(0.1))
    profile = modelled(graph, "gtx1080ti")
    strided, grouped, dense, dilated = (ways(graph, profile, op) for op in convolutions(graph, "conv2d_forward"))
    transforms = {"fft", "fft_tiling", "winograd", "winograd_nonfused"}
    assert transforms <= dense.keys()
    for other in (strided, grouped, dilated):
        assert not transforms & other.keys()


def test_precisions_without_matrix_units_run_at_the_fp32_rate() -> None:
    targets = (Target("native"), Target("native", "tf32"), Target("native", "bf16", "NHWC"))
    graphs = [graph_of("alexnet", 64, target) for target in targets]
    second = [convolutions(graph, "conv2d_forward")[1] for graph in graphs]
    for gpu in ("gtx1080ti", "v100"):
        found = [ways(graph, modelled(graph, gpu), op) for graph, op in zip(graphs, second, strict=True)]
        assert len({algorithms["implicit_gemm"].ms for algorithms in found}) == 1
        assert not any("matrix_gemm" in algorithms for algorithms in found)
    tf32 = ways(graphs[1], modelled(graphs[1], "a100"), second[1])
    assert milliseconds(tf32["matrix_gemm"]) < milliseconds(tf32["implicit_gemm"]) / 3


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_number_has_a_source(gpu: Gpu) -> None:
    assert set(gpu.sources) == {f.name for f in fields(gpu)} - {"name", "title", "generation", "sources"}
    assert all(gpu.sources.values())
    assert gpu.rate("fp32") == gpu.peak["fp32"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("gpu", "card"), [("h100", "NVIDIA-H100-80GB-HBM3"), ("h200", "NVIDIA-H200")])
def test_vgg16_on_a_modelled_card_takes_what_it_took_on_the_card(gpu: str, card: str, precision: str) -> None:
    """In the layout that the card ran it in."""
    rows = json.loads((RESULTS / f"modes-{card}.json").read_text(encoding="utf-8"))["rows"]
    graph = graph_of("vgg16", 256, Target.on_cuda("native", precision))
    profile = modelled(graph, gpu)
    ms = simulate(choose(graph, "base(p)", profile), profile).iteration_ms
    assert ms == pytest.approx(rows[f"vgg16:256 {precision} native: base(p)"]["ms"], rel=0.08)


def test_larger_cards_are_faster() -> None:
    graph = graph_of("vgg16", 64)
    times = {
        name: sum(milliseconds(p.algorithms(graph, op)[0]) for op in graph.ops)
        for name, p in ((name, modelled(graph, name)) for name in GPUS)
    }
    order = ("gtx970", "gtx1080ti", "v100", "a100", "h100", "h200")
    assert [times[name] for name in order] == sorted((times[name] for name in order), reverse=True)


def test_unknown_gpus_and_fp64_are_refused() -> None:
    with pytest.raises(ArgumentError, match="gpu is 'gtx9000'; it must be one of gtx970, gtx1080ti, k40"):
        named_gpu("gtx9000")
    with pytest.raises(ArgumentError, match="precision is 'fp64'"):
        modelled(graph_of("smallnet", 2, Target(precision="fp64")), "h100")
