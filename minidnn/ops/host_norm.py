"""On the host: batch normalization (Ioffe, Szegedy 2015) and local response normalization (Krizhevsky et al. 2012)."""

from __future__ import annotations

import numpy as np

from minidnn.errors import ShapeError
from minidnn.ops.host_arrays import Array, load, quiet, stage, store, zero_where_dead


def _per_channel(rows: Array) -> Array:
    """Sums over the pixels of [C,H,W], float64 [C]."""
    sums: Array = rows.reshape(len(rows), -1).sum(axis=1).astype(np.float64)
    return sums


def _normalize(
    x: Array, y: Array, mean: Array, invstd: Array, w: Array | None, b: Array | None, relu: bool
) -> None:
    """y = (x - mean) * invstd * w + b on [N,C,H,W], then ReLU where `relu` is set; w, b may be absent."""
    scale = invstd if w is None else invstd * w
    for image, out in zip(x, y, strict=True):
        result = stage(out)
        np.subtract(load(image), mean[:, None, None], out=result)
        np.multiply(result, scale[:, None, None], out=result)
        if b is not None:
            np.add(result, b[:, None, None], out=result)
        if relu:
            np.maximum(result, 0, out=result)
        store(result, out)


@quiet
def batch_norm_forward(
    *, x: Array, y: Array, mean: Array, invstd: Array, w: Array | None = None, b: Array | None = None,
    running_mean: Array | None = None, running_var: Array | None = None, momentum: float, eps: float,
    relu: bool = False,
) -> None:  # fmt: skip
    """Normalize x[N,C,H,W] by the batch's own mean and variance; saves mean[C] and invstd[C] = (var + eps)^-1/2.

    running_mean and running_var move towards the batch's mean and unbiased variance by `momentum`, in place.
    """
    count = x.size // x.shape[1]
    if count < 2:
        raise ShapeError(f"x has shape {list(x.shape)}; batch normalization in training needs 2 values per channel")
    center: Array = sum(_per_channel(load(image)) for image in x) / count
    squares: Array = np.zeros(x.shape[1])
    for image in x:
        deviation = load(image) - center.astype(mean.dtype)[:, None, None]
        squares += _per_channel(np.multiply(deviation, deviation, out=deviation))
    mean[...] = center
    invstd[...] = 1 / np.sqrt(squares / count + eps)
    if running_mean is not None:
        running_mean += momentum * (center - running_mean)
    if running_var is not None:
        running_var += momentum * (squares / (count - 1) - running_var)
    _normalize(x, y, mean, invstd, w, b, relu)


@quiet
def batch_norm_inference(
    *, x: Array, y: Array, running_mean: Array, running_var: Array, w: Array | None = None, b: Array | None = None,
    eps: float, relu: bool = False,
) -> None:  # fmt: skip
    """Normalize x[N,C,H,W] by the running statistics [C]."""
    invstd = (1 / np.sqrt(running_var.astype(np.float64) + eps)).astype(running_var.dtype)
    _normalize(x, y, running_mean, invstd, w, b, relu)


@quiet
def batch_norm_backward(
    *, x: Array, dy: Array, mean: Array, invstd: Array, w: Array | None = None, y: Array | None = None,
    dx: Array | None = None, dw: Array | None = None, db: Array | None = None, relu: bool = False,
) -> None:  # fmt: skip
    """Gradients of `batch_norm_forward`; each of dx, dw, db only where it is given. With `relu`, dy counts where y > 0.

    dx = w * invstd * (dy - mean(dy) - xhat * mean(dy * xhat)), xhat = (x - mean) * invstd (section 3 of the paper).
    """
    count = x.size // x.shape[1]
    center, deviation = (v[:, None, None] for v in (mean, invstd))

    def operands(n: int) -> tuple[Array, Array]:
        gradient = load(dy[n])
        if relu and y is not None:
            gradient = gradient.copy()
            zero_where_dead(gradient, y[n])
        return (load(x[n]) - center) * deviation, gradient

    shift_gradient, scale_gradient = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for n in range(len(x)):
        xhat, gradient = operands(n)
        shift_gradient += _per_channel(gradient)
        scale_gradient += _per_channel(np.multiply(xhat, gradient, out=xhat))
    if dw is not None:
        dw[...] = scale_gradient
    if db is not None:
        db[...] = shift_gradient
    if dx is None:
        return
    offset, slope = ((v / count).astype(mean.dtype)[:, None, None] for v in (shift_gradient, scale_gradient))
    factor = deviation if w is None else deviation * w[:, None, None]
    for n, out in enumerate(dx):
        xhat, gradient = operands(n)
        result = stage(out)
        np.subtract(gradient - offset, np.multiply(xhat, slope, out=xhat), out=result)
        np.multiply(result, factor, out=result)
        store(result, out)


def _sum_over_window(values: Array, before: int, after: int) -> Array:
    """total[c] = the sum of values[c - before .. c + after] on [C,H,W], channels outside counting as zero."""
    total: Array = values.copy()
    for offset in [*range(-before, 0), *range(1, after + 1)]:
        # total[c] += values[c + offset], wherever both channels exist.
        low, high = max(0, -offset), len(values) - max(0, offset)
        if low < high:
            total[low:high] += values[low + offset : high + offset]
    return total


@quiet
def local_response_norm_forward(
    *, x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float
) -> None:
    """y = x * scale^-beta, scale = k + alpha / size * (sum of x^2 over `size` channels around), [N,C,H,W] each.

    As in PyTorch the window of channel c is c - size // 2 .. c + (size - 1) // 2.
    """
    for source, saved, out in zip(x, scale, y, strict=True):
        image, powers, result = load(source), stage(saved), stage(out)
        np.multiply(_sum_over_window(image * image, size // 2, (size - 1) // 2), alpha / size, out=powers)
        powers += k
        np.multiply(image, powers**-beta, out=result)
        store(powers, saved)
        store(result, out)


@quiet
def local_response_norm_backward(
    *, x: Array, y: Array, scale: Array, dy: Array, dx: Array, size: int, alpha: float, beta: float, k: float
) -> None:
    """dx = dy * scale^-beta - 2 alpha beta / size * x * (sum of dy * y / scale over the windows that hold the channel).

    `k` is already in `scale`; it is an argument so that both directions take the same attributes.
    """
    for n, out in enumerate(dx):
        gradient, powers, result = load(dy[n]), load(scale[n]), stage(out)
        reached = _sum_over_window(gradient * load(y[n]) / powers, (size - 1) // 2, size // 2)
        reached *= load(x[n])
        reached *= 2 * alpha * beta / size
        np.subtract(gradient * powers**-beta, reached, out=result)
        store(result, out)
