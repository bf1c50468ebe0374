"""Which compressions may turn out cancelled, for the checker: each outcome is walked as a schedule of its own.

The host cancels a tensor's compression where it wants the tensor back, in the place from which it would have been
packed, before any of its parts has begun. Its codec actions then touch nothing, and who waits for its unpacking waits
for its copy-out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from minidnn.schedule.actions import Action, Compress, Decompress, HostRange, PartAction
from minidnn.schedule.order import happens_before

EXHAUSTIVE = 4
"""Of up to so many tensors that can be cancelled, every combination is looked at; of more, none, one, all but one, all.
"""
NOBODY = "cancelled-"
"""How the lanes begin where cancelled actions are put: they wait for nobody's turn."""


def outcomes(actions: Sequence[Action]) -> Iterator[frozenset[str]]:
    """The sets of tensors whose compression is cancelled, none first."""
    names = tuple(_cancellable(actions))
    counts = range(len(names) + 1) if len(names) <= EXHAUSTIVE else (0, 1, len(names) - 1, len(names))
    for count in counts:
        yield from map(frozenset, combinations(names, count))


def in_outcome(actions: Sequence[Action], cancelled: frozenset[str]) -> tuple[Action, ...]:
    """The actions with their order as it is when these compressions are cancelled."""
    copied: dict[str, tuple[int, ...]] = {}
    found: list[Action] = []
    for action in actions:
        if isinstance(action, Compress) and action.host.name in cancelled:
            copied.setdefault(action.host.name, action.waits)
        if isinstance(action, Decompress) and action.host.name in cancelled:
            name = action.host.name
            action = replace(action, lane=NOBODY + name, waits=copied.get(name, ()))
        found.append(action)
    return tuple(found)


def _cancellable(actions: Sequence[Action]) -> Iterator[str]:
    """Tensors that come back in place, and none of whose parts is certainly packed by the time the host decides."""
    packs: dict[str, list[int]] = {}
    unpacks: dict[str, int] = {}
    hosts: dict[str, set[HostRange]] = {}
    for at, action in enumerate(actions):
        if isinstance(action, PartAction):
            hosts.setdefault(action.host.name, set()).add(action.host)
        if isinstance(action, Compress):
            packs.setdefault(action.host.name, []).append(at)
        elif isinstance(action, Decompress):
            unpacks.setdefault(action.host.name, at)
    in_place = frozenset(name for name in unpacks if name in packs and len(hosts[name]) == 1)
    order = happens_before(in_outcome(actions, in_place), 1)
    for name in sorted(in_place):
        if not any(order.before(at, unpacks[name]) for at in packs[name]):
            yield name
