"""What the codec workers of an executor do: pack, unpack, and now and then look how many values are not zero.

A tensor's compression is cancelled where it is wanted back, in place, before a worker has begun any part of it. That is
decided under a lock, for all parts at once: a worker that comes later finds that there is nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time

import numpy as np

from minidnn.codec import PackedMemory, PackedPart, density, pack, unpack
from minidnn.device.base import Device, Event, Region, Stream
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import ITEM_BYTES
from minidnn.plan.compress import word_bytes
from minidnn.schedule.actions import Compress, Decompress, HostRange, PartAction


@dataclass(frozen=True, slots=True)
class Packed:
    """What became of a tensor in an iteration: bytes before and after, and the share of values that are not zero."""

    raw_bytes: int
    packed_bytes: int
    density: float


class _Packing:
    """One tensor in one iteration."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun = self.cancelled = self.decided = False
        self.parts: dict[int, PackedPart] = {}
        self.issued = self.unpacked = 0  # parts
        self.raw_bytes = self.packed_bytes = self.values = 0
        self.kept = 0.0

    def begin(self) -> bool:
        """A worker is about to pack a part; False where nobody wants that any more."""
        with self.lock:
            self.begun = self.begun or not self.cancelled
            return self.begun

    def cancel(self) -> bool:
        """The host wants the tensor back where it is; False where a worker came first."""
        with self.lock:
            self.cancelled = self.cancelled or not self.begun
            return self.cancelled

    def add(self, k: int, part: PackedPart, raw_bytes: int, share: float) -> None:
        """Part `k` is packed."""
        with self.lock:
            self.parts[k] = part
            self.raw_bytes += raw_bytes
            self.packed_bytes += part.nbytes
            self.values += part.length
            self.kept += share * part.length


class Packer:
    """The compressions of one executor, in its present iteration and over all of them.

    `packed`: by tensor, what its last completed compression gave. `density`: by tensor, the last that was seen, also of
    those that are only sampled. `done` and `cancelled` count tensors over all iterations, `cpu_s` the workers' time.
    `spans`: what they did in this iteration (lane, label, start and end by perf_counter).
    """

    def __init__(self, device: Device, graph: Graph, pinned: Region | None, memory: PackedMemory | None) -> None:
        self.device, self.graph, self.pinned = device, graph, pinned
        self.memory = PackedMemory() if memory is None else memory
        self.sampling = False
        self.packed: dict[str, Packed] = {}
        self.density: dict[str, float] = {}
        self.done = self.cancelled = 0
        self.cpu_s = 0.0
        self.spans: list[tuple[str, str, float, float]] = []
        self._lock = threading.Lock()
        self._packings: dict[str, _Packing] = {}
        self._samples: dict[str, Event] = {}

    def begin(self) -> None:
        """An iteration begins. What a failed one has left is given back."""
        for packing in self._packings.values():
            for part in packing.parts.values():
                part.release()
        self._packings.clear()
        self._samples.clear()
        self.spans = []

    # -- by the host

    def compress(self, action: Compress, copied: Event) -> Event:
        """Issue a part's packing, to be begun when the copy-out is done."""
        packing = self._packings.setdefault(action.host.name, _Packing())
        packing.issued += 1
        return self.device.after(action.lane, copied, partial(self._timed, self._pack, action, packing))

    def decompress(self, action: Decompress, in_place: bool, waits: tuple[Event, ...]) -> Event | None:
        """Issue a part's unpacking behind all of `waits`; None where that is cancelled."""
        packing = self._packings[action.host.name]
        cancelled = in_place and packing.cancel()
        if not packing.decided:
            packing.decided = True
            self.cancelled += cancelled
            self.done += not cancelled
        if cancelled:
            return None
        for event in waits[:-1]:
            self.device.after(action.lane, event, _nothing)
        return self.device.after(action.lane, waits[-1], partial(self._timed, self._unpack, action, packing))

    def sample(self, host: HostRange, stream: Stream) -> None:
        """Look at a tensor that is not compressed, on a codec worker, as soon as what was issued has copied it out."""
        if not word_bytes(ITEM_BYTES[self.graph.tensors[host.name].dtype]):
            return  # an index of a pooling: the codec cannot pack it
        self._samples[host.name] = self.device.after("codec-0", self.device.record(stream), partial(self._look, host))

    def looked(self, name: str) -> None:
        """Wait until nobody looks at the tensor's bytes any more."""
        event = self._samples.pop(name, None)
        if event is not None:
            self.device.host_wait(event)

    # -- by a codec worker

    def _timed(self, work: Callable[[PartAction, _Packing], bool], action: PartAction, packing: _Packing) -> None:
        start, cpu = perf_counter(), thread_time()
        if work(action, packing):
            with self._lock:
                self.cpu_s += thread_time() - cpu
                self.spans.append((action.lane, action.label, start, perf_counter()))

    def _pack(self, action: PartAction, packing: _Packing) -> bool:
        if not packing.begin():
            return False
        words = self._words(action.host, action.start, action.stop)
        part = pack(words, memory=self.memory)
        packing.add(action.part, part, words.nbytes, part_density(part))
        return True

    def _unpack(self, action: PartAction, packing: _Packing) -> bool:
        part = packing.parts[action.part]
        try:
            unpack(part, self._words(action.host, action.start, action.stop))
        finally:
            part.release()
        with packing.lock:
            del packing.parts[action.part]
            packing.unpacked += 1
            if packing.unpacked == packing.issued:
                name, share = action.host.name, packing.kept / packing.values
                self.packed[name] = Packed(packing.raw_bytes, packing.packed_bytes, share)
                self.density[name] = share
        return True

    def _look(self, host: HostRange) -> None:
        self.density[host.name] = float(density(self._words(host, 0, host.nbytes)))

    def _words(self, host: HostRange, start: int, stop: int) -> np.ndarray:
        assert self.pinned is not None
        assert self.pinned.array is not None
        word = word_bytes(ITEM_BYTES[self.graph.tensors[host.name].dtype])
        data: np.ndarray = self.pinned.array[host.offset + start : host.offset + stop]
        return data.view(np.uint16 if word == 2 else np.uint32)


def part_density(part: PackedPart) -> float:
    """Share of the values of a packed part that are not zero."""
    if part.raw:
        return float(density(part.rest))
    return (sum(part.used) + int(np.count_nonzero(part.rest))) / part.length


def _nothing() -> None:
    return
