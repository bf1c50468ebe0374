"""Operands for op tests in every layout and precision, and the comparison with a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from minidnn.ops.numpy_ops import OPS

Array = NDArray[Any]

TYPES = {
    "float32": np.dtype(np.float32), "float64": np.dtype(np.float64), "bfloat16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
# max|a-b| / max|b|. bfloat16 is float32 rounded once: half a unit in the last of 8 binary digits.
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-8 + 1e-5}
# Half a unit in the last place of what sums are kept in, and how many of them a sum whose terms cancel may be off.
UNITS = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-24}
ROUNDINGS = 4

dtypes = st.sampled_from(sorted(TYPES))
layouts = st.sampled_from(["NCHW", "NHWC"])
seeds = st.integers(0, 2**32 - 1)


class Maker:
    """Makes one test's operands in its precision and layout, with reproducible values."""

    def __init__(self, dtype: str, layout: str, seed: int = 0) -> None:
        self.dtype, self.layout, self.rng = dtype, layout, np.random.default_rng(seed)

    @property
    def stored(self) -> str:
        """The type of weights, statistics and their gradients."""
        return "float64" if self.dtype == "float64" else "float32"

    def blank(self, shape: tuple[int, ...], dtype: str | None = None, layout: str | None = None) -> Array:
        """An output as a device hands it out: every value is NaN (or 113 in an int8)."""
        kind = np.dtype(np.int8) if dtype == "int8" else TYPES[dtype or self.dtype]
        if len(shape) == 4 and (layout or self.layout) == "NHWC":
            n, c, h, w = shape
            array: Array = np.empty((n, h, w, c), kind).transpose(0, 3, 1, 2)
        else:
            array = np.empty(shape, kind)
        array[...] = 113 if dtype == "int8" else np.nan
        return array

    def place(self, values: Array, dtype: str | None = None, layout: str | None = None) -> Array:
        """An operand with these values."""
        array = self.blank(values.shape, dtype, layout)
        array[...] = values
        return array

    def normal(self, *shape: int, dtype: str | None = None) -> Array:
        """Normal values around 0.4: sums of them do not vanish, so that a relative error means something."""
        return self.place(self.rng.standard_normal(shape) + 0.4, dtype)

    def ties(self, *shape: int) -> Array:
        """Values from a few: windows hold their maximum more than once."""
        return self.place(self.rng.integers(-2, 3, shape).astype(np.float64))

    def scalars(self, **values: float) -> Array:
        """The step scalars."""
        names = ["lr", "inverse_weight", "step", "micro_step", "seed_low", "seed_high", "correction1", "correction2"]
        scalars = np.zeros(16)
        for name, value in values.items():
            scalars[names.index(name)] = value
        return scalars


def tensor(array: Array, grad: bool = False) -> Any:
    """The torch tensor of an operand's values; bfloat16 as float32, in which both sides compute."""
    dtype = np.float64 if array.dtype == np.float64 else np.float32
    return torch.tensor(np.ascontiguousarray(array, dtype), requires_grad=grad)


READ_ONLY = ("x", "dy", "b", "mask", "saved", "labels", "target", "class_weight", "scalars", "index")


def run(name: str, **arguments: Any) -> None:
    """Call an op by its name, as a device does, and see that it leaves alone what it only reads."""
    arrays = {key: value for key, value in arguments.items() if isinstance(value, np.ndarray)}
    written = [v for key, v in arrays.items() if key in ("y", "dx") or (key == "index" and name.endswith("forward"))]
    read = {
        key: bits(value) for key, value in arrays.items()
        if key in READ_ONLY and not any(np.shares_memory(value, out) for out in written)
    }  # fmt: skip
    OPS[name](**arguments)
    assert [key for key, before in read.items() if bits(arrays[key]) != before] == []


class Sums(NamedTuple):
    """PyTorch's output and gradients of `y = function(x, w, b)`, linear in each of its operands."""

    y: Any
    dx: Any
    dw: Any


def sums(function: Callable[..., Any], x: Array, w: Array, b: Array | None, dy: Array) -> tuple[Sums, Sums]:
    """What PyTorch computes, and the same of the operands' magnitudes: the sizes of the terms in each sum."""

    def computed(of: Callable[[Array], Array]) -> Sums:
        tx, tw = tensor(of(x), grad=True), tensor(of(w), grad=True)
        y = function(tx, tw, None if b is None else tensor(of(b)))
        y.backward(tensor(of(dy)))
        return Sums(y, tx.grad, tw.grad)

    return computed(np.asarray), computed(np.abs)


def assert_close(actual: Array, expected: Any, dtype: str, terms: Any = None) -> None:
    """The same NaN and infinities, and max|a-b| / max|b| within the type's tolerance.

    `terms`: sums of the magnitudes that `expected` adds up. Where these cancel, in a tensor of a few values, the
    result is as exact as its largest terms: a few roundings of those are no fault.
    """
    a = np.asarray(actual, np.float64)
    b = np.asarray(expected.detach() if isinstance(expected, torch.Tensor) else expected, np.float64)
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite])
    if finite.any():
        error, scale = np.abs(a[finite] - b[finite]).max(), np.abs(b[finite]).max()
        allowed = TOLERANCES[dtype] * scale
        if terms is not None:
            allowed = max(allowed, ROUNDINGS * UNITS[dtype] * float(terms.detach().max()))
        assert error <= allowed, f"max|a-b| is {error:.3g}, max|b| is {scale:.3g}"


def bits(array: Array) -> bytes:
    """An array's values as bytes in logical order."""
    return np.ascontiguousarray(array).tobytes()
