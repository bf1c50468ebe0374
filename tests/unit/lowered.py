"""Lowered schedules of small networks in every memory mode, for the checker's tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.nn.loss import Loss
from minidnn.plan.compress import compressible
from minidnn.plan.mode import Request
from minidnn.plan.plan import ORDERS
from minidnn.plan.registry import parse_mode
from minidnn.plan.vdnn import offload_plan
from minidnn.profile.profile import Algorithm, Profile, op_key
from minidnn.run.choose import Options, choose, schedule_of
from minidnn.schedule.actions import PartAction, Schedule
from minidnn.schedule.lower import lower

SETS = ("all", "conv", "aconv", "none")
SLOTS, CODECS = 2, 3
"""Of schedules that compress: few, so that parts and tensors wait for each other."""
WAYS = (Algorithm("fast", 40_000), Algorithm("small", 3_000), Algorithm("zero", 0))


def tiny() -> nn.Sequential:
    """Two convolutions and a pool: all that offloading needs."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 5),
    )  # fmt: skip


def plain() -> nn.Sequential:
    """A small VGG."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip


def normed() -> nn.Sequential:
    """Batch-norm with running statistics, average pools."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip


def mixed() -> nn.Sequential:
    """LRN, dropout, activations that nothing fuses."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2), nn.Conv2d(8, 8, 3),
        nn.Tanh(), nn.Dropout(0.3), nn.Conv2d(8, 8, 1), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(200, 16), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(16, 5),
    )  # fmt: skip


NETWORKS = {"tiny": tiny, "plain": plain, "normed": normed, "mixed": mixed}
TARGETS = {
    "paper": Target(), "native": Target("native"), "native-bf16-nhwc": Target("native", "bf16", "NHWC"),
    "paper-bf16": Target("paper", "bf16"),
}  # fmt: skip
PURPOSES = ("train", "adam", "mse", "clip", "first-micro", "middle-micro", "last-micro", "evaluate", "predict")


def graph_of(network: str, target: str = "paper", purpose: str = "train") -> Graph:
    """The graph of 4 images of 16 x 16 for a purpose."""
    loss: Loss | None = nn.MSELoss() if purpose == "mse" else nn.CrossEntropyLoss(weight=[1, 2, 1, 1, 1])
    if purpose == "predict":
        loss = None
    optimizer = None if purpose in ("evaluate", "predict") else optim.SGD(0.1, momentum=0.9)
    update = {"clip": "at-end", "first-micro": "none", "middle-micro": "none", "last-micro": "at-end"}
    return build(
        NETWORKS[network](), loss, (4, 3, 16, 16), TARGETS[target],
        optimizer=optim.Adam() if purpose == "adam" else optimizer, update=update.get(purpose, "per-layer"),
        accumulate=purpose in ("middle-micro", "last-micro"), max_norm=1.0 if purpose == "clip" else None,
    )  # fmt: skip


def profile_of(graph: Graph) -> Profile:
    """Every convolution has three algorithms."""
    convolutions = [op for op in graph.ops if op.function.startswith("conv2d")]
    return Profile("test", {op_key(graph, op): WAYS for op in convolutions})


def lowered(
    graph: Graph, mode: str, order: str = ORDERS[0], fit: str | None = None, placement: str = "planned"
) -> Schedule:
    """The schedule of a mode; the mode `no-wait:SET` offloads with streams and events alone."""
    profile, options = profile_of(graph), Options(order, fit, placement)
    if not mode.startswith("no-wait:"):
        return choose(graph, mode, profile, options)
    typed = parse_mode(mode.replace("no-wait", "vdnn"))
    assert typed.offload_set is not None
    plan = offload_plan(Request(graph, profile, typed, order), typed.offload_set, "none", typed.rule)
    return schedule_of(graph, plan, profile, options)


def modes(graph: Graph, rule: str) -> Iterator[str]:
    """All modes with the fastest algorithms (rule `p`) or the smallest (`m`); an offload set of named layers too."""
    layers = [layer.name for layer in graph.layers]
    yield f"base({rule})"
    yield f"keep({rule})"
    for family in ("vdnn", "vdnn++", "no-wait"):
        for chosen in (*SETS, f"{layers[1]}+{layers[2]}"):
            yield f"{family}:{chosen}({rule})"


def compressing(
    network: str = "plain", mode: str = "vdnn++:all(m)", target: str = "paper", names: tuple[str, ...] | None = None
) -> Schedule:
    """A schedule that compresses everything (or `names`) with few workers and slots."""
    graph = graph_of(network, target)
    plan = lowered(graph, mode).plan
    chosen = compressible(graph, plan) if names is None else names
    return lower(graph, replace(plan, compress=chosen, slots=SLOTS, codecs=CODECS))


def in_place(s: Schedule) -> set[str]:
    """Tensors that are unpacked to where they were packed from."""
    hosts: dict[str, set[object]] = {}
    for a in s.actions:
        if isinstance(a, PartAction):
            hosts.setdefault(a.host.name, set()).add(a.host)
    return {name for name, places in hosts.items() if len(places) == 1}
