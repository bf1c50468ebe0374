"""A CUDA device without a GPU: the run-time library, cuDNN and cuBLAS played by the host, kernels emulated.

`CudaDevice` over these is the real one in all that it does itself: addresses, binding, streams, events, workers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from minidnn.device.base import numpy_dtype
from minidnn.device.cuda import CudaDevice
from minidnn.ops.array import Array
from minidnn.ops.kernels import Launcher
from minidnn.ops.numpy_ops import OPS
from minidnn.ops.plans import PlanStore, Problem
from minidnn.profile.profile import Algorithm, HostCosts, Link, Shares
from tests.cuda.support import POISON, EmulatedKernels

TOTAL = 2**30
H2D = 1
LINK = Link(5e10, 5e10)


class RuntimeLibrary:
    """Commands run when they are issued; memory is the host's, poisoned when taken."""

    class CUDARuntimeError(RuntimeError):
        """As CuPy raises it."""

    streamNonBlocking = eventDisableTiming = 1
    eventDefault = 0
    capability = (9, 0)

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.registered: set[int] = set()
        self.handles: set[int] = set()
        self.waits: list[tuple[int, int]] = []
        self.unwritten: list[tuple[int, bytes]] = []  # what pageable copies have read and may not have written yet
        self.current = threading.local()
        self._next = 1

    def __getattr__(self, name: str) -> Any:  # *Synchronize, eventRecord: nothing to do
        if name in ("streamSynchronize", "eventSynchronize", "eventRecord"):
            return lambda *arguments: None
        raise AttributeError(name)

    def setDevice(self, index: int) -> None:
        self.current.index = index

    def deviceSynchronize(self) -> None:
        """Of the thread's current device: this is 0."""
        if getattr(self.current, "index", 0) == 0:
            for target, data in self.unwritten:
                ctypes.memmove(target, data, len(data))
            self.unwritten.clear()

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "major": self.capability[0], "minor": self.capability[1]}

    def memGetInfo(self) -> tuple[int, int]:
        return TOTAL - sum(a.nbytes for a in self.memory.values()), TOTAL

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.memGetInfo()[0]:
            raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        array = np.full(nbytes + 512, POISON, np.uint8)
        address = -(-array.ctypes.data // 512) * 512
        self.memory[address] = array
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if kind == H2D:
            self.unwritten.append((target, ctypes.string_at(source, nbytes)))
        else:
            ctypes.memmove(target, source, nbytes)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert getattr(self.current, "index", 0) == 0, "a stream of another device"
        assert stream in self.handles
        ctypes.memmove(target, source, nbytes)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self.registered.add(address)

    def hostUnregister(self, address: int) -> None:
        self.registered.remove(address)

    def _handle(self) -> int:
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._handle()

    def eventCreateWithFlags(self, flags: int) -> int:
        assert getattr(self.current, "index", 0) == 0, "an event of another device"
        return self._handle()

    def streamWaitEvent(self, stream: int, event: int) -> None:
        assert {stream, event} <= self.handles
        self.waits.append((stream, event))

    def eventElapsedTime(self, begin: int, end: int) -> float:
        return 1.0

    def streamDestroy(self, handle: int) -> None:
        self.handles.remove(handle)

    def eventDestroy(self, handle: int) -> None:
        self.handles.remove(handle)


class Frontend:
    """As much of the cuDNN frontend as `CudaDevice` itself asks for."""

    __version__ = "0"

    @staticmethod
    def backend_version() -> int:
        return 0

    @staticmethod
    def backend_version_string() -> str:
        return "0.0.0"


def at(array: Array) -> np.ndarray:
    """The memory of an array as NumPy sees it."""
    dtype = numpy_dtype(array.dtype)
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.address)
    flat = np.ctypeslib.as_array(raw).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, array.shape, [s * dtype.itemsize for s in array.strides])


