"""The allocation trace of an iteration as a value: what is asked for and given back, in order.

A trace knows nothing of addresses. Pools replay it (`sizing`), placement lays it out (`place`), and JSON lines carry it
from and to other programs, one event a line:

    {"allocate": "features.0.y#0", "nbytes": 822083584, "role": "offloaded", "position": "forward features.0"}
    {"free": "features.0.y#0", "position": "forward features.2"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from minidnn.arguments import shown
from minidnn.errors import ArgumentError, DataError
from minidnn.units import round_up

GRANULARITY = 512
"""Bytes to which pools round requests (CNMeM)."""

KEPT, OFFLOADED = "kept", "offloaded"
"""Roles that a fit may treat apart: activations that stay until their backward, and those that leave before."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A stay on the device begins. `id` names the stay (not the tensor: a prefetch makes a new one) and is used once.

    `role` says what the bytes are: "kept" and "offloaded" activations of forward, or any other word, such as
    "prefetched", "gradient", "weight_gradient", "workspace"; fits and plots go by it. `position` is a label for people.
    """

    id: str
    nbytes: int
    role: str = ""
    position: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """The stay `id` ends."""

    id: str
    position: str = ""


Event: TypeAlias = Allocate | Free
Trace: TypeAlias = tuple[Event, ...]


def live_profile(trace: Iterable[Event], granularity: int = GRANULARITY) -> list[int]:
    """Bytes alive after each event, each request rounded up to `granularity`. Also checks the trace.

    Raises ArgumentError for an id that is allocated twice, freed twice or freed without having been allocated.
    """
    alive: dict[str, int] = {}
    seen: set[str] = set()
    total, profile = 0, []
    for event in trace:
        if isinstance(event, Allocate):
            if event.id in seen:
                raise ArgumentError(f"trace allocates {shown(event.id)} twice; give each stay an id of its own")
            if event.nbytes < 0:
                raise ArgumentError(
                    f"trace allocates {event.nbytes} bytes for {shown(event.id)}; "
                    "they must be 0 or more"
                )
            seen.add(event.id)
            alive[event.id] = round_up(event.nbytes, granularity)
            total += alive[event.id]
        else:
            if event.id not in alive:
                state = "has been freed" if event.id in seen else "was never allocated"
                raise ArgumentError(f"trace frees {shown(event.id)}, which {state}; free each allocated id once")
            total -= alive.pop(event.id)
        profile.append(total)
    return profile


def aggregate_peak(trace: Iterable[Event], granularity: int = GRANULARITY) -> int:
    """Most bytes alive at once: what a pool without any fragmentation needs (vDNN++, section III-B)."""
    return max(live_profile(trace, granularity), default=0)


def save_trace(trace: Iterable[Event], path: Path) -> None:
    """Write one JSON object a line; empty roles and positions are left out."""
    path.write_text("".join(json.dumps(_as_json(event)) + "\n" for event in trace), encoding="utf-8")


def load_trace(path: Path) -> Trace:
    """Read a trace, ours or another program's. Raises DataError with the line's number and what is wrong with it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {error.strerror}; name another file") from None
    events = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not events:
        raise DataError(f"the trace {path} is empty; it needs one JSON object a line, allocate or free")
    try:
        live_profile(events)
    except ArgumentError as error:
        raise DataError(f"{path}: {error}") from None
    return tuple(events)


def _as_json(event: Event) -> dict[str, Any]:
    if isinstance(event, Allocate):
        fields = {"allocate": event.id, "nbytes": event.nbytes, "role": event.role, "position": event.position}
    else:
        fields = {"free": event.id, "position": event.position}
    return {key: value for key, value in fields.items() if value != "" or key not in ("role", "position")}


def _parse(line: bytes, where: str) -> Event:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or beyond Python's limits
        raise DataError(f"{where} is not JSON ({error}); write one object a line") from None
    if not isinstance(fields, dict) or ("allocate" in fields) == ("free" in fields):
        raise DataError(f'{where} must be an object with either "allocate" or "free", an id')
    kind = "allocate" if "allocate" in fields else "free"
    known = {"allocate": {"allocate", "nbytes", "role", "position"}, "free": {"free", "position"}}[kind]
    for name, value in fields.items():
        if name not in known:
            raise DataError(f"{where} has the unknown key {shown(name)}; {kind} takes {', '.join(sorted(known))}")
        if name != "nbytes" and not isinstance(value, str):
            raise DataError(f"{where} has {name} = {json.dumps(value)}; it must be a string")
    if kind == "free":
        return Free(fields["free"], fields.get("position", ""))
    nbytes = fields.get("nbytes")
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes < 2**63:
        raise DataError(
            f"{where} has nbytes = {json.dumps(nbytes)}; "
            "it must be a whole number of bytes, 0 or more, below 2^63"
        )
    return Allocate(fields["allocate"], nbytes, fields.get("role", ""), fields.get("position", ""))
