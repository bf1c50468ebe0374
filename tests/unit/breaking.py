"""Tools to break a schedule: find an action, take it away, move it, change it."""

from __future__ import annotations

from dataclasses import replace

from minidnn.schedule.actions import Action, Alloc, Buffer, PartAction, Schedule


def find(s: Schedule, kind: type[Action], name: str = "", last: bool = False) -> int:
    """Index of the first (or last) action of a kind whose label ends with `name`."""
    found = [i for i, a in enumerate(s.actions) if type(a) is kind and a.label.endswith(name)]
    return found[-1 if last else 0]


def parts(s: Schedule, kind: type[PartAction], name: str) -> list[int]:
    """Indices of the packings or unpackings of a tensor's parts."""
    return [i for i, a in enumerate(s.actions) if type(a) is kind and isinstance(a, PartAction) and a.host.name == name]


def with_actions(s: Schedule, *parts: tuple[Action, ...]) -> Schedule:
    return replace(s, actions=sum(parts, ()))


def without(s: Schedule, *gone: int) -> Schedule:
    return with_actions(s, tuple(a for i, a in enumerate(s.actions) if i not in gone))


def changed(s: Schedule, i: int, **fields: object) -> Schedule:
    return with_actions(s, s.actions[:i], (replace(s.actions[i], **fields),), s.actions[i + 1 :])  # type: ignore[arg-type]


def put(s: Schedule, at: int, *new: Action) -> Schedule:
    return with_actions(s, s.actions[:at], new, s.actions[at:])


def moved(s: Schedule, start: int, to: int) -> Schedule:
    """The action at `start` now stands before the one that was at `to`."""
    rest = without(s, start)
    return put(rest, to if to < start else to - 1, s.actions[start])


def swapped(s: Schedule, i: int, j: int) -> Schedule:
    actions = list(s.actions)
    actions[i], actions[j] = actions[j], actions[i]
    return replace(s, actions=tuple(actions))


def next_of(s: Schedule, after: int, kind: type[Action], name: str = "") -> int:
    later = enumerate(s.actions[after:], after)
    return next(i for i, a in later if type(a) is kind and a.label.endswith(name))


def before_of(s: Schedule, start: int, kind: type[Action]) -> int:
    return next(i for i in range(start, -1, -1) if type(s.actions[i]) is kind)


def offset_of(s: Schedule, key: str) -> int:
    return next(a.buffer.offset for a in s.actions if isinstance(a, Alloc) and a.buffer.key == key)


def relocated(s: Schedule, key: str, **fields: int) -> Schedule:
    """The stay has another offset or size, and everyone agrees on it."""

    def shift(value: object) -> object:
        if isinstance(value, Buffer) and value.key == key:
            return replace(value, **fields)  # type: ignore[arg-type]
        return tuple(shift(v) for v in value) if isinstance(value, tuple) else value

    actions = []
    for a in s.actions:
        shifted = {f: shift(getattr(a, f)) for f in ("reads", "writes", "frees", "buffer", "operands") if hasattr(a, f)}
        actions.append(replace(a, **shifted))  # type: ignore[arg-type]
    return replace(s, actions=tuple(actions))
