"""Two places where kernels run in tests: the CPU (emulated, always) and a CUDA device (where there is one)."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from minidnn.device.base import numpy_dtype, view
from minidnn.graph.tensor import Role, Tensor
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Grid, Launcher, Library, pack, source
from minidnn.ops.plans import PlanStore

GUARD = 64
"""Bytes around every emulated array that must keep their pattern."""
POISON = 0xFF
"""Every float made of these bytes is NaN: outputs start that way."""
SCRATCH_BYTES = 4 * 2**20


def tensor_of(shape: tuple[int, ...], dtype: str, layout: str) -> Tensor:
    """A description, as a graph would give it."""
    return Tensor("t", shape, dtype, Role.ACTIVATION, layout)


class Place(Protocol):
    """Where arrays live and kernels run."""

    context: Context

    def put(self, value: np.ndarray, layout: str = "NCHW", dtype: str | None = None) -> Array:
        """An array with that value (logical order) in that memory layout."""

    def empty(self, shape: tuple[int, ...], dtype: str, layout: str = "NCHW") -> Array:
        """A poisoned array."""

    def get(self, array: Array) -> np.ndarray:
        """The array's value in logical order."""

    def check(self) -> None:
        """Fail if anything outside the arrays was written, or a launch failed."""


class Emulated:
    """Arrays in host memory between guards; kernels compiled with g++ and run by emulate.hpp."""

    def __init__(self, precision: str = "fp32") -> None:
        self.memory: dict[int, tuple[np.ndarray, Tensor]] = {}
        scratch = self.empty((SCRATCH_BYTES // 4,), "float32")
        self.context = Context(EmulatedKernels(), 0, (scratch.address, SCRATCH_BYTES), precision)

    def put(self, value: np.ndarray, layout: str = "NCHW", dtype: str | None = None) -> Array:
        array = self.empty(value.shape, dtype or str(value.dtype), layout)
        self._view(array)[...] = value
        return array

    def empty(self, shape: tuple[int, ...], dtype: str, layout: str = "NCHW") -> Array:
        t = tensor_of(shape, dtype, layout)
        buffer = np.full(t.nbytes + 2 * GUARD + 16, POISON, np.uint8)
        start = -(buffer.ctypes.data + GUARD) % 16 + GUARD
        buffer = buffer[start - GUARD : start + t.nbytes + GUARD]
        address = buffer.ctypes.data + GUARD
        self.memory[address] = (buffer, t)
        return Array.of(t, address)

    def _view(self, array: Array) -> np.ndarray:
        buffer, t = self.memory[array.address]
        return view(t, buffer[GUARD:])

    def get(self, array: Array) -> np.ndarray:
        return np.array(self._view(array))

    def check(self) -> None:
        for buffer, t in self.memory.values():
            assert (buffer[:GUARD] == POISON).all(), f"a kernel wrote in front of an array of shape {t.shape}"
            assert (buffer[-GUARD:] == POISON).all(), f"a kernel wrote behind an array of shape {t.shape}"


class EmulatedKernels:
    """The library interface over emulated kernels. Checks number and sizes of the arguments at each launch."""

    loaded: dict[str, ctypes.CDLL] = {}  # noqa: RUF012 - one per process, like the dynamic linker's own

    def bind(self, module: str, name: str, grid: Grid, block: Grid, stream: int, *arguments: Any) -> Launcher:
        library = self.loaded.setdefault(module, None) or _compile(module)  # type: ignore[arg-type]
        self.loaded[module] = library
        pointers, values = pack(arguments)
        sizes = (ctypes.c_int * 64)()
        count = library.emulated_parameters(name.encode(), sizes)
        assert count >= 0, f"kernels/{module}.cu has no kernel {name}"
        assert [ctypes.sizeof(v) for v in values] == list(sizes[:count]), f"{name}: arguments do not match"
        assert max(grid[1:]) <= 65535, f"{name}: impossible grid {grid}"
        assert block[0] * block[1] * block[2] <= 1024, f"{name}: impossible block {block}"

        def run() -> None:
            triple = ctypes.c_uint * 3
            assert values is not None
            assert library.emulate(name.encode(), triple(*grid), triple(*block), pointers) == 0, f"{name}: deadlock"

        return run


def _compile(module: str) -> ctypes.CDLL:
    header = (Path(__file__).parent / "emulate.hpp").read_text()
    text = header + source(module)
    folder = Path(tempfile.gettempdir()) / "minidnn-emulated"
    folder.mkdir(exist_ok=True)
    target = folder / f"{module}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        flags = ["g++", "-std=c++17", "-x", "c++", "-w", "-"]
        expanded = subprocess.run([*flags, "-E", "-P"], input=text, text=True, capture_output=True, check=True).stdout
        names = re.findall(r'extern "C"\s+void\s+(\w+)\s*\(', expanded)
        table = ", ".join(f'entry("{n}", {n})' for n in names)
        text += f"\nstatic std::vector<Entry> all = {{{table}}};\n"
        text += "static std::vector<Entry>& entries() { return all; }\n"
        part = target.with_suffix(f".{id(text)}.tmp")
        subprocess.run([*flags, "-O1", "-fPIC", "-shared", "-o", str(part)], input=text, text=True, check=True)
        part.replace(target)
    return ctypes.CDLL(str(target))


def why_no_emulator() -> str | None:
    """None where kernels can be emulated, else the reason."""
    return None if shutil.which("g++") else "kernels are emulated with g++, which is not installed here"


def why_no_cuda() -> str | None:
    """None where a CUDA device can be used, else the reason."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install minidnn[cuda13])"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # whatever the driver says is the reason
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


class Cuda:
    """Arrays in device memory; kernels, and with `libraries` cuDNN and cuBLAS, as the device has them."""

    def __init__(self, kernels: Library, precision: str = "fp32", libraries: bool = False) -> None:
        import cupy

        self.cupy = cupy
        self.memory: dict[int, tuple[Any, Tensor]] = {}
        scratch = self.empty((SCRATCH_BYTES // 4,), "float32")
        place = (scratch.address, SCRATCH_BYTES)
        self.context = Context(kernels, 0, place, precision)
        if libraries:
            from minidnn.ops.blas import Blas
            from minidnn.ops.cudnn_plans import Plans

            plans = Plans(0, PlanStore(None), tried=1000)
            self.context = replace(self.context, blas=Blas(0, place), plans=plans)

    def close(self) -> None:
        """Give the libraries' handles back."""
        self.check()
        if self.context.blas is not None and self.context.plans is not None:
            self.context.blas.close()
            self.context.plans.close()

    def put(self, value: np.ndarray, layout: str = "NCHW", dtype: str | None = None) -> Array:
        t = tensor_of(value.shape, dtype or str(value.dtype), layout)
        host = np.empty(max(t.nbytes, 1), np.uint8)
        view(t, host)[...] = value
        return self._keep(self.cupy.asarray(host), t)

    def empty(self, shape: tuple[int, ...], dtype: str, layout: str = "NCHW") -> Array:
        t = tensor_of(shape, dtype, layout)
        return self._keep(self.cupy.full(max(t.nbytes, 1), POISON, np.uint8), t)

    def _keep(self, buffer: Any, t: Tensor) -> Array:
        address = int(buffer.data.ptr)
        self.memory[address] = (buffer, t)
        return Array.of(t, address)

    def get(self, array: Array) -> np.ndarray:
        self.cupy.cuda.runtime.deviceSynchronize()
        buffer, t = self.memory[array.address]
        return np.array(view(t, buffer.get()))

    def check(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """max |found - wanted| / max |wanted|; infinite where only one of the two is NaN."""
    found, wanted = (np.asarray(a, dtype=np.float64) for a in (found, wanted))
    if (np.isnan(found) != np.isnan(wanted)).any():
        return float("inf")
    other = (found != wanted) & ~np.isnan(wanted)  # infinities are equal or far apart
    gap = np.max(np.abs(found[other] - wanted[other]), initial=0.0)
    return float(gap / max(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0), 1e-30))


def bf16(value: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16."""
    return value.astype(numpy_dtype("bfloat16"))
