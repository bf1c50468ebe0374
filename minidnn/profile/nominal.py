"""Times where a profile has none: what an H100 would roughly take, so that planners that weigh times run anywhere."""

from __future__ import annotations

from dataclasses import replace

from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.profile import Algorithm, Link, Profile, op_key

NOMINAL = "nominal"
"""The source of a profile with such times."""
FLOPS, BYTES = 50e12, 3e12
"""Arithmetic and memory traffic per second."""
LINK = Link(d2h=55e9, h2d=55e9, latency_ms=0.0)
SLOWER = 0.5
"""A later algorithm in a list takes so much longer than the one before it, as a share of the first one's time."""


def with_times(graph: Graph, profile: Profile) -> Profile:
    """The profile itself where it knows link and times; else the same algorithms and workspaces with nominal times.

    It then says "nominal" as its source. Only the order of such times means anything.
    """
    known = all(a.ms is not None for op in graph.ops for a in profile.algorithms(graph, op))
    if profile.link is not None and known:
        return profile
    entries = {op_key(graph, op): _timed(graph, op, profile) for op in graph.ops}
    return replace(profile, source=NOMINAL, entries=entries, link=profile.link or LINK, launch_ms=0.0, action_ms=0.0)


def _timed(graph: Graph, op: Op, profile: Profile) -> tuple[Algorithm, ...]:
    traffic = sum(graph.tensors[name].nbytes for _, name in op.reads + op.writes)
    ms = 1e3 * max(op.flops / FLOPS, traffic / BYTES)
    ways = profile.algorithms(graph, op)
    return tuple(replace(a, ms=ms * (1 + SLOWER * rank)) for rank, a in enumerate(ways))
