"""Tensors of the graph: names, shapes and bytes. A `Tensor` holds no memory; a device gives it some for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod


class Role(str, Enum):
    """What a tensor is to training. Memory policies and plots go by it."""

    INPUT = "input"
    LABEL = "label"
    ACTIVATION = "activation"
    MASK = "mask"
    STATISTIC = "statistic"
    GRADIENT = "gradient"
    WEIGHT = "weight"
    WEIGHT_GRADIENT = "weight_gradient"
    OPTIMIZER_STATE = "optimizer_state"
    WORKSPACE = "workspace"
    LOSS = "loss"
    SCALARS = "scalars"


PERSISTENT_ROLES = frozenset(
    {Role.WEIGHT, Role.STATISTIC, Role.OPTIMIZER_STATE, Role.SCALARS, Role.LABEL, Role.LOSS}
)
"""Roles whose tensors have a fixed place for good, in every memory mode: what outlives an iteration, and the few bytes
of labels, scalars and loss. (A batch's own mean and variance are a MASK.)"""

FROM_HOST = (Role.SCALARS, Role.INPUT, Role.LABEL)
"""Roles of what every iteration gets from its batch slot, in this order."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1, "int64": 8}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array of one iteration.

    `shape` is the logical shape (N,C,H,W or N,F; weights K,C,R,S or O,F). `layout` says how it lies in memory:
    `"NCHW"` (row-major in logical order) or `"NHWC"` (channels innermost; weights K,R,S,C).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    layout: str = "NCHW"
    strides: tuple[int, ...] = field(init=False)  # in elements, logical order
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        order = list(range(len(self.shape)))
        if self.layout == "NHWC" and len(self.shape) == 4:
            order = [0, 2, 3, 1]
        strides, step = [0] * len(order), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= self.shape[axis]
        object.__setattr__(self, "strides", tuple(strides))
        object.__setattr__(self, "nbytes", prod(self.shape) * ITEM_BYTES[self.dtype])

    def lies_like(self, other: Tensor) -> bool:
        """Whether equal values of both are the same bytes."""
        steps = zip(self.shape, self.strides, other.strides, strict=False)
        return self.dtype == other.dtype and self.shape == other.shape and all(n == 1 or a == b for n, a, b in steps)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)
