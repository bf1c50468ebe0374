"""The host emulator's profile: which algorithms its convolutions have and what workspace each takes. No times: it is an
emulator, and how long NumPy takes says nothing about a GPU."""

from __future__ import annotations

from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.profile import Algorithm, Profile, op_key


def host_profile(graph: Graph) -> Profile:
    """Algorithms of the graph's convolutions on the host, most workspace (and fastest) first."""
    entries = {}
    for op in graph.ops:
        ways = _algorithms(graph, op)
        if ways:
            entries[op_key(graph, op)] = ways
    return Profile("host", entries)


def _algorithms(graph: Graph, op: Op) -> tuple[Algorithm, ...]:
    from minidnn.ops.numpy_ops import ALGORITHMS, workspace_bytes

    names = ALGORITHMS.get(op.function, ())
    if not names:
        return ()
    tensors = {argument: graph.tensors[name] for argument, name in op.bindings}
    x, w, y = (
        next(tensors[argument] for argument in options if argument in tensors)
        for options in (("x", "dx"), ("w", "dw"), ("y", "dy"))
    )
    attributes = {k: v for k, v in op.attributes if k in ("stride", "padding", "dilation", "groups")}
    itemsize = 8 if x.dtype == "float64" else 4  # bf16 is computed in float32
    return tuple(
        Algorithm(
            name,
            workspace_bytes(
                op.function, name, x_shape=x.shape, w_shape=w.shape, y_shape=y.shape, itemsize=itemsize, **attributes
            ),
        )
        for name in names
    )
