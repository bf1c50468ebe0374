"""Which X leaves and when each comes back: the rules of the vDNN papers, on the papers' networks."""

from __future__ import annotations

import pytest

from minidnn import nn, optim
from minidnn.errors import ArgumentError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.models import resolve
from minidnn.plan.mode import Request
from minidnn.plan.plan import stages_by_layer
from minidnn.plan.registry import POLICIES, parse_mode
from minidnn.plan.vdnn import offloaded_layers, prefetch_schedule, prefetch_stages
from minidnn.profile.profile import Algorithm, Profile, op_key


def graph_of(model: str, batch: int = 2, target: Target = Target()) -> Graph:
    net = resolve(model)()
    assert net.input_shape is not None
    return build(net, nn.CrossEntropyLoss(), (batch, *net.input_shape), target, optimizer=optim.SGD(0.1))


@pytest.fixture(scope="module")
def alexnet() -> Graph:
    return graph_of("alexnet")


def test_layers_are_numbered_as_in_the_paper(alexnet: Graph) -> None:
    kinds = "conv pool conv pool conv conv conv pool fc fc fc softmax"
    assert " ".join(layer.kind for layer in alexnet.layers) == kinds
    assert [layer.index for layer in alexnet.layers] == list(range(12))


@pytest.mark.parametrize(
    ("offload_set", "pairs"),
    [
        ("all", "10->7 9->6 6->5 5->4 4->3 3->2 2->1 1->0"),
        ("conv", "10->6 6->5 5->4 4->2 2->0"),
        ("aconv", "10->6 5->4 2->0"),
        ("none", ""),
    ],
)
def test_prefetch_schedule_of_alexnet(alexnet: Graph, offload_set: str, pairs: str) -> None:
    found = prefetch_schedule(alexnet, offloaded_layers(alexnet, offload_set))
    assert " ".join(f"{m}->{i}" for m, i in found) == pairs


def test_named_layers_are_offloaded(alexnet: Graph) -> None:
    assert offloaded_layers(alexnet, "features.3+features.0") == [0, 2]


def test_an_unknown_layer_is_refused_with_the_ones_that_exist(alexnet: Graph) -> None:
    with pytest.raises(ArgumentError, match=r"no layer 'features.1'.*features.0, features.2"):
        offloaded_layers(alexnet, "features.1")


def test_the_last_layer_before_the_loss_keeps_its_input() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten())
    graph = build(net, nn.MSELoss(), (1, 1, 7, 7), optimizer=optim.SGD(0.1))
    assert offloaded_layers(graph, "all") == [0, 1]


def test_what_backward_does_not_read_is_not_offloaded() -> None:
    native = graph_of("vgg11", target=Target("native"))
    pools = [i for i, layer in enumerate(native.layers) if layer.kind == "pool"]
    assert not set(pools) & set(offloaded_layers(native, "all")), "the index replaces X"
    assert set(pools) <= set(offloaded_layers(graph_of("vgg11"), "all"))


def test_vgg_alternates_convolutions_in_aconv() -> None:
    graph = graph_of("vgg16")
    convs = [i for i, layer in enumerate(graph.layers) if layer.kind == "conv"]
    assert offloaded_layers(graph, "aconv") == convs[::2]
    assert offloaded_layers(graph, "conv") == convs


def test_prefetch_starts_in_the_named_layers_backward_stage(alexnet: Graph) -> None:
    stages = prefetch_stages(alexnet, offloaded_layers(alexnet, "conv"))
    by_layer = {alexnet.ops[start].layer: names for start, names in stages.items()}
    assert by_layer == {
        m: (alexnet.layers[i].x,) for m, i in prefetch_schedule(alexnet, offloaded_layers(alexnet, "conv"))
    }
    assert all(not alexnet.ops[start].forward for start in stages)


def test_stages_cover_all_ops_in_order(alexnet: Graph) -> None:
    stages = stages_by_layer(alexnet)
    assert [i for start, stop in stages for i in range(start, stop)] == list(range(len(alexnet.ops)))
    assert len(stages) == 24


@pytest.mark.parametrize("text", ["vdnn:all(m)", "vdnn++:conv(p)", "base", "keep(g)", "vdnn", "vdnn++:a.0+b.1(m)"])
def test_modes_parse_and_repeat_their_text(text: str) -> None:
    assert str(parse_mode(text)) == text


def test_mode_defaults() -> None:
    assert parse_mode("base").rule == "p"
    assert parse_mode("vdnn").offload_set == "dyn"


@pytest.mark.parametrize("text", ["", "vdnm:all", "vdnn:all(x)", "base:all", "vdnn:(p)", "vdnn:all(p)x", "VDNN"])
def test_a_wrong_mode_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ArgumentError, match="memory mode is"):
        parse_mode(text)


def test_algorithms_by_rule(alexnet: Graph) -> None:
    op = next(op for op in alexnet.ops if op.function == "conv2d_forward")
    ways = (Algorithm("fast", 1000, 1.0), Algorithm("middle", 10, 2.0), Algorithm("small", 0, 3.0))
    profile = Profile("test", {op_key(alexnet, op): ways})
    for rule, name in (("p", "fast"), ("m", "small")):
        request = Request(alexnet, profile, parse_mode(f"vdnn:all({rule})"))
        (plan,) = POLICIES["vdnn"](request)
        assert plan.algorithm(op).name == name


def test_dyn_yields_the_papers_candidates_in_order(alexnet: Graph) -> None:
    plans = list(POLICIES["vdnn++"](Request(alexnet, Profile("test"), parse_mode("vdnn++:dyn"))))
    assert [plan.rule for plan in plans] == ["p", *"ppp", *"ggg", *"mmm"]
    assert plans[0].offload == ()
    assert all(plan.sync == "compute" for plan in plans)
