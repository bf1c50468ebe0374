"""The grammar of memory modes: `base | keep | vdnn | vdnn++ [:SET][(p|m|g)]`, or a planner's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph
from minidnn.plan.plan import Plan
from minidnn.profile.profile import Profile

_GRAMMAR = re.compile(r"(?P<family>[a-z][a-z0-9+-]*)(:(?P<set>[^()]+))?(\((?P<rule>[pmg])\))?")


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


def policies() -> dict[str, Policy]:
    """Name of a mode's family -> its policy. A new memory mode is one file and one line here."""
    from minidnn.plan.dynamic import vdnn_family
    from minidnn.plan.keep_all import base, keep

    return {"base": base, "keep": keep, "vdnn": vdnn_family("both"), "vdnn++": vdnn_family("compute")}


def parse_mode(text: str) -> Mode:
    """Parse a mode such as `vdnn++:conv(p)`. Raises ArgumentError that shows the grammar."""
    known = policies()
    match = _GRAMMAR.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match["family"] not in known:
        raise ArgumentError(
            f"memory mode is {text!r}; write one of {', '.join(known)}, with an offload set for vdnn and vdnn++ "
            "(all, conv, aconv, none, dyn or layer+layer) and (p), (m) or (g), such as 'vdnn++:conv(p)'"
        )
    family, offload_set = match["family"], match["set"]
    if offload_set is not None and not family.startswith("vdnn"):
        raise ArgumentError(f"memory mode is {text!r}; {family} takes no offload set")
    if offload_set is None and family.startswith("vdnn"):
        offload_set = "dyn"
    return Mode(text.strip(), family, offload_set, match["rule"] or "p")
