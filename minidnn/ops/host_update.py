"""Weight updates on the host, PyTorch's formulas in one pass each. List arguments have one entry per weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np

from minidnn.ops.host_arrays import Array, load, quiet, store
from minidnn.ops.host_loops import adapt, descend, descend_with_momentum

_LR, _STEP, _CORRECTION1, _CORRECTION2 = 0, 2, 6, 7  # places in `scalars`
_CHUNK = 1 << 13  # elements per partial dot product: few enough that float32 loses nothing that counts


def _in_place(loop: Callable[..., None], numbers: Sequence[float], gradient: Array, *updated: Array) -> None:
    """Run `loop(gradient, *updated, numbers)` on flat arrays and bring the updated ones home."""
    results = [load(array) for array in updated]
    flat = [array.reshape(-1) for array in (load(gradient), *results)]
    loop(*flat, np.array(numbers, results[0].dtype))
    for result, array in zip(results, updated, strict=True):
        store(result, array)


def _refresh(copies: Sequence[Array] | None, w: Sequence[Array]) -> None:
    """Renew the bfloat16 copies that convolutions read: of the first weights in the list, biases have none."""
    if copies is not None:
        for copy, weight in zip(copies, w, strict=False):
            copy[...] = weight


@quiet
def sgd_update(
    *, w: Sequence[Array], dw: Sequence[Array], momentum: Sequence[Array] | None = None,
    copy: Sequence[Array] | None = None, scalars: Array, clip: Array | None = None, momentum_factor: float = 0.0,
    dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, maximize: bool = False,
) -> None:  # fmt: skip
    """torch.optim.SGD. In the first step (step 0 in `scalars`) the momentum buffer becomes the gradient itself.

    `clip` [1] multiplies the gradients. dw is read only. `copy` holds the weights' bfloat16 copies.
    """
    factor = (1.0 if clip is None else float(clip[0])) * (-1 if maximize else 1)
    first = scalars[_STEP] == 0
    numbers = [scalars[_LR], factor, weight_decay, momentum_factor, 1 if first else 1 - dampening, first, nesterov]
    for i, (weight, gradient) in enumerate(zip(w, dw, strict=True)):
        if momentum is None:
            _in_place(descend, numbers, gradient, weight)
        else:
            _in_place(descend_with_momentum, numbers, gradient, weight, momentum[i])
    _refresh(copy, w)


@quiet
def adam_update(
    *, w: Sequence[Array], dw: Sequence[Array], m: Sequence[Array], v: Sequence[Array],
    copy: Sequence[Array] | None = None, scalars: Array, clip: Array | None = None, beta1: float = 0.9,
    beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, decoupled: bool = False,
) -> None:  # fmt: skip
    """torch.optim.Adam, or AdamW where `decoupled` is set. 1 - beta^t come in `scalars`; m and v start as zeros.

    `clip` [1] multiplies the gradients. dw is read only. `copy` holds the weights' bfloat16 copies.
    """
    lr, correction1, correction2 = (float(scalars[i]) for i in (_LR, _CORRECTION1, _CORRECTION2))
    shrink, decay = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    factor = 1.0 if clip is None else float(clip[0])
    numbers = [
        lr / correction1, sqrt(correction2), factor, decay, shrink, 1 - beta1, beta2, 1 - beta2, eps,
    ]  # fmt: skip
    for weight, gradient, mean, square in zip(w, dw, m, v, strict=True):
        _in_place(adapt, numbers, gradient, weight, mean, square)
    _refresh(copy, w)


@quiet
def accumulate(*, source: Sequence[Array], total: Sequence[Array]) -> None:
    """total += source, entry by entry."""
    for part, sum_ in zip(source, total, strict=True):
        np.add(sum_, part, out=sum_)


@quiet
def clip_factor(*, dw: Sequence[Array], clip: Array, max_norm: float) -> None:
    """clip[0] = min(1, max_norm / (norm + 1e-6)), norm over all of dw: the factor of torch.nn.utils.clip_grad_norm_."""
    squares = 0.0
    for gradient in dw:
        flat = load(gradient).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            squares += float(np.dot(part, part))
    clip[0] = np.minimum(1.0, max_norm / (sqrt(squares) + 1e-6))
