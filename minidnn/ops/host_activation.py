"""Activations and dropout on the host: elementwise, in place where the caller says so."""

from __future__ import annotations

from math import floor

import numpy as np

from minidnn.errors import ArgumentError
from minidnn.ops import philox
from minidnn.ops.host_arrays import Array, load, quiet, stage, store
from minidnn.ops.host_loops import pass_where_alive, scale_where_negative


@quiet
def relu_backward(*, y: Array, dy: Array, dx: Array) -> None:
    """dx = dy where y > 0 (or NaN), else 0. dx may be dy."""
    result = stage(dx)
    pass_where_alive(load(y).reshape(-1), load(dy).reshape(-1), result.reshape(-1))
    store(result, dx)


def _leak(sign: Array, values: Array, out: Array, slope: float) -> None:
    scale_where_negative(sign.reshape(-1), values.reshape(-1), out.reshape(-1), out.dtype.type(slope))


@quiet
def activation_forward(*, x: Array, y: Array, function: str, negative_slope: float = 0.01) -> None:
    """y = function(x) for "relu", "leaky_relu" (with `negative_slope`), "sigmoid" or "tanh". y may be x."""
    source, result = load(x), stage(y)
    if function == "relu":
        np.maximum(source, 0, out=result)
    elif function == "leaky_relu":
        _leak(source, source, result, negative_slope)
    elif function == "sigmoid":
        np.exp(np.negative(source, out=result), out=result)
        np.reciprocal(np.add(result, 1, out=result), out=result)
    elif function == "tanh":
        np.tanh(source, out=result)
    else:
        raise ArgumentError(f"function is {function!r}; it must be relu, leaky_relu, sigmoid or tanh")
    store(result, y)


@quiet
def activation_backward(*, saved: Array, dy: Array, dx: Array, function: str, negative_slope: float = 0.01) -> None:
    """dx = dy * function'. `saved` is y for relu, sigmoid and tanh, x for leaky_relu. dx may be dy."""
    if function == "relu":
        relu_backward(y=saved, dy=dy, dx=dx)
        return
    value, result = load(saved), stage(dx)
    if function == "leaky_relu":
        _leak(value, load(dy), result, negative_slope)
    elif function == "sigmoid":
        np.multiply(load(dy), (1 - value) * value, out=result)
    elif function == "tanh":
        np.multiply(load(dy), 1 - value * value, out=result)
    else:
        raise ArgumentError(f"function is {function!r}; it must be relu, leaky_relu, sigmoid or tanh")
    store(result, dx)


@quiet
def dropout_forward(*, x: Array, y: Array, scalars: Array, p: float, op: int) -> None:
    """y = x * keep / (1 - p): each element is dropped with probability `p`. y may be x.

    Element i (row-major in logical order) is kept where word i % 4 of Philox4x32-10 with counter
    (i // 4, op, step, micro_step) and key (seed_low, seed_high) is at least floor(p * 2^32).
    """
    source, result = load(x), stage(y)
    scale = source.dtype.type(1 / (1 - p) if p < 1 else 0)
    numbers = np.array([op, *scalars[2:6]]).astype(np.uint64)
    philox.dropout(source.reshape(-1), result.reshape(-1), numbers, np.uint64(floor(p * 2**32)), scale)
    store(result, y)


@quiet
def dropout_backward(*, dy: Array, dx: Array, scalars: Array, p: float, op: int) -> None:
    """dx = dy * keep / (1 - p), with the bits of the forward pass drawn again. dx may be dy."""
    dropout_forward(x=dy, y=dx, scalars=scalars, p=p, op=op)
