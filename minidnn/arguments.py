"""What a number or a shape that a user gives must be: one sentence where it is not, else the plain Python value.

NumPy's scalars are numbers too; bools and strings are none.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite
from numbers import Integral, Real
from typing import TypeGuard

from minidnn.errors import ArgumentError

LARGEST = 2**31 - 1
"""Of counts: far beyond what memory holds, while the bytes that they make stay within an address."""


def shown(value: object) -> str:
    """A value as a sentence can show it: its repr, in one line and not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more digits than Python prints, or an object whose own repr fails
        text = f"an unshowable {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def failure(error: BaseException) -> str:
    """An error of somebody else's code as a sentence can show it: its kind and what it says, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is an int of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= LARGEST


def count(value: object, argument: str, least: int = 1) -> int:
    """An int of at least `least`."""
    if is_count(value, least):
        return int(value)
    most = f", at most {LARGEST}" if isinstance(value, int) and value > LARGEST else ""
    raise ArgumentError(f"{argument} is {shown(value)}; it must be an int of {least} or more{most}")


def flag(value: object, argument: str) -> bool:
    """True or False; not what is merely true, such as "no"."""
    if isinstance(value, bool):
        return value
    import numpy as np  # late: most flags are Python's, and a command's help needs no NumPy

    if isinstance(value, np.bool_):
        return bool(value)
    raise ArgumentError(f"{argument} is {shown(value)}; it must be True or False")


def choice(value: object, argument: str, names: Collection[str]) -> str:
    """One of some names."""
    if isinstance(value, str) and value in names:
        return value
    raise ArgumentError(f"{argument} is {shown(value)}; it must be one of {', '.join(names)}")


def number(value: object, argument: str, low: float = -inf, high: float = inf, bounds: str = "[)") -> float:
    """A finite number from `low` to `high`; a bracket in `bounds` takes the end in, a parenthesis leaves it out."""
    if isinstance(value, Real) and not isinstance(value, bool):
        found = _as_float(value)
        above = found >= low if bounds[0] == "[" else found > low
        below = found <= high if bounds[1] == "]" else found < high
        if isfinite(found) and above and below:
            return found
    if high < inf:
        where = f" in {bounds[0]}{low:g}, {high:g}{bounds[1]}"
    else:
        where = "" if low == -inf else f" of {low:g} or more" if bounds[0] == "[" else f" above {low:g}"
    raise ArgumentError(f"{argument} is {shown(value)}; it must be a number{where}")


def _as_float(value: Real) -> float:
    """A real number as a float; infinite where it is too large to be one."""
    try:
        return float(value)
    except OverflowError:
        return inf


def seed_of(value: object, argument: str = "seed") -> int:
    """What randomness is drawn from: 64 bits."""
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**64:
        return int(value)
    raise ArgumentError(f"{argument} is {shown(value)}; it must be an int from 0 to 2^64 - 1")


def sample_shape(value: object, argument: str = "input_shape") -> tuple[int, ...]:
    """The shape of one sample: (C, H, W), or (features,)."""
    if isinstance(value, (tuple, list)) and len(value) in (1, 3) and all(is_count(n) for n in value):
        return tuple(int(n) for n in value)
    raise ArgumentError(f"{argument} is {shown(value)}; it must be (C, H, W), or (features,), each 1 or more")


def image_shape(value: object, argument: str = "input_shape") -> tuple[int, int, int]:
    """(C, H, W) of one image."""
    if isinstance(value, (tuple, list)) and len(value) == 3 and all(is_count(n) for n in value):
        return int(value[0]), int(value[1]), int(value[2])
    raise ArgumentError(f"{argument} is {shown(value)}; it must be (C, H, W), each 1 or more")
