"""What all host ops share: arrays that come in any layout and precision.

An operand is any strided view, in float32, float64 or bfloat16. A kernel sees row-major float32 or float64 only:
`load` brings an operand into that form (free where it has it already), `stage` gives the array that a kernel fills,
`store` takes the result home, rounded once. NaN and infinities flow as IEEE 754 says, without warnings: whoever
reads the loss decides what they mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from minidnn.ops.host_loops import Array as Array
from minidnn.ops.host_loops import pass_where_alive

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]  # ((top, bottom), (left, right))

P = ParamSpec("P")
T = TypeVar("T")


def quiet(function: Callable[P, T]) -> Callable[P, T]:
    """Let NaN and infinity pass through the NumPy calls of an op without a warning."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that kernels compute in: bfloat16 is computed in float32; the others as they are."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def load(array: Array) -> Array:
    """`array` row-major in its compute type: itself where it already is, else a copy."""
    return np.ascontiguousarray(array, dtype=compute_dtype(array.dtype))


def stage(out: Array) -> Array:
    """Where a kernel writes the result meant for `out`: `out` itself where it is row-major in its compute type."""
    dtype = compute_dtype(out.dtype)
    return out if out.flags.c_contiguous and out.dtype == dtype else np.empty(out.shape, dtype)


def store(result: Array, out: Array) -> None:
    """Bring a staged result home: nothing to do where it was written in place, else one copy, rounded once."""
    if result is not out:
        out[...] = result.reshape(out.shape)


def zero_where_dead(gradient: Array, activation: Array) -> None:
    """ReLU's mask: clear `gradient` (a staged array) where `activation` <= 0. Where that is NaN the gradient passes,
    as in PyTorch."""
    flat = gradient.reshape(-1)
    pass_where_alive(load(activation).reshape(-1), flat, flat)


class Scratch(threading.local):
    """Bytes of one thread for kernels that were given no workspace. Kept between calls, grown on demand."""

    def __init__(self) -> None:
        self._bytes: Array = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Array:
        """At least `nbytes` bytes; the same ones at each call."""
        if self._bytes.nbytes < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes
