"""What a memory mode is as a value, and what a policy gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Generator
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
    """What a policy gets: the graph, the profile, the mode, the order of allocations in backward, and the bytes of the
    pool (None: as many as it likes). The profile of a planner has times and a link."""

    graph: Graph
    profile: Profile
    mode: Mode
    order: str = "prefetch-first"
    pool: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposed plan: the bytes of its pool once placed, whether it keeps the limits, and, where it
    does and times are known, its predicted ms."""

    pool_bytes: int
    fits: bool
    ms: float | None


Proposals = Generator[Plan, Outcome | None, None]
Policy = Callable[[Request], Proposals]
"""A policy proposes one plan or several; the fastest that fits is taken. It may look at what became of each."""
