"""Is a placement right? Independent of whatever made it, and simple enough to be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidnn.memory.place import Interval


@dataclass(frozen=True, slots=True)
class Violation:
    """`reason` is one of missing, unknown, negative, unaligned, outside, overlap; `sentence` names the buffers."""

    reason: str
    sentence: str


def find_violation(
    stays: Sequence[Interval], offsets: Mapping[str, int], nbytes: int, alignment: int = 1
) -> Violation | None:
    """The first rule that a placement in a pool of `nbytes` breaks; None for a right one."""
    for stranger in sorted(offsets.keys() - {stay.id for stay in stays}):
        return Violation("unknown", f"{stranger} has an offset but is not in the trace")
    for stay in stays:
        if stay.id not in offsets:
            return Violation("missing", f"{stay.id} has no offset")
        offset = offsets[stay.id]
        if offset < 0:
            return Violation("negative", f"{stay.id} lies at {offset}, below the pool")
        if offset % alignment:
            return Violation("unaligned", f"{stay.id} lies at {offset}, not a multiple of {alignment}")
        if offset + stay.nbytes > nbytes:
            return Violation("outside", f"{stay.id} ends at {offset + stay.nbytes}, the pool at {nbytes}")
    alive: list[Interval] = []
    for stay in sorted(stays, key=lambda stay: stay.start):
        alive = [other for other in alive if other.end > stay.start]
        for other in alive:
            a, b = offsets[stay.id], offsets[other.id]
            if a < b + other.nbytes and b < a + stay.nbytes:
                return Violation("overlap", f"{stay.id} [{a}, {a + stay.nbytes}) and {other.id} "
                                 f"[{b}, {b + other.nbytes}) overlap at time {stay.start}")  # fmt: skip
        alive.append(stay)
    return None
