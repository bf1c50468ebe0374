"""`base` and `keep`: nothing leaves the device.

`base` is the reference of the vDNN papers (vDNN++ section II-B): all outputs, weights and gradients stay; two chunks,
each as large as the largest dX / dY, serve all of them in turn. The native target keeps no output that backward does
not read, and no gradient of weights that have been updated. `keep` frees every buffer at its last use. In both the
native target lets the next batch come early into the place of this one, which stays.
"""

from __future__ import annotations

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role, Tensor
from minidnn.plan.mode import Proposals, Request
from minidnn.plan.plan import Plan, pick_algorithms, stages_by_op


def base(request: Request) -> Proposals:
    """Everything stays; gradients of activations alternate between two chunks of equal size."""
    graph = request.graph
    gradients = [t for t in graph.tensors.values() if t.role is Role.GRADIENT and not t.name.endswith("@micro")]
    chunk = max((t.nbytes for t in gradients), default=0)
    native = graph.target.name == "native"
    passing = [t for t in graph.tensors.values() if native and _passes(graph, t)]
    yield Plan(
        str(request.mode), stages_by_op(graph), pick_algorithms(graph, request.profile, request.mode.rule),
        rule=request.mode.rule, lifetime="iteration",
        reserve={t.name: t.nbytes for t in passing} | {t.name: chunk for t in gradients},
        early=graph.target.early_batch,
    )  # fmt: skip


def _passes(graph: Graph, t: Tensor) -> bool:
    """Whether a tensor need not stay: it is the gradient of a weight that is updated at once, or made and read in
    forward alone, as the output of a convolution behind which a pooling keeps its index."""
    made = graph.first_write[t.name] >= 0 and not graph.is_persistent(t.name)
    return made and (t.role is Role.WEIGHT_GRADIENT or graph.first_backward_use(t.name) < 0)


def keep(request: Request) -> Proposals:
    """Nothing is offloaded, everything is freed at its last use."""
    graph = request.graph
    rule = request.mode.rule
    yield Plan(
        str(request.mode), stages_by_op(graph), pick_algorithms(graph, request.profile, rule), rule=rule,
        early=graph.target.early_batch,
    )  # fmt: skip
