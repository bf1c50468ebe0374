"""Fully connected layers, sums and copies on the host."""

from __future__ import annotations

import numpy as np

from minidnn.ops.host_arrays import Array, load, quiet, stage, store, zero_where_dead


@quiet
def linear_forward(*, x: Array, w: Array, y: Array, b: Array | None = None, relu: bool = False) -> None:
    """y[N,O] = x[N,F] @ w[O,F].T + b[O], then ReLU where `relu` is set. x may be [N,C,H,W] with C*H*W == F."""
    result = stage(y)
    np.matmul(load(x).reshape(len(x), -1), load(w).T, out=result)
    if b is not None:
        np.add(result, b, out=result)
    if relu:
        np.maximum(result, 0, out=result)
    store(result, y)


@quiet
def linear_backward_data(*, dy: Array, w: Array, dx: Array, mask: Array | None = None) -> None:
    """dx = dy[N,O] @ w[O,F], zero where `mask` (the ReLU output of dx's shape) is <= 0. dx is [N,F] or [N,C,H,W]."""
    result = stage(dx)
    np.matmul(load(dy), load(w), out=result.reshape(len(dx), -1))
    if mask is not None:
        zero_where_dead(result, mask.reshape(result.shape))
    store(result, dx)


@quiet
def linear_backward_filter(*, x: Array, dy: Array, dw: Array) -> None:
    """dw[O,F] = dy[N,O].T @ x[N,F]. x may be [N,C,H,W] with C*H*W == F."""
    result = stage(dw)
    np.matmul(load(dy).T, load(x).reshape(len(x), -1), out=result)
    store(result, dw)


@quiet
def bias_backward(*, dy: Array, db: Array) -> None:
    """db[c] = the sum of dy [N,C,...] over all axes but the second."""
    rows = load(dy).reshape(dy.shape[0], dy.shape[1], -1).sum(axis=2)
    db[...] = rows.sum(axis=0, dtype=np.float64)


@quiet
def cast(*, x: Array, y: Array) -> None:
    """y = x in y's type; bfloat16 rounds to nearest even."""
    y[...] = x


@quiet
def layout(*, x: Array, y: Array) -> None:
    """y = x, where the two lie differently in memory."""
    y[...] = x.reshape(y.shape)


@quiet
def add(*, a: Array, b: Array, y: Array) -> None:
    """y = a + b."""
    result = stage(y)
    np.add(load(a), load(b), out=result)
    store(result, y)
