"""A CUDA device: one arena by one cudaMalloc, non-blocking streams, events, pinned slabs, bound ops.

CuPy's thin bindings reach the driver and run-time library; memory comes from nowhere but `arena` and `pinned`.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from minidnn.arguments import shown
from minidnn.device.base import Device, Event, Launcher, MemoryInfo, Operand, Region, Stream, check_open
from minidnn.device.cuda_profile import card_profile
from minidnn.device.cuda_system import Slabs, open_libraries, refuse_allocations
from minidnn.device.workers import Completion, Workers
from minidnn.errors import ArgumentError, DeviceError, OutOfDeviceMemory
from minidnn.graph.graph import Graph, Target
from minidnn.graph.op import Op
from minidnn.ops.array import Array
from minidnn.ops.blas import Blas
from minidnn.ops.context import Context
from minidnn.ops.cuda_ops import CONVOLUTIONS, OPS
from minidnn.ops.cudnn_plans import Plans
from minidnn.ops.kernels import Kernels, digest
from minidnn.ops.plans import PlanStore
from minidnn.profile.profile import Profile
from minidnn.units import MiB, format_size

PRECISIONS = ("fp32", "tf32", "bf16")
SCRATCH_BYTES = 32 * MiB
"""The arena's first bytes: cuBLAS's workspace (what Hopper wants) and partial sums of our kernels."""
TENSOR_CORES = 8, 0
"""From this compute capability on they take tf32 and bf16; those of Volta and Turing take fp16 alone."""
LOADING_MS = 20.0
"""What a first launch may take longer, because its kernel is loaded."""
_H2D, _D2H, _D2D = 1, 2, 3


class CudaStream(Stream):
    """A non-blocking stream."""

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self.handle = handle


class CudaEvent(Event):
    """An event behind what its stream was given. Its handle goes back to the device's stock with the last reference."""

    __slots__ = ("_stock", "handle")

    def __init__(self, handle: int, stock: list[int]) -> None:
        self.handle = handle
        self._stock = stock

    def __del__(self) -> None:
        self._stock.append(self.handle)


