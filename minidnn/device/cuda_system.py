"""What a CUDA device stands on: the libraries, pinned host memory, and the watch over allocations."""

from __future__ import annotations

import mmap
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np

from minidnn.device.base import Region
from minidnn.errors import DeviceError, OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.memory.pinned import check_host_limits
from minidnn.ops.cudnn_plans import load_cudnn
from minidnn.units import MiB, format_size, round_up

TOUCH_THREADS = 8


class Slabs:
    """Pinned host memory of exact sizes, given back for good.

    CuPy's pinned pool rounds up to powers of two and keeps what it has; cudaHostAlloc takes three times as long.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._taken: dict[int, tuple[Region, mmap.mmap]] = {}

    def take(self, nbytes: int) -> Region:
        """Raises OutOfPinnedMemory naming what is in the way."""
        check_host_limits(nbytes)
        try:
            memory = mmap.mmap(-1, max(nbytes, 1))
        except (OSError, ValueError) as error:
            raise OutOfPinnedMemory(
                f"{format_size(nbytes)} of host memory cannot be taken ({error}); "
                "use a smaller batch"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: slower to take, nothing else
                memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)[:nbytes]
        _touch(array)
        try:
            self._runtime.hostRegister(array.ctypes.data, max(nbytes, 1), 1)  # portable: every context may use it
        except self._runtime.CUDARuntimeError as error:
            raise OutOfPinnedMemory(
                f"{format_size(nbytes)} of host memory cannot be pinned ({error}); use a smaller batch or offload less"
            ) from error
        region = Region(nbytes, array.ctypes.data, array)
        self._taken[region.address] = (region, memory)
        return region

    def give_back(self, region: Region) -> None:
        """Return a region; one that is not a slab is let alone."""
        if region.address in self._taken:
            _, memory = self._taken.pop(region.address)
            self._runtime.hostUnregister(region.address)
            if hasattr(mmap, "MADV_REMOVE"):  # the bytes go at once, even where an array still refers to them
                with suppress(OSError):
                    memory.madvise(mmap.MADV_REMOVE)

    @property
    def regions(self) -> list[Region]:
        """What is taken now."""
        return [region for region, _ in self._taken.values()]


def refuse_allocations() -> AbstractContextManager[object]:
    """While it is entered, this thread cannot take device memory through CuPy: an iteration has its arena, no more."""
    try:
        import cupy
    except ImportError:  # the libraries are played by others
        return nullcontext()

    def refuse(nbytes: int) -> Any:
        raise OutOfDeviceMemory(
            f"{nbytes} bytes of device memory were asked for during a run, outside the arena: replace the op that "
            "asks for them"
        )

    guard: AbstractContextManager[object] = cupy.cuda.using_allocator(refuse)
    return guard


def open_libraries(index: int) -> tuple[Any, Any]:
    """CuPy's run-time bindings and the cuDNN frontend, once both are known to work."""
    advice = "install them with: pip install 'minidnn[cuda13]' (or [cuda12] for Pascal and Volta cards)"
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError as error:
        raise DeviceError(f"CUDA needs CuPy and the cuDNN frontend; {advice} ({error})") from error
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # CuPy and the driver raise several types
        raise DeviceError(f"no CUDA device can be used ({error}); install a driver, or use device='host'") from error
    if not 0 <= index < count:
        raise DeviceError(
            f"device is cuda:{index}; "
            f"it must be one of this machine's {count} CUDA devices, counted from 0"
        )
    try:
        cudnn = load_cudnn()
        cudnn.backend_version()
    except Exception as error:  # the library is missing, or its dependencies are
        raise DeviceError(f"CUDA needs cuDNN; {advice} ({error})") from error
    return runtime, cudnn


def _touch(array: np.ndarray) -> None:
    """Let the kernel give the pages now, several threads at once: page faults are what taking memory costs."""
    step = round_up(-(-array.nbytes // TOUCH_THREADS), 2 * MiB)

    def work(begin: int) -> None:
        array[begin : begin + step : mmap.PAGESIZE] = 0

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(0, array.nbytes, step)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
