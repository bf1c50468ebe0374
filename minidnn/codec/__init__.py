"""Compression of offloaded activations on CPU cores."""

from __future__ import annotations

from minidnn.codec.zvc import (
    FRAC,
    GROUP,
    PARTS,
    Packed,
    PackedMemory,
    PackedPart,
    compress,
    decompress,
    density,
    estimate_nbytes,
    pack,
    split,
    unpack,
    warm_up,
)

__all__ = [
    "FRAC",
    "GROUP",
    "PARTS",
    "Packed",
    "PackedMemory",
    "PackedPart",
    "compress",
    "decompress",
    "density",
    "estimate_nbytes",
    "pack",
    "split",
    "unpack",
    "warm_up",
]
