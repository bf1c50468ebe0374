"""What a plan decides, activation by activation, and why: for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from minidnn.memory.trace import GRANULARITY
from minidnn.plan.outline import Movable, Outline, layers_of
from minidnn.plan.registry import FIXED_SETS, parse_mode
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
    plan, outline = schedule.plan, Outline.of(schedule.graph, profile)
    names = [op.name for op in schedule.graph.ops]
    away = [m for m in outline.movable if m.name in plan.offload]
    fetched = {name: start for start, tensors in plan.prefetch.items() for name in tensors}
    absences = {m.name: (plan.free_before.get(m.name, m.left + 1), fetched.get(m.name, m.needed)) for m in away}
    held = _held(schedule, outline, absences)
    fixed = parse_mode(plan.mode).family in FIXED_SETS
    for m in outline.movable:
        if m.name not in absences:
            why = "small: a copy would gain nothing" if m not in outline.worthwhile else "there is room for it"
            yield Decision(m.name, m.nbytes, False, None, None, None, names[m.needed], why)
            continue
        until, back = absences[m.name]
        why = f"it is in the set of {plan.mode}" if fixed else _reason(m, range(until, back), held, names, pool)
        yield Decision(
            m.name, m.nbytes, True, names[m.made] if m.out_bytes else None, names[min(until, len(names) - 1)],
            names[back], names[m.needed], why,
        )  # fmt: skip


def _held(schedule: Schedule, outline: Outline, absences: Mapping[str, tuple[int, int]]) -> list[int]:
    """What the pool holds while each op runs, workspaces and copies under way included."""
    change = [0] * (len(outline.resident) + 1)
    for m in outline.movable:
        until, back = absences.get(m.name, (0, 0))
        if until < back:
            change[until] -= m.nbytes
            change[back] += m.nbytes
    workspaces = (round_up(schedule.plan.algorithm(op).workspace, GRANULARITY) for op in schedule.graph.ops)
    return [n + w + c for n, w, c in zip(outline.resident, workspaces, accumulate(change), strict=False)]


def _reason(m: Movable, gap: range, held: Sequence[int], names: Sequence[str], pool: int) -> str:
    """Why a tensor is not there during these ops: the fullest of them has no room for it, or what has is in pieces."""
    if not gap:
        return "returns at once to another place, which leaves a larger range free"
    fullest = max(gap, key=lambda i: held[i])
    short = held[fullest] + m.nbytes - pool
    if short > 0:
        return f"{names[fullest]} lacks {format_size(short)} with it"
    return "would fit, but not in one piece, or too late for other copies"


@dataclass(frozen=True, slots=True)
class Slower:
    """An op that does not run its fastest algorithm, and what that costs in ms."""

    op: str
    algorithm: str
    fastest: str
    workspace: int
    more_ms: float


def slower_algorithms(schedule: Schedule, profile: Profile) -> list[Slower]:
    """The ops whose fastest algorithm has no room for its workspace, those that cost most first."""
    found = []
    for op in schedule.graph.ops:
        chosen, fastest = schedule.plan.algorithm(op), profile.algorithms(schedule.graph, op)[0]
        more = (chosen.ms or 0.0) - (fastest.ms or 0.0)
        if more > 0:
            found.append(Slower(op.name, chosen.name, fastest.name, fastest.workspace, more))
    return sorted(found, key=lambda slower: -slower.more_ms)


def fractional_ms(schedule: Schedule, profile: Profile, budget: int) -> float | None:
    """The fractional optimum of Beaumont et al., Theorem 2, for the schedule's algorithms: under their model (one
    transfer at a time, tensors in part) no schedule is faster. None where that model finds no room at all."""
    outline = Outline.of(schedule.graph, profile)
    algorithms = [schedule.plan.algorithm(op) for op in schedule.graph.ops]
    chain, _ = layers_of(outline, algorithms, budget - schedule.persistent_bytes)
    ms = chain.fractional_ms()
    return ms if ms < float("inf") else None
