"""The interface that every device has, and nothing more.

A device gives memory (one arena, pinned regions), lanes (streams and workers), events between them, copies, and
launchers for ops. Everything above it is the same for the host emulator and a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from minidnn.errors import DeviceError
from minidnn.graph.graph import Graph, Target
from minidnn.graph.op import Op
from minidnn.graph.tensor import ITEM_BYTES, Tensor
from minidnn.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous memory that a device gave: `address` for its own use, and the host's view where there is one."""

    nbytes: int
    address: int
    array: np.ndarray | None  # uint8 [nbytes]; None where the host cannot touch it


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor bound to memory: what an op's argument becomes."""

    tensor: Tensor
    offset: int  # in the arena, bytes


def check_open(name: str, closed: bool) -> None:
    """Raises DeviceError where the device of that name is closed: nobody would run what is issued."""
    if closed:
        raise DeviceError(f"device {name} is closed; open another")


def by_argument(bound: Iterable[tuple[str, Operand]]) -> dict[str, Operand | list[Operand]]:
    """What a launcher takes: argument name -> operand; arguments written `w[]` become lists."""
    found: dict[str, Operand | list[Operand]] = {}
    for argument, operand in bound:
        if argument.endswith("[]"):
            items = found.setdefault(argument[:-2], [])
            assert isinstance(items, list)
            items.append(operand)
        else:
            found[argument] = operand
    return found


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes: taken from the device by us now, free on the device, and its total."""

    used: int
    free: int
    total: int
    pinned: int


Launcher = Callable[[], object]
"""An op bound to algorithm, operands and stream: calling it issues the computation."""


D = TypeVar("D", bound="Device")


class Stream:
    """A lane of the device: commands run in order. Events connect lanes."""

    name: str


class Event:
    """Becomes done when everything issued on its lane before it is done."""


class Device(ABC):
    """What a schedule runs on. Close it (it is a context manager) and all that it took is given back."""

    name: str
    kind: str
    target: str
    """The target that the device runs by default: "paper" or "native"."""
    libraries = ""
    """What computes, with versions, for those who read measurements."""
    captures = False
    """Whether `capture` works."""

    def layout(self, target: str, precision: str) -> str:
        """The memory layout that suits the device at that precision."""
        return "NCHW"

    def target_for(self, precision: str, target: str | None = None) -> Target:
        """What graphs for the device are built for; `target` names another than its own."""
        name = target or self.target
        return Target(name, precision, self.layout(name, precision))

    # -- memory

    @abstractmethod
    def arena(self, nbytes: int) -> Region:
        """Device memory of exactly `nbytes`. Raises OutOfDeviceMemory naming what is free."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Region:
        """Host memory that copies can reach at full speed. Raises OutOfPinnedMemory naming the limit."""

    @abstractmethod
    def give_back(self, region: Region) -> None:
        """Return an arena or pinned region."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """What is taken and what is free now."""

    @abstractmethod
    def write(self, arena: Region, offset: int, data: np.ndarray) -> None:
        """Copy raw bytes (uint8, contiguous) into the arena, at once."""

    @abstractmethod
    def read(self, arena: Region, offset: int, nbytes: int) -> np.ndarray:
        """Copy raw bytes out of the arena, at once."""

    @abstractmethod
    def discard(self, arena: Region, offset: int, nbytes: int, stream: Stream | None) -> None:
        """The bytes are free now (`stream`: when the stream gets here). The emulator poisons them."""

    # -- lanes

    def mark(self, label: str) -> None:
        """What is issued from now on belongs to the action of that name: errors and timelines say so."""
        return

    def abandon(self) -> None:
        """After a failure: drop what was issued and has not begun, return when nothing runs any more. Never raises."""
        return

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """The lane of that name, made at first mention."""

    @abstractmethod
    def copy_in(self, arena: Region, offset: int, source: Region, at: int, nbytes: int, stream: Stream) -> None:
        """Host to device, in stream order."""

    @abstractmethod
    def copy_out(self, arena: Region, offset: int, target: Region, at: int, nbytes: int, stream: Stream) -> None:
        """Device to host, in stream order."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event behind everything issued on the stream so far."""

    @abstractmethod
    def stamp(self, stream: Stream) -> object:
        """A point in time: when the stream gets here. For timelines; nothing waits for it."""

    @abstractmethod
    def elapsed_ms(self, start: object, end: object) -> float:
        """Time between two stamps that have been reached."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is issued on the stream from now on starts after the event."""

    @abstractmethod
    def host_wait(self, event: Event) -> None:
        """The host waits. Raises what a lane raised."""

    @abstractmethod
    def host_sync(self, stream: Stream) -> None:
        """The host waits for everything issued on the stream."""

    @abstractmethod
    def after(self, worker: str, event: Event, action: Callable[[], None]) -> Event:
        """On the host worker of that name: wait for the event, then do `action`. Returns its completion.

        Workers are threads (or the emulator's lanes): in order, re-used, joined at close; an error in one is raised
        by the next call that waits.
        """

    def guard(self) -> AbstractContextManager[object]:
        """Entered while an iteration is issued: device memory cannot be taken then, where the device can tell."""
        return nullcontext()

    def capture(self, streams: Sequence[Stream], issue: Callable[[], None]) -> Launcher:
        """Record what `issue` puts on these streams, nothing of which runs now, as one launch on the first of them.

        Raises DeviceError where the device cannot (`captures`)."""
        raise DeviceError(f"device {self.name} cannot capture graphs; use a CUDA device")

    # -- ops

    def repeat(self, arena: Region, offset: int, nbytes: int, block: np.ndarray) -> None:
        """Fill a span of an arena with a block of bytes, again and again. For measuring."""
        for done in range(0, nbytes, block.nbytes):
            self.write(arena, offset + done, block[: nbytes - done])

    @abstractmethod
    def launcher(
        self, graph: Graph, op: Op, algorithm: str, operands: Mapping[str, Operand | list[Operand]],
        workspace: tuple[int, int] | None, arena: Region, stream: Stream,
    ) -> Launcher:  # fmt: skip
        """Bind an op; `workspace` is (offset, nbytes). Everything slow (compiling, plan building) happens here."""

    @abstractmethod
    def profile(self, graph: Graph) -> Profile:
        """The algorithms that the device has for the graph's ops, fastest first."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; join all workers. May be called twice."""

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def store(device: Device, arena: Region, operand: Operand, value: np.ndarray) -> None:
    """Write an array (logical order) into a tensor's memory, in the tensor's layout and dtype."""
    t = operand.tensor
    array = np.asarray(value).reshape(t.shape).astype(numpy_dtype(t.dtype), copy=False)
    ordered = array.transpose(memory_order(t))
    device.write(arena, operand.offset, np.ascontiguousarray(ordered).reshape(-1).view(np.uint8))


def load(device: Device, arena: Region, operand: Operand) -> np.ndarray:
    """Read a tensor's memory as a contiguous array in logical order."""
    t = operand.tensor
    raw = device.read(arena, operand.offset, t.nbytes).view(numpy_dtype(t.dtype))
    order = memory_order(t)
    shaped = raw.reshape(tuple(t.shape[axis] for axis in order))
    return np.ascontiguousarray(shaped.transpose(np.argsort(order)))


def memory_order(t: Tensor) -> tuple[int, ...]:
    """Axes from outermost to innermost in memory."""
    return (0, 2, 3, 1) if t.layout == "NHWC" and len(t.shape) == 4 else tuple(range(len(t.shape)))


def view(t: Tensor, memory: np.ndarray) -> np.ndarray:
    """A tensor's array over its bytes: logical axes, the layout's strides."""
    order = memory_order(t)
    raw = memory[: t.nbytes].view(numpy_dtype(t.dtype)).reshape(tuple(t.shape[axis] for axis in order))
    array: np.ndarray = raw.transpose(np.argsort(order))
    return array


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a tensor's dtype name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    assert name in ITEM_BYTES, name
    return np.dtype(name)
