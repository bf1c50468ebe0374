"""What a memory mode is as a value, and what a policy gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minidnn.graph.graph import Graph
from minidnn.plan.plan import Plan
from minidnn.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Mode:
    """A memory mode as typed: its family (a policy's name), offload set and algorithm rule."""

    text: str
    family: str
    offload_set: str | None
    rule: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy gets: the graph, the profile, the mode and the order of allocations in backward."""

    graph: Graph
    profile: Profile
    mode: Mode
    order: str = "prefetch-first"


Policy = Callable[[Request], Iterator[Plan]]
"""A policy yields one plan or several candidates; the fastest that fits is taken."""
