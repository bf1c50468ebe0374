"""The host emulator: a byte arena, FIFO streams and events in NumPy. To everything above it a real device.

Freed bytes become NaN when the free takes effect, so a missing wait, an early release or a stale prefetch shows as a
wrong gradient on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from minidnn.arguments import shown
from minidnn.device.base import Device, Event, Launcher, MemoryInfo, Operand, Region, Stream, check_open, view
from minidnn.device.lanes import Lanes, ThreadLanes
from minidnn.errors import ArgumentError, OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.memory.pinned import check_host_limits, host_limits
from minidnn.profile.profile import Profile
from minidnn.units import format_size, parse_size

POISON = 0xFF
"""Every float made of these bytes is NaN."""


class HostStream(Stream):
    """A lane of the emulator."""

    def __init__(self, name: str) -> None:
        self.name = name


class HostDevice(Device):
    """NumPy in the place of a GPU. `memory` caps the arena, in bytes or as "4GiB", as a smaller card would."""

    kind = "host"
    target = "paper"

    def __init__(self, interleaving: str = "eager", seed: int = 0, memory: int | str | None = None) -> None:
        self.name = "host"
        self.memory = None if memory is None else parse_size(memory, "memory")
        self.lanes = ThreadLanes() if interleaving == "threads" else Lanes(interleaving, seed)
        self.streams: dict[str, HostStream] = {}
        self._arena_bytes = self._pinned_bytes = 0
        self._next_address = 1
        self._regions: dict[int, tuple[Region, bool]] = {}

    # -- memory

    def arena(self, nbytes: int) -> Region:
        check_open(self.name, self.lanes.closed)
        info = self.memory_info()
        free = min([info.free, *(limit.left for limit in host_limits())])  # others use the machine's memory too
        if nbytes > free:
            raise OutOfDeviceMemory(
                f"the arena needs {format_size(nbytes)}; device {self.name} has {format_size(free)} free "
                f"of {format_size(info.total)}: use a smaller batch or budget", nbytes
            )
        return self._take(nbytes, pinned=False)

    def pinned(self, nbytes: int) -> Region:
        check_open(self.name, self.lanes.closed)
        check_host_limits(nbytes)
        return self._take(nbytes, pinned=True)

    def _take(self, nbytes: int, pinned: bool) -> Region:
        try:
            # Fresh memory often holds what an earlier run of the same network left: a missing copy would not show.
            array = np.full(nbytes, POISON, dtype=np.uint8)
        except MemoryError:
            error = OutOfPinnedMemory if pinned else OutOfDeviceMemory
            raise error(f"{format_size(nbytes)} of host memory cannot be taken; use a smaller batch") from None
        region = Region(nbytes, self._next_address, array)
        self._next_address += 1
        self._regions[region.address] = (region, pinned)
        if pinned:
            self._pinned_bytes += nbytes
        else:
            self._arena_bytes += nbytes
        return region

    def give_back(self, region: Region) -> None:
        held = self._regions.pop(region.address, None)
        if held is not None:
            if held[1]:
                self._pinned_bytes -= region.nbytes
            else:
                self._arena_bytes -= region.nbytes

    def memory_info(self) -> MemoryInfo:
        total = self.memory if self.memory is not None else _physical_memory()
        return MemoryInfo(self._arena_bytes, max(0, total - self._arena_bytes), total, self._pinned_bytes)

    def write(self, arena: Region, offset: int, data: np.ndarray) -> None:
        _bytes(arena, offset, data.nbytes)[:] = data

    def read(self, arena: Region, offset: int, nbytes: int) -> np.ndarray:
        data: np.ndarray = _bytes(arena, offset, nbytes).copy()
        return data

    def discard(self, arena: Region, offset: int, nbytes: int, stream: Stream | None) -> None:
        poison = partial(_bytes(arena, offset, nbytes).fill, POISON)
        if stream is None:
            poison()
        else:
            self.lanes.submit(stream.name, poison)

    # -- lanes

    def mark(self, label: str) -> None:
        self.lanes.label = label

    def abandon(self) -> None:
        self.lanes.abandon()

    def stream(self, name: str) -> HostStream:
        return self.streams.setdefault(name, HostStream(name))

    def copy_in(self, arena: Region, offset: int, source: Region, at: int, nbytes: int, stream: Stream) -> None:
        self.lanes.submit(
            stream.name, partial(np.copyto, _bytes(arena, offset, nbytes), _bytes(source, at, nbytes))
        )

    def copy_out(self, arena: Region, offset: int, target: Region, at: int, nbytes: int, stream: Stream) -> None:
        self.lanes.submit(
            stream.name, partial(np.copyto, _bytes(target, at, nbytes), _bytes(arena, offset, nbytes))
        )

    def record(self, stream: Stream) -> Event:
        return self.lanes.submit(stream.name, None)

    def stamp(self, stream: Stream) -> object:
        taken: list[float] = []
        self.lanes.submit(stream.name, lambda: taken.append(perf_counter()))
        return taken

    def elapsed_ms(self, start: object, end: object) -> float:
        assert isinstance(start, list)
        assert isinstance(end, list)
        return float(end[0] - start[0]) * 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        self.lanes.submit(stream.name, None, (event,))

    def host_wait(self, event: Event) -> None:
        self.lanes.wait(event)

    def host_sync(self, stream: Stream) -> None:
        self.lanes.sync(stream.name)

    def after(self, worker: str, event: Event, action: Callable[[], None]) -> Event:
        return self.lanes.submit(worker, action, (event,))

    # -- ops

    def launcher(
        self, graph: Graph, op: Op, algorithm: str, operands: Mapping[str, Operand | list[Operand]],
        workspace: tuple[int, int] | None, arena: Region, stream: Stream,
    ) -> Launcher:  # fmt: skip
        from minidnn.ops.numpy_ops import ALGORITHMS, OPS

        arguments: dict[str, Any] = {
            name: [_array(arena, o) for o in operand] if isinstance(operand, list) else _array(arena, operand)
            for name, operand in operands.items()
        }
        arguments.update(op.attributes)
        if op.function not in OPS:
            raise ArgumentError(f"op {op.name} calls {shown(op.function)}; add it to minidnn.ops.numpy_ops.OPS")
        if op.function in ALGORITHMS:
            arguments["algorithm"] = algorithm
            arguments["workspace"] = _bytes(arena, *workspace) if workspace else None
        return partial(self.lanes.submit, stream.name, partial(OPS[op.function], **arguments))

    def profile(self, graph: Graph) -> Profile:
        from minidnn.device.host_profile import host_profile

        return host_profile(graph)

    def close(self) -> None:
        self.lanes.close()
        self._regions.clear()
        self._arena_bytes = self._pinned_bytes = 0


def _array(arena: Region, operand: Operand) -> np.ndarray:
    return view(operand.tensor, _bytes(arena, operand.offset, operand.tensor.nbytes))


def _bytes(region: Region, offset: int, nbytes: int) -> np.ndarray:
    assert region.array is not None
    assert 0 <= offset <= region.nbytes - nbytes, "a buffer leaves its region"
    return region.array[offset : offset + nbytes]


def _physical_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
