"""vDNN and vDNN++ with a fixed offload set (vDNN++ paper, sections II-B, III-A and IV-A).

Which activations leave, and during whose backward each comes back. The two differ only in what the host waits for:
vDNN at each layer's end for both streams, vDNN++ for the computation alone, copy-outs being freed by release workers.
"""

from __future__ import annotations

from minidnn.arguments import shown
from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan, pick_algorithms, stages_by_layer

OFFLOADED_KINDS = frozenset({"conv", "pool", "avg_pool", "batch_norm", "dropout", "lrn", "activation"})
"""Kinds of layer whose inputs `all` offloads: every one but fully connected layers and the loss."""


def offload_plan(request: Request, offload_set: str, sync: str, rule: str) -> Plan:
    """The plan of one offload set: `all`, `conv`, `aconv`, `none`, or layers named `features.0+features.5`."""
    graph = request.graph
    layers = offloaded_layers(graph, offload_set)
    offload = tuple(dict.fromkeys(graph.layers[i].x for i in layers))
    return Plan(
        str(request.mode), stages_by_layer(graph), pick_algorithms(graph, request.profile, rule), offload,
        prefetch_stages(graph, layers), request.order, sync, rule,
    )  # fmt: skip


def offloaded_layers(graph: Graph, offload_set: str) -> list[int]:
    """Indices of the layers whose input X leaves the device.

    Never of the last layer before the loss, and never an X that backward does not read (it is freed for good at its
    last use in forward). Raises ArgumentError for a layer that does not exist.
    """
    convs = [i for i, layer in enumerate(graph.layers) if layer.kind == "conv"]
    named = {layer.name: i for i, layer in enumerate(graph.layers)}
    if offload_set == "none":
        chosen: list[int] = []
    elif offload_set == "all":
        chosen = [i for i, layer in enumerate(graph.layers) if layer.kind in OFFLOADED_KINDS]
    elif offload_set == "conv":
        chosen = convs
    elif offload_set == "aconv":
        chosen = convs[::2]
    else:
        names = offload_set.split("+")
        unknown = [name for name in names if name not in named]
        if unknown:
            raise ArgumentError(
                f"offload set is {shown(offload_set)}; "
                "it must be all, conv, aconv, none, dyn or layers joined by '+', and "
                f"there is no layer {shown(unknown[0])} that computes (there are {', '.join(list(named)[:6])}, ...)"
            )
        chosen = sorted({named[name] for name in names})
    last = len(graph.layers) - (2 if graph.layers[-1].kind in ("softmax", "mse") else 1)
    return [i for i in chosen if i < last and graph.first_backward_use(graph.layers[i].x) >= 0]


def prefetch_schedule(graph: Graph, offloaded: list[int]) -> list[tuple[int, int]]:
    """Pairs (m, i): X_i comes in during the backward of layer m.

    Once per layer m, from the last before the loss down to 1, scan i = m-1 ... 0: the first X_i that is offloaded and
    not yet taken is it; a convolution in between ends the scan.
    """
    kinds = [layer.kind for layer in graph.layers]
    waiting, pairs = set(offloaded), []
    last = len(kinds) - (2 if kinds[-1] in ("softmax", "mse") else 1)
    for m in range(last, 0, -1):
        for i in range(m - 1, -1, -1):
            if i in waiting:
                waiting.remove(i)
                pairs.append((m, i))
                break
            if kinds[i] == "conv":
                break
    return pairs


def prefetch_stages(graph: Graph, offloaded: list[int]) -> dict[int, tuple[str, ...]]:
    """The schedule above by the first op of the layer's backward stage."""
    starts = {graph.ops[start].layer: start for start, _ in stages_by_layer(graph) if not graph.ops[start].forward}
    stages: dict[int, tuple[str, ...]] = {}
    for m, i in prefetch_schedule(graph, offloaded):
        x = graph.layers[i].x
        needed = graph.first_backward_use(x)
        if m in starts and starts[m] <= needed and graph.tensors[x].role in (Role.ACTIVATION, Role.INPUT):
            stages[starts[m]] = (*stages.get(starts[m], ()), x)
    return stages
