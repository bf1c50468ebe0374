"""Where an op is bound: the device's libraries, one stream, the scratch memory, and how exact it must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minidnn.errors import DeviceError
from minidnn.ops.array import Array
from minidnn.ops.kernels import Grid, Launcher, Library
from minidnn.units import format_size

if TYPE_CHECKING:
    from minidnn.ops.blas import Blas
    from minidnn.ops.cudnn_plans import Plans


@dataclass(frozen=True)
class Context:
    """What ops get besides their arguments.

    `scratch`: (address, nbytes) of memory that an op may use while it runs; ops on one stream share it.
    `blas` and `plans` serve matrix products and convolutions.
    """

    kernels: Library
    stream: int
    scratch: tuple[int, int]
    precision: str = "fp32"
    deterministic: bool = False
    blas: Blas | None = field(default=None, repr=False)
    plans: Plans | None = field(default=None, repr=False)

    def bind(self, module: str, name: str, grid: Grid, block: Grid, *arguments: object) -> Launcher:
        """A kernel launch on the stream."""
        return self.kernels.bind(module, name, grid, block, self.stream, *arguments)

    def floats(self, count: int, offset: int = 0) -> Array:
        """`count` float32 of the scratch memory, from element `offset` on."""
        address, nbytes = self.scratch
        need = (offset + count) * 4
        if need > nbytes:
            raise DeviceError(f"an op needs {format_size(need)} of scratch; there are {format_size(nbytes)}")
        return Array(address + offset * 4, (count,), (1,), "float32")
