"""What a trainer refuses to be made of and to be fed with: one sentence each, before anything is opened or begun."""

from __future__ import annotations

import numpy as np

from minidnn.arguments import count, is_count, number, sample_shape, seed_of, shown
from minidnn.device.base import Device
from minidnn.errors import ArgumentError, DataError
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer


def check_parts(net: object, loss: object, optimizer: object, device: object) -> None:
    """Each thing is what its name says, and no other trainer has the network."""
    for name, value, kind, example in (
        ("net", net, Sequential, "nn.Sequential(...)"), ("loss", loss, Loss, "nn.CrossEntropyLoss()"),
        ("optimizer", optimizer, Optimizer, "optim.SGD(lr=0.1)"), ("device", device, (str, Device), "'host'"),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} is {shown(value)}; it must be an object such as {example}")
    assert isinstance(net, Sequential)
    if net.owners:
        raise ArgumentError("net is in another trainer that is still open; close that one first")


def check_numbers(batch: object, micro_batch: object, max_norm: object, seed: object) -> None:
    """Numbers in their ranges."""
    most = count(batch, "batch")
    if micro_batch is not None and not (is_count(micro_batch) and micro_batch <= most):
        raise ArgumentError(f"micro_batch is {shown(micro_batch)}; it must be an int from 1 to the batch, {batch}")
    if max_norm is not None:
        number(max_norm, "max_norm", 0, bounds="()")
    seed_of(seed)


def shape_for(net: Sequential, given: object) -> tuple[int, ...]:
    """The shape of one sample: what is given, else what the network is made for."""
    shape = net.input_shape if given is None else given
    if shape is None:
        raise ArgumentError("input_shape is None; give the network or the trainer the (C, H, W) of one sample")
    return sample_shape(shape)


def checked_images(x: object, shape: tuple[int, ...], most: int | None = None) -> np.ndarray:
    """A batch of 1 to `most` samples of this shape, as an array of real numbers."""
    array = _as_array("x", x)
    if array.shape[1:] != shape or not 1 <= len(array) <= (most or len(array)):
        rows = f"1 to {most}" if most else "1 or more"
        raise ArgumentError(f"x has shape {list(array.shape)}; expected {rows} rows of {list(shape)}")
    return _real("x", array)


def checked_labels(y: object, shape: tuple[int, ...], classes: int | None) -> np.ndarray:
    """What the loss compares with, of this shape: integers below `classes`, or (None) real numbers."""
    array = _real("y", _as_array("y", y))
    if array.shape != shape:
        raise ArgumentError(f"y has shape {list(array.shape)}; expected {list(shape)}")
    if classes is not None and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= classes):
        raise DataError(
            f"y has labels of {array.dtype} from {array.min()} to {array.max()}; expected integers 0 to {classes - 1}"
        )
    return array


def _as_array(argument: str, value: object) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{argument} is {shown(value)}; it must be an array of numbers") from None


def _real(argument: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ArgumentError(f"{argument} is {array.dtype}; it must be real numbers")
    return array
