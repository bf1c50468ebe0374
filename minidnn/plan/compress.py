"""Which offloaded tensors to compress: none, all, or those whose saving is worth the codec's time (vDNN++, III-C).

The paper compresses every offloaded layer and counts zeros first only where it must, because that costs as much as
compressing. `auto` looks at a sample of the values instead, now and then, and keeps to what it has chosen unless there
is a clear reason to change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from minidnn.codec import estimate_nbytes
from minidnn.codec.rates import MEASURED, CodecRates
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import ITEM_BYTES
from minidnn.plan.plan import Plan

COMPRESSION = ("off", "all", "auto")
TYPICAL = 0.5
"""Density assumed of a tensor whose own is not known."""
WORTH = 1e9
"""Bytes that a second of one core must save: with the measured rates, tensors of a density up to about 0.75 do."""
MARGIN = 0.05
"""By how much a tensor that is not compressed yet must be less dense than that, so that none goes to and fro."""


def word_bytes(item_bytes: int) -> int:
    """Bytes of the words that the codec sees in elements of that size; 0 where it cannot pack them."""
    return 2 if item_bytes == 2 else 4 if item_bytes % 4 == 0 else 0


def compressible(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The offloaded tensors that can be compressed: all but the batch, which stays where the host has it."""
    tensors = [graph.tensors[name] for name in plan.offload if graph.first_backward_use(name) >= 0]
    return tuple(t.name for t in tensors if t.name not in graph.on_host and word_bytes(ITEM_BYTES[t.dtype]))


def compressed(
    graph: Graph, plan: Plan, policy: str | tuple[str, ...], density: Mapping[str, float] | None = None,
    before: Collection[str] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The tensors that a policy compresses: "off", "all", "auto", or tensors by name.

    `density` (by tensor, 0 to 1) is what is known; `before` what `auto` compressed until now (None: it begins). `auto`
    leaves out the last `plan.slots` tensors: nobody needs their places in the slab before they come back.
    """
    names = compressible(graph, plan)
    if policy == "off":
        return ()
    if policy == "all":
        return names
    if policy != "auto":
        return tuple(name for name in names if name in policy)
    known = density or {}
    chosen = []
    for name in names[: max(len(names) - plan.slots, 0)]:
        share = known.get(name, TYPICAL) + (0.0 if before is None or name in before else MARGIN)
        if saved_per_second(graph, name, share) >= WORTH:
            chosen.append(name)
    return tuple(chosen)


def packed_bytes(graph: Graph, name: str, density: float, parts: int) -> int:
    """Bytes that a tensor is expected to occupy when it is packed."""
    tensor = graph.tensors[name]
    word = word_bytes(ITEM_BYTES[tensor.dtype])
    return estimate_nbytes(tensor.nbytes, density, itemsize=word, parts=parts)


def ratio_of(raw_bytes: int, packed: int) -> float:
    """How many times smaller something got."""
    return raw_bytes / packed if packed else float("inf")


def report(graph: Graph, tensors: Mapping[str, tuple[int, int, float]]) -> dict[str, Any]:
    """What JSON says of compressed tensors, given their bytes before and after and their densities: mean density (by
    bytes), ratio, and the same for each with the layer that reads it. None where there are none."""
    readers = {layer.x: layer.name for layer in graph.layers}
    rows = [
        {
            "tensor": name, "layer": readers.get(name), "raw_bytes": raw, "packed_bytes": packed, "density": share,
            "ratio": ratio_of(raw, packed),
        }
        for name, (raw, packed, share) in tensors.items()
    ]  # fmt: skip
    total, packed = sum(raw for raw, _, _ in tensors.values()), sum(packed for _, packed, _ in tensors.values())
    mean = sum(raw * share for raw, _, share in tensors.values()) / total if total else None
    return {"density": mean, "ratio": ratio_of(total, packed) if total else None, "compressed": rows}


def predicted(graph: Graph, plan: Plan, density: Mapping[str, float]) -> dict[str, Any]:
    """`report` of what a plan compresses, by densities (TYPICAL where one is not known), and "packed_bytes" in all."""
    shares = {name: density.get(name, TYPICAL) for name in plan.compress}
    sizes = {name: packed_bytes(graph, name, share, plan.codecs) for name, share in shares.items()}
    found = report(graph, {name: (graph.tensors[name].nbytes, sizes[name], shares[name]) for name in plan.compress})
    return {"packed_bytes": sum(sizes.values()) if sizes else None, **found}


def saved_per_second(graph: Graph, name: str, density: float, rates: CodecRates = MEASURED) -> float:
    """Bytes of host memory saved per second of a core that packs and unpacks the tensor."""
    nbytes = graph.tensors[name].nbytes
    ms = rates.pack_ms(nbytes, density) + rates.unpack_ms(nbytes, density)
    return (nbytes - packed_bytes(graph, name, density, 1)) / ms * 1e3
