"""Softmax and the losses on the host. A loss is summed over the micro-batch and scaled by the whole batch's weight, so
that the parts of a batch add up to PyTorch's mean."""

from __future__ import annotations

import numpy as np

from minidnn.errors import DataError
from minidnn.ops.host_arrays import Array, load, quiet, stage, store

_INVERSE_WEIGHT = 1  # place in `scalars`


def _shifted(x: Array) -> Array:
    """x minus its maximum over axis 1: exp cannot overflow."""
    shifted: Array = x - x.max(axis=1, keepdims=True)
    return shifted


@quiet
def softmax_forward(*, x: Array, y: Array) -> None:
    """y = exp(x) / sum of exp(x) over axis 1. y may be x."""
    result = stage(y)
    np.exp(_shifted(load(x)), out=result)
    np.divide(result, result.sum(axis=1, keepdims=True), out=result)
    store(result, y)


@quiet
def softmax_backward(*, y: Array, dy: Array, dx: Array) -> None:
    """dx = y * (dy - sum of y * dy over axis 1). dx may be dy."""
    value, gradient, result = load(y), load(dy), stage(dx)
    np.multiply(value, gradient - (value * gradient).sum(axis=1, keepdims=True), out=result)
    store(result, dx)


def _rows(logits: Array) -> Array:
    """[N,classes], of a view that Flatten has let through: [N,C,H,W]."""
    return logits if logits.ndim == 2 else logits.reshape(len(logits), -1)


def _targets(
    labels: Array, classes: int, dtype: np.dtype[np.generic], class_weight: Array | None, smoothing: float
) -> Array:
    """What each log-probability weighs in a sample's loss [N,classes], as PyTorch's cross_entropy defines it.

    (1 - smoothing) * weight[label] at the label, plus smoothing / classes * weight[c] at every class c.
    """
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise DataError(f"labels hold {wrong}; with {classes} classes a label must be between 0 and {classes - 1}")
    weight = np.ones(classes, dtype) if class_weight is None else class_weight
    targets = np.empty((len(labels), classes), dtype)
    targets[...] = weight * dtype.type(smoothing / classes)
    targets[np.arange(len(labels)), labels] += weight[labels] * dtype.type(1 - smoothing)
    return targets


@quiet
def cross_entropy_forward(
    *, x: Array, labels: Array, y: Array, loss: Array, scalars: Array, class_weight: Array | None = None,
    label_smoothing: float = 0.0,
) -> None:  # fmt: skip
    """y = softmax(x) [N,classes] (y may be x); loss[0] = the weighted samples' losses, summed, times inverse_weight.

    labels is int64 [N]; loss[1] = how many samples have their largest logit at their label. x and y may be flattened
    views [N,C,H,W].
    """
    x, y = _rows(x), _rows(y)
    logits, result = load(x), stage(y)
    shifted, correct = _shifted(logits), np.count_nonzero(logits.argmax(axis=1) == labels)
    targets = _targets(labels, x.shape[1], shifted.dtype, class_weight, label_smoothing)
    np.exp(shifted, out=result)
    total = result.sum(axis=1, keepdims=True)
    np.divide(result, total, out=result)
    log_probability = shifted - np.log(total)
    # A class of weight 0 counts nothing, not even where its probability is 0 and the product would be NaN.
    terms = np.where(targets == 0, targets, targets * log_probability)
    loss[0] = -terms.sum(axis=1).sum(dtype=np.float64) * scalars[_INVERSE_WEIGHT]
    loss[1] = correct
    store(result, y)


@quiet
def cross_entropy_backward(
    *, y: Array, labels: Array, dx: Array, scalars: Array, class_weight: Array | None = None,
    label_smoothing: float = 0.0,
) -> None:  # fmt: skip
    """dx [N,classes] (or its view), the gradient of `cross_entropy_forward`'s loss[0], from its y. dx may be y."""
    y, dx = _rows(y), _rows(dx)
    probability, result = load(y), stage(dx)
    targets = _targets(labels, y.shape[1], probability.dtype, class_weight, label_smoothing)
    np.subtract(probability * targets.sum(axis=1, keepdims=True), targets, out=result)
    np.multiply(result, result.dtype.type(scalars[_INVERSE_WEIGHT]), out=result)
    store(result, dx)


@quiet
def mse_forward(*, x: Array, target: Array, loss: Array, scalars: Array) -> None:
    """loss[0] = the sum of (x - target)^2 times inverse_weight; loss[1] = 0."""
    difference = load(x) - load(target).reshape(x.shape)
    loss[0] = np.square(difference, out=difference).sum(dtype=np.float64) * scalars[_INVERSE_WEIGHT]
    loss[1] = 0


@quiet
def mse_backward(*, x: Array, target: Array, dx: Array, scalars: Array) -> None:
    """dx = 2 (x - target) times inverse_weight."""
    result = stage(dx)
    np.subtract(load(x), load(target).reshape(x.shape), out=result)
    np.multiply(result, result.dtype.type(2 * scalars[_INVERSE_WEIGHT]), out=result)
    store(result, dx)
