"""The project's own CUDA kernels (`kernels/*.cu`): loading, argument packing, binding.

A bound launch costs one driver call: function, grid and packed arguments are fixed when it is bound, since an
iteration repeats the same launches on the same addresses.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from minidnn.errors import DeviceError
from minidnn.ops.array import Array

FOLDER = Path(__file__).parent.parent / "kernels"
THREADS = 256
"""Threads of a block, as in common.cuh."""

Launcher = Callable[[], None]
Grid = tuple[int, int, int]


class FastDiv(ctypes.Structure):
    """Division by a constant, exact for 0 <= n < 2^31: (umulhi(n, multiplier) + n) >> shift.

    Granlund and Montgomery, Division by invariant integers using multiplication, PLDI 1994, section 4.
    """

    _fields_ = (("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32))

    def __init__(self, divisor: int) -> None:
        shift = (divisor - 1).bit_length()
        super().__init__(divisor, (1 << 32) * ((1 << shift) - divisor) // divisor + 1, shift)


class Split(ctypes.Structure):
    """Flat index -> (inner, middle, outer)."""

    _fields_ = (("inner", FastDiv), ("middle", FastDiv))

    def __init__(self, inner: int, middle: int) -> None:
        super().__init__(FastDiv(inner), FastDiv(middle))


class Strides(ctypes.Structure):
    """Element strides of N, C, H, W."""

    _fields_ = (("n", c_int64), ("c", c_int32), ("h", c_int32), ("w", c_int32))

    def __init__(self, array: Array) -> None:
        super().__init__(*array.strides4)


class Library(Protocol):
    """What ops need of kernels: the CUDA library below, or an emulation of it."""

    def bind(self, module: str, name: str, grid: Grid, block: Grid, stream: int, *arguments: Any) -> Launcher:
        """A launch of kernel `name` of `kernels/<module>.cu`, ready to be issued on `stream`.

        Arguments: Array or None (a pointer), int (int32), float (float32), or a ctypes value.
        """
        ...


def pack(arguments: tuple[Any, ...]) -> tuple[ctypes.Array[c_void_p], list[Any]]:
    """(array of pointers to the arguments, the arguments as ctypes values, which must stay alive)."""
    values: list[Any] = []
    for argument in arguments:
        if argument is None or isinstance(argument, Array):
            values.append(c_void_p(argument.address if argument else None))
        elif isinstance(argument, bool):
            values.append(c_int32(argument))
        elif isinstance(argument, int):
            if not -(2**31) <= argument < 2**31:
                raise DeviceError(f"a kernel argument is {argument}; it must fit 32 bits")
            values.append(c_int32(argument))
        elif isinstance(argument, float):
            values.append(c_float(argument))
        else:
            values.append(argument)
    return (c_void_p * len(values))(*(ctypes.addressof(v) for v in values)), values


def source(module: str) -> str:
    """The text that is compiled: what all files share, what a family shares (pooling.cuh for pooling.cu,
    pooling_large.cu and pooling_planes.cu), then the file. One text, so that a compiler cache sees all of it."""
    family = FOLDER / f"{module.partition('_')[0]}.cuh"
    paths = [FOLDER / "common.cuh", *([family] if family.exists() else []), FOLDER / f"{module}.cu"]
    return "".join(path.read_text() for path in paths)


def modules() -> list[str]:
    """Names of the kernel files."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


def digest() -> str:
    """Of all sources: what was measured with others does not hold."""
    return hashlib.sha256("".join(map(source, modules())).encode()).hexdigest()[:16]


def load_library(name: str) -> str:
    """Load one of CUDA's libraries wherever it is installed (wheels, toolkit, system) and return its path.

    With NVRTC its built-in headers are loaded too: cuDNN's run-time compiled engines look for them by name only.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = Path(load_nvidia_dynamic_lib(name).abs_path)
    if name == "nvrtc":
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*"))[:1]:
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return str(path)


class Kernels:
    """Kernels on the current CUDA device. A file is compiled at first use; CuPy keeps it on disk by architecture."""

    def __init__(self) -> None:
        import cupy
        from cupy_backends.cuda.api import driver

        self._cupy = cupy
        self._launch = driver.launchKernel
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, int] = {}

    def function(self, module: str, name: str) -> int:
        """Address of the kernel's function handle."""
        if name not in self._functions:
            if module not in self._modules:
                self._modules[module] = self._compile(module)
            self._functions[name] = self._modules[module].get_function(name).kernel.ptr
        return self._functions[name]

    def _compile(self, module: str) -> Any:
        code = self._cupy.RawModule(code=source(module), options=("-std=c++17",))
        try:
            code.compile()
        except self._cupy.cuda.compiler.CompileException as error:
            raise DeviceError(
                f"kernels/{module}.cu does not compile for this card ({error}); "
                "use another card or CUDA toolkit"
            ) from error
        return code

    def bind(self, module: str, name: str, grid: Grid, block: Grid, stream: int, *arguments: Any) -> Launcher:
        """See `Library.bind`."""
        pointers, values = pack(arguments)
        launch = partial(
            self._launch, self.function(module, name), *grid, *block, 0, stream, ctypes.addressof(pointers), 0
        )
        launch.keep = (pointers, values)  # type: ignore[attr-defined]
        return launch


def sequence(*launches: Launcher) -> Launcher:
    """Several launches as one."""
    if len(launches) == 1:
        return launches[0]

    def run() -> None:
        for launch in launches:
            launch()

    return run


def blocks(count: int, per_block: int = THREADS) -> int:
    """Blocks that cover `count` items."""
    return -(-count // per_block)


def image_grid(count: int, images: int, per_block: int = THREADS) -> Grid:
    """Blocks over one image's items, times images; more images than a grid holds are looped over."""
    if count >= 2**31:
        raise DeviceError(f"an image has {count} items; a kernel takes fewer than 2^31")
    return blocks(count, per_block), min(images, 65535), 1


BLOCK: Grid = (THREADS, 1, 1)
i64, u32, u64 = c_int64, c_uint32, c_uint64
