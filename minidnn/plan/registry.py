"""The registry of policies, and the grammar of memory modes: `base | keep | vdnn | vdnn++ [:SET][(p|m|g)]`
or a planner's name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from minidnn.arguments import shown
from minidnn.errors import ArgumentError
from minidnn.plan.autoswap import autoswap
from minidnn.plan.best import best
from minidnn.plan.dynamic import vdnn_family
from minidnn.plan.dynprog import dynprog
from minidnn.plan.greedy import greedy
from minidnn.plan.keep_all import base, keep
from minidnn.plan.mode import Mode, Policy
from minidnn.plan.tflms import tflms
from minidnn.plan.thresholds import thresholds

_GRAMMAR = re.compile(r"(?P<family>[a-z][a-z0-9+-]*)(:(?P<set>[^()]+))?(\((?P<rule>[pmg])\))?")

POLICIES: Mapping[str, Policy] = {
    "base": base,
    "keep": keep,
    "vdnn": vdnn_family("both"),
    "vdnn++": vdnn_family("compute"),
    "greedy": greedy,
    "dynprog": dynprog,
    "vdnn-threshold": thresholds,
    "autoswap": autoswap,
    "tflms": tflms,
    "best": best,
}
"""Name of a mode's family -> its policy. A new memory mode is one file and one line here."""
FIXED_SETS = frozenset({"vdnn", "vdnn++"})
"""Families that take an offload set."""
PLANNERS = frozenset({"greedy", "dynprog", "vdnn-threshold", "autoswap", "tflms", "best"})
"""Policies that plan for a budget, by predicted times. Their rule is `g` unless one is typed."""


def parse_mode(text: str) -> Mode:
    """Parse a mode such as `vdnn++:conv(p)`. Raises ArgumentError that shows the grammar."""
    match = _GRAMMAR.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match["family"] not in POLICIES:
        raise ArgumentError(
            f"memory mode is {shown(text)}; write one of {', '.join(POLICIES)}, with an offload set for vdnn and "
            "vdnn++ (all, conv, aconv, none, dyn or layer+layer) and (p), (m) or (g), such as 'vdnn++:conv(p)'"
        )
    family, offload_set = match["family"], match["set"]
    if offload_set is not None and family not in FIXED_SETS:
        raise ArgumentError(f"memory mode is {text!r}; {family} takes no offload set")
    if offload_set is None and family in FIXED_SETS:
        offload_set = "dyn"
    return Mode(text.strip(), family, offload_set, match["rule"] or ("g" if family in PLANNERS else "p"))
