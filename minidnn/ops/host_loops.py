"""Compiled loops of the host's ops (numba): what NumPy and BLAS do not offer, or do slowly.

They see row-major float32 or float64 arrays and whole windows, check nothing, and keep floating-point operations in
the order in which they are written (no fastmath): equal inputs, equal bits. Hot loops run over flat arrays with
unsigned indices, because numba tests signed ones for wrap-around at each element, and choose values instead of
branching, so that they become vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minidnn.compiled import compiled

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a loop at its first call, and run it without the GIL."""
    return compiled(function, nogil=True, error_model="numpy")


@kernel
def reach(shift: int, step: int, size: int, count: int) -> tuple[int, int]:
    """The range begin..end-1 of i in 0..count-1 for which i * step + shift lies in 0..size-1."""
    begin = min(max(0, -(shift // step)), count)
    return begin, min(max(begin, (size - 1 - shift) // step + 1), count)


# --- convolution: window = R, S, stride, top and left padding, dilation, and Q, the output's width ------------------


@kernel
def unfold(image: Array, col: Array, first: int, last: int, window: tuple[int, ...]) -> None:
    """im2col: col[c,r,s,p,q] (flat) = image[c, p*stride - top + r*dilation, ...] for output rows first..last-1."""
    R, S, step_h, step_w, top, left, dil_h, dil_w, Q = window
    C, H, W = image.shape
    source = image.reshape(-1)
    zero = image.dtype.type(0)
    step, at = np.uintp(step_w), np.uintp(0)
    for c in range(C):
        for r in range(R):
            for s in range(S):
                shift = s * dil_w - left
                begin, end = reach(shift, step_w, W, Q)
                before, inside, after = np.uintp(begin), np.uintp(end - begin), np.uintp(Q - end)
                for p in range(first, last):
                    h = p * step_h - top + r * dil_h
                    if h < 0 or h >= H:
                        for q in range(np.uintp(Q)):
                            col[at + q] = zero
                        at += np.uintp(Q)
                        continue
                    for q in range(before):
                        col[at + q] = zero
                    at += before
                    base = np.uintp((c * H + h) * W + begin * step_w + shift)
                    if step_w == 1:  # a loop of its own: it becomes a plain copy
                        for q in range(inside):
                            col[at + q] = source[base + q]
                    else:
                        for q in range(inside):
                            col[at + q] = source[base + q * step]
                    at += inside
                    for q in range(after):
                        col[at + q] = zero
                    at += after


@kernel
def fold(col: Array, image: Array, first: int, last: int, window: tuple[int, ...]) -> None:
    """col2im: add every element of a band's columns (flat) to the pixel of `image` that `unfold` reads it from."""
    R, S, step_h, step_w, top, left, dil_h, dil_w, Q = window
    C, H, W = image.shape
    target = image.reshape(-1)
    step, at = np.uintp(step_w), np.uintp(0)
    for c in range(C):
        for r in range(R):
            for s in range(S):
                shift = s * dil_w - left
                begin, end = reach(shift, step_w, W, Q)
                before, inside = np.uintp(begin), np.uintp(end - begin)
                for p in range(first, last):
                    h = p * step_h - top + r * dil_h
                    if h >= 0 and h < H:
                        base = np.uintp((c * H + h) * W + begin * step_w + shift)
                        if step_w == 1:
                            for q in range(inside):
                                target[base + q] += col[at + before + q]
                        else:
                            for q in range(inside):
                                target[base + q * step] += col[at + before + q]
                    at += np.uintp(Q)


@kernel
def add_bias(y: Array, bias: Array, start: int, stop: int, relu: bool) -> None:
    """y[k, start:stop] += bias[k], then ReLU: one pass while the band is in the cache. NaN stays NaN."""
    zero = y.dtype.type(0)
    for k in range(y.shape[0]):
        for i in range(np.uintp(start), np.uintp(stop)):
            value = y[k, i] + bias[k]
            y[k, i] = zero if relu and value <= zero else value


# --- elementwise, on flat arrays; the output may be an input --------------------------------------------------------


@kernel
def pass_where_alive(activation: Array, gradient: Array, out: Array) -> None:
    """out = gradient, or 0 where activation <= 0."""
    zero = out.dtype.type(0)
    for i in range(out.size):
        value = gradient[i]
        out[i] = zero if activation[i] <= zero else value


@kernel
def scale_where_negative(sign: Array, values: Array, out: Array, slope: float) -> None:
    """out = values where sign > 0, else values * slope."""
    for i in range(out.size):
        value = values[i]
        out[i] = value if sign[i] > 0 else value * slope


# --- pooling: window = R, S, stride, top and left padding, dilation -------------------------------------------------


@kernel
def find_maximum(x: Array, y: Array, index: Array, window: tuple[int, ...], relu: bool) -> None:
    """y = each window's maximum, index = its place r*S+s: the first maximum, or the last NaN. All padding: -inf, -1.

    Runs along output rows: what is best so far of a whole row, for one window position after the other.
    """
    R, S, step_h, step_w, top, left, dil_h, dil_w = window
    C, H, W = x.shape
    P, Q = y.shape[1:]
    source, best, where = x.reshape(-1), y.reshape(-1), index.reshape(-1)
    lowest, zero, none = x.dtype.type(-np.inf), x.dtype.type(0), index.dtype.type(-1)
    step, width = np.uintp(step_w), np.uintp(Q)
    for c in range(C):
        for p in range(P):
            row = np.uintp((c * P + p) * Q)
            for q in range(width):
                best[row + q] = lowest
                where[row + q] = none
            for r in range(R):
                h = p * step_h - top + r * dil_h
                if h < 0 or h >= H:
                    continue
                for s in range(S):
                    shift = s * dil_w - left
                    begin, end = reach(shift, step_w, W, Q)
                    at, base = row + np.uintp(begin), np.uintp((c * H + h) * W + begin * step_w + shift)
                    place = index.dtype.type(r * S + s)
                    for i in range(np.uintp(end - begin)):
                        value, old, held = source[base + i * step], best[at + i], where[at + i]
                        better = (value > old) | (value != value) | (held < 0)
                        best[at + i] = value if better else old
                        where[at + i] = place if better else held
            if relu:
                for q in range(width):
                    value, held = best[row + q], where[row + q]
                    dead = (value <= zero) & (held >= 0)  # padding alone stays -inf: the ReLU is in front of it
                    best[row + q] = zero if dead else value
                    where[row + q] = none if dead else held


@kernel
def find_again(x: Array, y: Array, index: Array, window: tuple[int, ...]) -> None:
    """index = where in its window y stands first, or the last NaN where y is NaN; -1 where it stands nowhere."""
    R, S, step_h, step_w, top, left, dil_h, dil_w = window
    C, H, W = x.shape
    P, Q = y.shape[1:]
    source, best, where = x.reshape(-1), y.reshape(-1), index.reshape(-1)
    none = index.dtype.type(-1)
    step, width = np.uintp(step_w), np.uintp(Q)
    for c in range(C):
        for p in range(P):
            row = np.uintp((c * P + p) * Q)
            for q in range(width):
                where[row + q] = none
            for r in range(R):
                h = p * step_h - top + r * dil_h
                if h < 0 or h >= H:
                    continue
                for s in range(S):
                    shift = s * dil_w - left
                    begin, end = reach(shift, step_w, W, Q)
                    at, base = row + np.uintp(begin), np.uintp((c * H + h) * W + begin * step_w + shift)
                    place = index.dtype.type(r * S + s)
                    for i in range(np.uintp(end - begin)):
                        value, sought, held = source[base + i * step], best[at + i], where[at + i]
                        found = ((value == sought) & (held < 0)) | ((value != value) & (sought != sought))
                        where[at + i] = place if found else held


@kernel
def scatter(dy: Array, index: Array, dx: Array, window: tuple[int, ...]) -> None:
    """Add dy to dx at each window's place; pass over places outside window or image, as stale memory may hold."""
    R, S, step_h, step_w, top, left, dil_h, dil_w = window
    C, H, W = dx.shape
    P, Q = dy.shape[1:]
    row_of, column_of = np.empty(R * S, np.int64), np.empty(R * S, np.int64)
    for k in range(R * S):
        row_of[k], column_of[k] = k // S * dil_h - top, k % S * dil_w - left
    for c in range(C):
        for p in range(P):
            for q in range(Q):
                k = index[c, p, q]
                if k < 0 or k >= R * S:
                    continue
                h, w = p * step_h + row_of[k], q * step_w + column_of[k]
                if h >= 0 and h < H and w >= 0 and w < W:
                    dx[c, h, w] += dy[c, p, q]


# Boxes are int64 [positions, 3]: first, one past the last, and the factor of the divisor.


@kernel
def average(x: Array, y: Array, rows: Array, columns: Array) -> None:
    """y = the sum over each box of x divided by its divisor; an empty box gives 0."""
    for c in range(y.shape[0]):
        for p in range(y.shape[1]):
            for q in range(y.shape[2]):
                total = 0.0  # float64: a box may be a whole image
                for h in range(rows[p, 0], rows[p, 1]):
                    for w in range(columns[q, 0], columns[q, 1]):
                        total += x[c, h, w]
                y[c, p, q] = total / max(rows[p, 2] * columns[q, 2], 1)


@kernel
def spread(dy: Array, dx: Array, rows: Array, columns: Array) -> None:
    """Add to each pixel of a box its share of dy."""
    for c in range(dy.shape[0]):
        for p in range(dy.shape[1]):
            for q in range(dy.shape[2]):
                share = dx.dtype.type(dy[c, p, q] / max(rows[p, 2] * columns[q, 2], 1))
                for h in range(rows[p, 0], rows[p, 1]):
                    for w in range(columns[q, 0], columns[q, 1]):
                        dx[c, h, w] += share


# --- updates, on flat arrays; numbers in the weights' type ----------------------------------------------------------


@kernel
def descend(dw: Array, w: Array, numbers: Array) -> None:
    """w -= lr * (factor * dw + decay * w); numbers = lr, factor, decay."""
    lr, factor, decay = numbers[0], numbers[1], numbers[2]
    for i in range(w.size):
        w[i] -= lr * (factor * dw[i] + decay * w[i])


@kernel
def descend_with_momentum(dw: Array, w: Array, momentum: Array, numbers: Array) -> None:
    """numbers = lr, factor, decay, momentum factor, share of the gradient, first step?, nesterov?"""
    lr, factor, decay, keep, take = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    first, nesterov = numbers[5] != 0, numbers[6] != 0
    zero = w.dtype.type(0)
    for i in range(w.size):
        gradient = factor * dw[i] + decay * w[i]
        # In the first step nothing is kept of what the buffer held, which may be NaN.
        moving = (zero if first else keep * momentum[i]) + take * gradient
        momentum[i] = moving
        w[i] -= lr * (gradient + keep * moving if nesterov else moving)


@kernel
def adapt(dw: Array, w: Array, m: Array, v: Array, numbers: Array) -> None:
    """numbers = lr / correction1, sqrt(correction2), factor, decay, shrink, 1 - beta1, beta2, 1 - beta2, eps."""
    rate, root, factor, decay, shrink = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    weight1, beta2, weight2, eps = numbers[5], numbers[6], numbers[7], numbers[8]
    for i in range(w.size):
        gradient = factor * dw[i] + decay * w[i]
        mean = m[i] + weight1 * (gradient - m[i])
        square = beta2 * v[i] + weight2 * gradient * gradient
        m[i], v[i] = mean, square
        w[i] = shrink * w[i] - rate * mean / (np.sqrt(square) / root + eps)
