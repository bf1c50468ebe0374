"""Published times as profiles."""

from __future__ import annotations

from collections.abc import Mapping

from minidnn.graph.graph import Graph
from minidnn.profile.model import modelled
from minidnn.profile.profile import Algorithm, Link, Profile, op_key

TABLE1_MS: Mapping[tuple[str, int], float] = {
    ("conv", 1): 19.0, ("conv", 3): 80.0, ("conv", 5): 200.0, ("pool", 0): 3.0,
}  # fmt: skip
"""vDNN++, Table I: layer and kernel size -> ms for 64 channels, memory-optimal algorithm, GTX 1080 Ti."""
TABLE1_ELEMENTS = 128 * 64 * 112 * 112
TABLE1_LINK = Link(d2h=TABLE1_ELEMENTS * 4 / 62e-3, h2d=TABLE1_ELEMENTS * 4 / 62e-3)
"""411 MB in 62 ms: 6.63 GB/s. Table IV of the same paper cannot have run on such a link: VGG-116(32) conv(p) copies
17 GB each way in 3.0 s, more than 11 GB/s, which is what a PCIe 3.0 slot gives; elsewhere the card has that rate."""


def table1(graph: Graph) -> Profile:
    """Table I's times for every convolution and pooling over an X of its channels and size, as in table3 at batch 32.

    The table has one time for each kind of layer; here each direction takes it (forward, data and filter gradients
    have the same arithmetic). What the table does not have is modelled for the same card.
    """
    profile = modelled(graph, "gtx1080ti")
    entries = dict(profile.entries)
    for op in graph.ops:
        tensors = {argument.removeprefix("d"): graph.tensors[name] for argument, name in op.bindings}
        x = tensors.get("x")
        if x is None or len(x.shape) != 4 or x.shape[1] != 64 or x.size != TABLE1_ELEMENTS:
            continue
        kind = "conv" if op.function.startswith("conv2d_") else "pool" if "max_pool2d_" in op.function else ""
        ms = TABLE1_MS.get((kind, tensors["w"].shape[2] if kind == "conv" else 0))
        if ms is not None:
            name = "implicit_gemm" if kind == "conv" else "default"
            entries[op_key(graph, op)] = (Algorithm(name, 0, ms),)
    return Profile("published: vDNN++ Table I", entries, TABLE1_LINK)
