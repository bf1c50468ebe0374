"""What a trainer refuses to be made of: one sentence each, before anything is opened."""

from __future__ import annotations

from math import isfinite

import numpy as np

from minidnn.device.base import Device
from minidnn.errors import ArgumentError
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer


def is_count(value: object) -> bool:
    """Whether it is an int of 1 or more."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def check_parts(net: object, loss: object, optimizer: object, device: object) -> None:
    """Each thing is what its name says, and no other trainer has the network."""
    for name, value, kind, example in (
        ("net", net, Sequential, "nn.Sequential(...)"), ("loss", loss, Loss, "nn.CrossEntropyLoss()"),
        ("optimizer", optimizer, Optimizer, "optim.SGD(lr=0.1)"), ("device", device, (str, Device), "'host'"),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} is {value!r}; it must be an object such as {example}")
    assert isinstance(net, Sequential)
    if net.owner is not None:
        raise ArgumentError("net is in another trainer that is still open; close that one first")


def check_numbers(batch: object, micro_batch: object, max_norm: object, seed: object) -> None:
    """Numbers in their ranges."""
    if not is_count(batch):
        raise ArgumentError(f"batch is {batch!r}; it must be an int of 1 or more")
    assert isinstance(batch, (int, np.integer))
    if micro_batch is not None and not (is_count(micro_batch) and micro_batch <= batch):  # type: ignore[operator]
        raise ArgumentError(f"micro_batch is {micro_batch!r}; it must be an int from 1 to the batch, {batch}")
    number = isinstance(max_norm, (int, float, np.floating)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and isfinite(max_norm) and max_norm > 0):  # type: ignore[arg-type,operator]
        raise ArgumentError(f"max_norm is {max_norm!r}; it must be a number above 0")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ArgumentError(f"seed is {seed!r}; it must be an int from 0 to 2^64 - 1")


def sample_shape(net: Sequential, given: object) -> tuple[int, ...]:
    """The shape of one sample: what is given, else what the network is made for."""
    shape = net.input_shape if given is None else given
    if shape is None:
        raise ArgumentError("input_shape is None; give the network or the trainer the (C, H, W) of one sample")
    if not isinstance(shape, (tuple, list)) or len(shape) not in (1, 3) or not all(is_count(n) for n in shape):
        raise ArgumentError(f"input_shape is {shape!r}; it must be (C, H, W), or (features,), each 1 or more")
    return tuple(int(n) for n in shape)
