"""What a plan decides, activation by activation, and why: for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from minidnn.memory.trace import GRANULARITY
from minidnn.plan.outline import Outline, layers_of
from minidnn.profile.profile import Profile
from minidnn.schedule.actions import Schedule
from minidnn.units import format_size, round_up


@dataclass(frozen=True, slots=True)
class Decision:
    """One tensor that backward reads again. Ops by name; None where it stays.

    Made by `made` (None: it comes from the host). `copied_after` is the op that makes the copy's source complete,
    `gone_before` the op whose buffers may take its bytes, `back_before` the op before which its copy-in is issued,
    `needed` the op that reads it.
    """

    tensor: str
    nbytes: int
    offloaded: bool
    copied_after: str | None
    gone_before: str | None
    back_before: str | None
    needed: str
    why: str

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def decisions(schedule: Schedule, profile: Profile, pool: int) -> Iterator[Decision]:
    """Every movable tensor of a schedule, in the order in which they are made; the pool has `pool` bytes."""
    graph, plan = schedule.graph, schedule.plan
    outline = Outline.of(graph, profile)
    names = [op.name for op in graph.ops]
    away = [m for m in outline.movable if m.name in plan.offload]
    workspaces = (round_up(plan.algorithm(op).workspace, GRANULARITY) for op in graph.ops)
    held = [n + w for n, w in zip(outline.without(away), workspaces, strict=True)]
    fetched = {name: start for start, tensors in plan.prefetch.items() for name in tensors}
    for m in outline.movable:
        if m not in away:
            fits = "small: a copy would gain nothing" if m not in outline.worthwhile else "there is room for it"
            yield Decision(m.name, m.nbytes, False, None, None, None, names[m.needed], fits)
            continue
        gap = range(m.left + 1, m.needed)
        fullest = max(gap, key=lambda i: held[i])
        need = held[fullest] + m.nbytes
        if need > pool:
            why = f"{names[fullest]} would need {format_size(need)} with it, the pool has {format_size(pool)}"
        else:
            why = "its bytes let other copies begin or end in time"
        until = plan.free_before.get(m.name, m.left + 1)
        yield Decision(
            m.name, m.nbytes, True, names[m.made] if m.out_bytes else None, names[min(until, len(names) - 1)],
            names[fetched.get(m.name, m.needed)], names[m.needed], why,
        )  # fmt: skip


def fractional_ms(schedule: Schedule, profile: Profile, budget: int) -> float | None:
    """The fractional optimum of Beaumont et al., Theorem 2, for the schedule's algorithms: under their model (one
    transfer at a time, tensors in part) no schedule is faster. None where that model finds no room at all."""
    outline = Outline.of(schedule.graph, profile)
    algorithms = [schedule.plan.algorithm(op) for op in schedule.graph.ops]
    chain, _ = layers_of(outline, algorithms, budget - schedule.persistent_bytes)
    ms = chain.fractional_ms()
    return ms if ms < float("inf") else None
