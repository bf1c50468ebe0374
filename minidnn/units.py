"""Sizes, times and rates: parse what a user types, print what a reader can compare.

Sizes are ints in bytes, times floats in ms, rates floats in bytes per second.
"""

from __future__ import annotations

import re

from minidnn.errors import ArgumentError

KiB = 2**10
MiB = 2**20
GiB = 2**30

_FACTORS = {
    "": 1, "B": 1,
    "K": KiB, "KIB": KiB, "M": MiB, "MIB": MiB, "G": GiB, "GIB": GiB, "T": 2**40, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, argument: str = "size") -> int:
    """`"8GiB"`, `"512 MB"`, `"4096"` or an int -> bytes. KiB, MiB, GiB are powers of two; KB, MB, GB powers of ten."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ArgumentError(f"{argument} is {text}; it must be 0 or more bytes")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ArgumentError(f"{argument} is {text!r}; write a number and a unit, such as 8GiB, 512MiB or 4096")
    return int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor


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