class CudaDevice(Device):
    """An NVIDIA GPU. `deterministic`: only plans that repeat their bits.

    Raises DeviceError saying what is missing: CuPy, the driver, cuDNN, the card.
    """

    kind = "cuda"
    target = "native"
    captures = True
    scratch_bytes = SCRATCH_BYTES

    def __init__(self, index: int = 0, *, precision: str = "fp32", deterministic: bool = False) -> None:
        if precision not in PRECISIONS:
            raise ArgumentError(f"precision is {shown(precision)}; on CUDA it must be one of {', '.join(PRECISIONS)}")
        self.index = index
        self.deterministic = deterministic
        self._runtime, self._cudnn = open_libraries(index)
        self._runtime.setDevice(index)
        self._slabs = Slabs(self._runtime)
        properties = self._runtime.getDeviceProperties(index)
        self.name = properties["name"].decode()
        capability = properties["major"], properties["minor"]
        self._tensor_cores = capability >= TENSOR_CORES
        if precision == "bf16" and not self._tensor_cores:
            raise ArgumentError(
                f"precision is 'bf16'; {self.name} has compute capability {'.'.join(map(str, capability))}, and cuDNN "
                f"convolves in bf16 from {'.'.join(map(str, TENSOR_CORES))} on: use 'fp32'"
            )
        self._streams: dict[str, CudaStream] = {}
        self._events: list[int] = []  # handles that no event uses now
        self._stamps: list[int] = []  # the same with time stamps
        self._made: list[int] = []
        self._arenas: dict[int, Region] = {}
        self._graphs: list[int] = []
        self._contexts: dict[tuple[str, int, str], Context] = {}
        self._plans: dict[str, Plans] = {}
        self._workers = Workers(partial(self._runtime.setDevice, index), self._await)
        self._label = self._last_done = "start"
        self._closed = False
        self._kernels = Kernels()
        self._store = PlanStore(self._store_path(), digest())
        self.libraries = f"cuDNN {self._cudnn.backend_version_string()}"

    def _store_path(self) -> Path | None:
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            return None
        version = f"cudnn-{self._cudnn.backend_version()}-{self._cudnn.__version__}"
        return cache / "minidnn" / f"plans-{re.sub(r'[^A-Za-z0-9]+', '-', self.name)}-{version}.json"

    def layout(self, target: str, precision: str) -> str:
        return Target.on_cuda(target, precision, self._tensor_cores).layout

    # -- memory --------------------------------------------------------------------------------------------------------

    def arena(self, nbytes: int) -> Region:
        check_open(self.name, self._closed)
        self._runtime.setDevice(self.index)
        free, total = self._runtime.memGetInfo()
        try:
            address = self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError as error:
            raise OutOfDeviceMemory(
                f"the arena needs {format_size(nbytes)}; device {self.name} has {format_size(free)} free of "
                f"{format_size(total)}: use a smaller batch, a memory mode that offloads more, or a budget", nbytes
            ) from error
        region = Region(nbytes, address, None)
        self._arenas[address] = region
        return region

    def pinned(self, nbytes: int) -> Region:
        check_open(self.name, self._closed)
        self._runtime.setDevice(self.index)
        return self._slabs.take(nbytes)

    def give_back(self, region: Region) -> None:
        self._runtime.setDevice(self.index)
        if region.address in self._arenas:
            self._runtime.deviceSynchronize()
            try:
                for key in [k for k in self._contexts if k[1] == region.address]:
                    blas = self._contexts.pop(key).blas
                    assert blas is not None
                    blas.close()
            finally:
                del self._arenas[region.address]
                self._runtime.free(region.address)
        else:
            self._slabs.give_back(region)

    def memory_info(self) -> MemoryInfo:
        self._runtime.setDevice(self.index)
        free, total = self._runtime.memGetInfo()
        used = sum(r.nbytes for r in self._arenas.values())
        return MemoryInfo(used, free, total, sum(r.nbytes for r in self._slabs.regions))

    def write(self, arena: Region, offset: int, data: np.ndarray) -> None:
        _inside(arena, offset, data.nbytes)
        data = np.ascontiguousarray(data)
        self.synchronize()
        self._runtime.memcpy(arena.address + offset, data.ctypes.data, data.nbytes, _H2D)
        self.synchronize()  # of pageable memory the last bytes may still be on their way, and our streams do not wait

    def read(self, arena: Region, offset: int, nbytes: int) -> np.ndarray:
        _inside(arena, offset, nbytes)
        data = np.empty(nbytes, np.uint8)
        self.synchronize()
        self._runtime.memcpy(data.ctypes.data, arena.address + offset, nbytes, _D2H)
        return data

    def discard(self, arena: Region, offset: int, nbytes: int, stream: Stream | None) -> None:
        """Nothing to do: what is free is overwritten by its next owner."""

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def mark(self, label: str) -> None:
        self._label = label

    def abandon(self) -> None:
        with suppress(Exception):
            self._runtime.setDevice(self.index)
            self._runtime.deviceSynchronize()
        self._workers.close()
        with suppress(BaseException):
            self._workers.check()

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._runtime.setDevice(self.index)
            handle = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
            self._streams[name] = CudaStream(name, handle)
        return self._streams[name]

    def copy_in(self, arena: Region, offset: int, source: Region, at: int, nbytes: int, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._runtime.memcpyAsync(arena.address + offset, source.address + at, nbytes, _H2D, stream.handle)

    def copy_out(self, arena: Region, offset: int, target: Region, at: int, nbytes: int, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._runtime.memcpyAsync(target.address + at, arena.address + offset, nbytes, _D2H, stream.handle)

    def record(self, stream: Stream) -> Event:
        return self._record(stream, self._events, self._runtime.eventDisableTiming)

    def stamp(self, stream: Stream) -> CudaEvent:
        return self._record(stream, self._stamps, self._runtime.eventDefault)

    def _record(self, stream: Stream, stock: list[int], flags: int) -> CudaEvent:
        assert isinstance(stream, CudaStream)
        if stock:
            handle = stock.pop()
        else:
            handle = self._runtime.eventCreateWithFlags(flags)
            self._made.append(handle)
        event = CudaEvent(handle, stock)
        self._runtime.eventRecord(handle, stream.handle)
        return event

    def elapsed_ms(self, start: object, end: object) -> float:
        assert isinstance(start, CudaEvent)
        assert isinstance(end, CudaEvent)
        self._await(end)
        return float(self._runtime.eventElapsedTime(start.handle, end.handle))

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, CudaStream)
        if isinstance(event, CudaEvent):
            self._runtime.streamWaitEvent(stream.handle, event.handle)
        else:  # a worker's completion is known to the host alone
            self.host_wait(event)

    def host_wait(self, event: Event) -> None:
        label = self._label
        self._await(event)
        self._workers.check()
        self._last_done = label

    def host_sync(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        label = self._label
        self._guarded(self._runtime.streamSynchronize, stream.handle)
        self._workers.check()
        self._last_done = label

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self._runtime.setDevice(self.index)
        self._guarded(self._runtime.deviceSynchronize)

    def guard(self) -> AbstractContextManager[object]:
        self._runtime.setDevice(self.index)  # another trainer's, or another thread's, may be the current one
        return refuse_allocations()

    def capture(self, streams: Sequence[Stream], issue: Callable[[], None]) -> Launcher:
        first, *others = streams
        assert isinstance(first, CudaStream)
        self._runtime.setDevice(self.index)
        self._runtime.streamBeginCapture(first.handle, self._runtime.streamCaptureModeThreadLocal)
        try:
            begin = self.record(first)
            for stream in others:
                self.wait(stream, begin)
            issue()
            for stream in others:
                self.wait(first, self.record(stream))
        except BaseException:
            with suppress(Exception):
                self._runtime.streamEndCapture(first.handle)
            raise
        graph = self._runtime.streamEndCapture(first.handle)
        try:
            self._graphs.append(self._runtime.graphInstantiate(graph))
        finally:
            self._runtime.graphDestroy(graph)
        return partial(self._runtime.graphLaunch, self._graphs[-1], first.handle)

    def after(self, worker: str, event: Event, action: Callable[[], None]) -> Event:
        return self._workers.submit(worker, event, action)

    def _await(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._guarded(self._runtime.eventSynchronize, event.handle)
        else:
            assert isinstance(event, Completion)
            event.wait()

    def _guarded(self, call: Callable[..., None], *arguments: int) -> None:
        """A wait. An error in it belongs to something issued before: say between which actions."""
        try:
            call(*arguments)
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{self.name} failed in an action after '{self._last_done}' and not later than '{self._label}' "
                f"({error}); CUDA_LAUNCH_BLOCKING=1 in the environment names it exactly"
            ) from error

    # -- ops -----------------------------------------------------------------------------------------------------------

    def launcher(
        self, graph: Graph, op: Op, algorithm: str, operands: Mapping[str, Operand | list[Operand]],
        workspace: tuple[int, int] | None, arena: Region, stream: Stream,
    ) -> Launcher:  # fmt: skip
        assert isinstance(stream, CudaStream)
        self._runtime.setDevice(self.index)
        arguments: dict[str, Any] = {
            name: [_array(arena, o) for o in operand] if isinstance(operand, list) else _array(arena, operand)
            for name, operand in operands.items()
        }
        arguments.update(op.attributes)
        if op.function in CONVOLUTIONS:
            arguments["algorithm"] = algorithm
            arguments["workspace"] = arena.address + workspace[0] if workspace else 0
        if op.function not in OPS:
            raise ArgumentError(f"op {op.name} calls {shown(op.function)}; add it to minidnn.ops.cuda_ops.OPS")
        context = self.context(stream, arena, graph.target.precision)
        launch: Launcher = OPS[op.function](context, **arguments)
        self._store.save()
        return launch

    def context(self, stream: CudaStream, arena: Region, precision: str) -> Context:
        """Where ops on that stream and in that arena are bound."""
        key = (stream.name, arena.address, precision)
        if key not in self._contexts:
            scratch = (arena.address, SCRATCH_BYTES)
            self._contexts[key] = Context(
                self._kernels, stream.handle, scratch, precision, self.deterministic, Blas(stream.handle, scratch),
                self.plans(stream),
            )  # fmt: skip
        return self._contexts[key]

    def profile(self, graph: Graph) -> Profile:
        """Times of all ops, the convolutions' plan by plan, and the link; see `cuda_profile`."""
        self._runtime.setDevice(self.index)
        found = card_profile(self, graph)
        self._store.save()
        return found

    def plans(self, stream: CudaStream) -> Plans:
        """cuDNN on that stream."""
        if stream.name not in self._plans:
            self._plans[stream.name] = Plans(stream.handle, self._store, self.deterministic)
        return self._plans[stream.name]

    @property
    def in_use(self) -> bool:
        """Whether an arena is taken."""
        return bool(self._arenas)

    def repeat(self, arena: Region, offset: int, nbytes: int, block: np.ndarray) -> None:
        _inside(arena, offset, nbytes)
        self.write(arena, offset, block[:nbytes])
        begin, done = arena.address + offset, min(block.nbytes, nbytes)
        while done < nbytes:  # on the card, in ever larger parts
            part = min(done, nbytes - done)
            self._runtime.memcpy(begin + done, begin, part, _D2D)
            done += part
        self.synchronize()

    def milliseconds(self, launch: Launcher, stream: CudaStream, hopeless: float = inf, repeats: int = 5) -> float:
        """Median time of a launch on a stream, after one warm-up; of one that takes more than `hopeless` ms, that."""
        stamps = [self.stamp(stream)]
        launch()
        stamps.append(self.stamp(stream))
        warm_up = self.elapsed_ms(*stamps)
        if warm_up > hopeless + LOADING_MS:
            return warm_up
        for repeat in range(repeats if warm_up < LOADING_MS else 3):
            launch()
            stamps.append(self.stamp(stream))
            if repeat == 0 and hopeless < inf and (first := self.elapsed_ms(*stamps[-2:])) > hopeless:
                return first
        return statistics.median(self.elapsed_ms(begin, end) for begin, end in pairwise(stamps[1:]))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        runtime = self._runtime
        for step in (
            partial(runtime.setDevice, self.index), runtime.deviceSynchronize,
            *(partial(self.give_back, region) for region in [*self._arenas.values(), *self._slabs.regions]),
            *(partial(runtime.graphExecDestroy, graph) for graph in self._graphs),
            *(plans.close for plans in self._plans.values()),
            *(partial(runtime.streamDestroy, stream.handle) for stream in self._streams.values()),
            *(partial(runtime.eventDestroy, handle) for handle in self._made),
        ):  # fmt: skip
            with suppress(Exception):  # after an error in a kernel every call fails; the process's end frees all
                step()
        self._streams.clear()


def _inside(region: Region, offset: int, nbytes: int) -> None:
    assert 0 <= offset <= region.nbytes - nbytes, "a buffer leaves its region"


def _array(arena: Region, operand: Operand) -> Array:
    _inside(arena, operand.offset, operand.tensor.nbytes)
    return Array.of(operand.tensor, arena.address + operand.offset)