class HostPlans:
    """Two plans for each convolution: one with a fused epilogue and a workspace, one without either."""

    LARGE = 4096
    """Bytes of the workspace."""

    def __init__(self, stream: int, store: PlanStore, deterministic: bool = False) -> None:
        self.store = store

    def algorithms(self, problem: Problem) -> tuple[Algorithm, ...]:
        known = self.store.algorithms(problem.key)
        if not known:
            known = (Algorithm("fused host", self.LARGE), Algorithm("host", 0))
            self.store.put(problem.key, known, {})
        return known

    def explore(self, problem: Problem, compiled: int = 0) -> tuple[Algorithm, ...]:
        return self.algorithms(problem)

    def in_parts(self, problem: Problem) -> tuple[Algorithm, ...]:
        return ()

    def record(self, problem: Problem, times: dict[str, float | None]) -> None:
        known = [a for a in self.algorithms(problem) if times.get(a.name, 0.0) is not None]
        self.store.put(problem.key, tuple(replace(a, ms=times.get(a.name, a.ms)) for a in known), {})

    def bind(self, problem: Problem, algorithm: str, workspace: int) -> Launcher:
        fused = algorithm.startswith("fused")
        assert workspace or not fused
        arrays = {n: at(a) for n, a in problem.operands if fused or n not in ("b", "mask")}
        attributes: dict[str, Any] = {
            "stride": problem.stride, "padding": problem.padding, "dilation": problem.dilation,
            "groups": problem.groups, "algorithm": "implicit", "workspace": None,
        }  # fmt: skip
        if problem.function == "conv2d_forward":
            attributes["relu"] = problem.relu and fused
        return lambda: OPS[problem.function](**arrays, **attributes)

    def close(self) -> None:
        """Nothing to give back."""


class HostBlas:
    """Matrix products by NumPy."""

    def __init__(self, stream: int, workspace: tuple[int, int]) -> None:
        assert workspace[0] % 256 == 0

    def product(
        self, a: Array, b: Array, c: Array, m: int, n: int, k: int, *,
        transpose_a: bool = False, transpose_b: bool = False, precision: str,
    ) -> Launcher:  # fmt: skip
        left = at(Array(a.address, (k, m) if transpose_a else (m, k), (m, 1) if transpose_a else (k, 1), a.dtype))
        right = at(Array(b.address, (n, k) if transpose_b else (k, n), (k, 1) if transpose_b else (n, 1), b.dtype))
        out = at(Array(c.address, (m, n), (n, 1), c.dtype))

        def run() -> None:
            x, y = (v.astype(np.float32) for v in (left, right))
            out[...] = (x.T if transpose_a else x) @ (y.T if transpose_b else y)

        return run

    def close(self) -> None:
        """Nothing to give back."""


@contextmanager
def fake_cuda(**options: Any) -> Iterator[tuple[CudaDevice, RuntimeLibrary]]:
    """An open device, and the library that it talks to."""
    runtime = RuntimeLibrary()
    replaced: dict[str, Any] = {
        "open_libraries": lambda index: (runtime, Frontend), "Kernels": EmulatedKernels, "Plans": HostPlans,
        "Blas": HostBlas, "PlanStore": lambda path, kernels: PlanStore(None, kernels),
    }  # fmt: skip
    measured: dict[str, Any] = {
        "op_times": lambda device, work, scratch: dict.fromkeys(work, 1.0), "link_rates": lambda device: LINK,
        "host_times": lambda device, graph, ways, scratch: HostCosts(0.01, 0.005, 0.02),
        "copy_shares": lambda device, graph, ways, scratch: [Shares(0.8, 0.9)] * len(ways),
        "times_in_place": lambda device, graph, ways, scratch: {key: way.ms for key, way in ways.items()},
    }  # fmt: skip
    parts = patch.multiple("minidnn.device.cuda", **replaced), patch.multiple("minidnn.device.cuda_profile", **measured)
    with parts[0], parts[1]:
        device = CudaDevice(**options)
        try:
            yield device, runtime
        finally:
            device.close()
