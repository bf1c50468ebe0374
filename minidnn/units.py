"""Sizes, times and rates: parse what a user types, print what a reader can compare.

Sizes are ints in bytes, times floats in ms, rates floats in bytes per second.
"""

from __future__ import annotations

import re
from math import isfinite, nan
from numbers import Integral

from minidnn.arguments import LARGEST, shown
from minidnn.errors import ArgumentError

KiB = 2**10
MiB = 2**20
GiB = 2**30

_FACTORS = {
    "": 1, "B": 1,
    "K": KiB, "KIB": KiB, "M": MiB, "MIB": MiB, "G": GiB, "GIB": GiB, "T": 2**40, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_MOST = 2**63 - 1
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, argument: str = "size") -> int:
    """`"8GiB"`, `"512 MB"`, `"4096"` or an int -> bytes. KiB, MiB, GiB are powers of two; KB, MB, GB powers of ten."""
    head = f"{argument} is {shown(text)}" if argument else f"{shown(text)} is no size"
    if isinstance(text, Integral) and not isinstance(text, bool):
        if not 0 <= int(text) <= _MOST:
            raise ArgumentError(f"{head}; it must be 0 or more bytes, below 2^63")
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) and len(text) < 40 else None
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match.group(1)):
        raise ArgumentError(f"{head}; write a number and a unit, such as 8GiB, 512MiB or 4096")
    nbytes = int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor
    if nbytes > _MOST:
        raise ArgumentError(f"{head}; it must be below 2^63 bytes")
    return nbytes


def parse_number(text: str) -> float:
    """`"0.1"`, `"1e-3"` -> a finite float; NaN where it is none (a comparison with a bound then fails)."""
    value = float(text) if _NUMBER.fullmatch(text) else nan
    return value if isfinite(value) else nan


def parse_whole(text: str, argument: str = "", least: int = 1) -> int:
    """`"64"` -> 64, a whole number of at least `least`."""
    value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
    if not least <= value <= LARGEST:
        many = f" and at most {LARGEST}" if text.isdigit() and (len(text) > 9) else ""
        head = f"{argument} is {shown(text)}; it" if argument else shown(text)
        raise ArgumentError(f"{head} must be a whole number of at least {least}{many}")
    return value


def parse_shape(text: str, argument: str = "") -> tuple[int, int, int]:
    """`"3x64x64"` -> (3, 64, 64)."""
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    if match is None or "0" in (sides := [side.lstrip("0") or "0" for side in match.groups()]):
        head = f"{argument} is {shown(text)}" if argument else f"{shown(text)} is no shape"
        raise ArgumentError(f"{head}; write channels x height x width, such as 3x64x64")
    return int(sides[0]), int(sides[1]), int(sides[2])


def format_size(nbytes: int | None) -> str:
    """Bytes as the reader's MiB (or GiB from 10 GiB up, B below 1 KiB)."""
    if nbytes is None:
        return "-"
    if abs(nbytes) < KiB:
        return f"{nbytes} B"
    if abs(nbytes) < MiB:
        return f"{nbytes / KiB:.1f} KiB"
    if abs(nbytes) < 10 * GiB:
        return f"{nbytes / MiB:.1f} MiB"
    return f"{nbytes / GiB:.2f} GiB"


def format_ms(ms: float | None) -> str:
    """Milliseconds with as many digits as a comparison needs."""
    if ms is None:
        return "-"
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is `value` or more."""
    return -(-value // multiple) * multiple
