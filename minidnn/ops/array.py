"""Arrays on a CUDA device as kernels see them: an address and a description. Nothing here touches the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from minidnn.errors import ShapeError
from minidnn.graph.tensor import ITEM_BYTES, Tensor

CODES = {"float32": "f32", "bfloat16": "bf16"}
"""The type's part of a kernel's name."""


@dataclass(frozen=True, slots=True)
class Array:
    """`shape` in logical order (N,C,H,W or N,F or less), `strides` in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor, address: int) -> Array:
        """A graph's tensor that lies at `address`."""
        return cls(address, tensor.shape, tensor.strides, tensor.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array."""
        return self.size * self.itemsize

    @property
    def shape4(self) -> tuple[int, int, int, int]:
        """N, C, H, W; missing axes have size 1."""
        n, c, h, w = (*self.shape, 1, 1, 1, 1)[:4]
        return n, c, h, w

    @property
    def strides4(self) -> tuple[int, int, int, int]:
        """Strides of N, C, H, W; missing axes have stride 1."""
        n, c, h, w = (*self.strides, 1, 1, 1, 1)[:4]
        return n, c, h, w

    @property
    def layouts(self) -> frozenset[str]:
        """The dense layouts that the memory has: "nchw", "nhwc", or both where axes have size 1."""
        found = []
        for name, order in (("nchw", (0, 1, 2, 3)), ("nhwc", (0, 2, 3, 1))):
            step, fits = 1, True
            for axis in reversed(order):
                fits = fits and (self.shape4[axis] == 1 or self.strides4[axis] == step)
                step *= self.shape4[axis]
            if fits:
                found.append(name)
        return frozenset(found)

    @classmethod
    def channels_last(cls, address: int, shape: tuple[int, int, int, int], dtype: str) -> Array:
        """A dense array whose channels lie innermost."""
        _, c, h, w = shape
        return cls(address, shape, (h * w * c, 1, w * c, c), dtype)

    def aligned(self, elements: int) -> bool:
        """Whether the address suits accesses of that many elements (16 bytes at most)."""
        return self.address % min(16, elements * self.itemsize) == 0

    @property
    def code(self) -> str:
        """The type's part of a kernel's name. Raises ShapeError for types that kernels do not compute in."""
        if self.dtype not in CODES:
            raise ShapeError(f"an operand has dtype {self.dtype}; on CUDA it must be float32 or bfloat16")
        return CODES[self.dtype]


def common_layout(function: str, *arrays: Array | None) -> str:
    """The layout that all arrays have: "nhwc" or "nchw"; where both fit, the one whose inner axis is longer."""
    given = [a for a in arrays if a is not None]
    common = frozenset.intersection(*(a.layouts for a in given))
    if not common:
        raise ShapeError(
            f"{function}: operands must lie in one layout, not in several "
            f"({', '.join(str(a.strides) for a in given)})"
        )
    if len(common) == 1:
        return next(iter(common))
    _, c, h, w = given[0].shape4
    return "nhwc" if c > h * w else "nchw"


def vector(extent: int, *arrays: Array | None) -> int:
    """Elements per access along an inner axis of that extent: what 16 bytes hold if all arrays allow it, else 1."""
    given = [a for a in arrays if a is not None]
    width = 16 // max(a.itemsize for a in given)
    return width if extent % width == 0 and all(a.aligned(width) for a in given) else 1


def suffix(code: str, width: int) -> str:
    """`f32x4`, `bf16`: the type and the width as kernel names spell them."""
    return code if width == 1 else f"{code}x{width}"
