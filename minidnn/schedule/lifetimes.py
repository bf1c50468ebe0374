"""From actions to lifetimes: when each buffer begins and ends, counted in actions. Placement and pools read these.

A free behind a copy-out has a virtual place: it counts from the first allocation of the op that it names (`until`), or
from the point where the host waits for all releases. An allocation over a release that is not done waits for it by
name, so the order here need not be the order in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.memory.place import Interval
from minidnn.memory.trace import KEPT, OFFLOADED, Allocate, Trace
from minidnn.memory.trace import Free as TraceFree
from minidnn.plan.plan import Plan
from minidnn.schedule.actions import Action, Alloc, AwaitReleases, Buffer, Free


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the pool: `buffer` begins (`begins`) or ends at action number `at`."""

    at: int
    buffer: Buffer
    begins: bool


def changes(actions: Sequence[Action]) -> Iterator[Change]:
    """Every allocation and free of an iteration in the order in which the pool counts them."""
    pending: list[tuple[int, Buffer]] = []
    for at, action in enumerate(actions):
        due = isinstance(action, AwaitReleases)
        if pending and (due or isinstance(action, Alloc)):
            for until, buffer in pending:
                if due or action.op >= until:
                    yield Change(at, buffer, False)
            pending = [] if due else [(until, b) for until, b in pending if action.op < until]
        if isinstance(action, Alloc):
            yield Change(at, action.buffer, True)
        elif isinstance(action, Free) and action.until >= 0:
            pending.extend((action.until, b) for b in action.frees)
        elif isinstance(action, Free):
            for buffer in action.frees:
                yield Change(at, buffer, False)
    for _, buffer in pending:
        yield Change(len(actions), buffer, False)


def lifetimes(actions: Sequence[Action]) -> list[Interval]:
    """Each buffer of the pool as an interval [start, end) in actions, in order of allocation."""
    begun: dict[str, tuple[int, int]] = {}
    found: dict[str, Interval] = {}
    for change in changes(actions):
        key = change.buffer.key
        if change.begins:
            begun[key] = (change.at, change.buffer.nbytes)
            found[key] = Interval(key, change.buffer.nbytes, change.at, len(actions) + 1)
        else:
            start, nbytes = begun[key]
            found[key] = Interval(key, nbytes, start, change.at)
    return list(found.values())


def pool_role(graph: Graph, plan: Plan, buffer: Buffer) -> str:
    """What the buffer is to a fit heuristic or a plot: kept or offloaded activation, prefetched, gradient, ..."""
    tensor = graph.tensors.get(buffer.tensor)
    if tensor is None:
        return Role.WORKSPACE.value
    if tensor.role not in (Role.ACTIVATION, Role.INPUT):
        return str(tensor.role.value)
    if buffer.instance > 0:
        return "prefetched"
    return OFFLOADED if buffer.tensor in plan.offload else KEPT


def trace(graph: Graph, plan: Plan, actions: Sequence[Action]) -> Trace:
    """The allocation trace of an iteration, for pools to replay."""
    events: list[Allocate | TraceFree] = []
    for change in changes(actions):
        op = actions[min(change.at, len(actions) - 1)].op
        position = graph.ops[op].name if 0 <= op < len(graph.ops) else ""
        if change.begins:
            role = pool_role(graph, plan, change.buffer)
            events.append(Allocate(change.buffer.key, change.buffer.nbytes, role, position))
        else:
            events.append(TraceFree(change.buffer.key, position))
    return tuple(events)
