"""A faked card whose streams run by themselves: each is a thread, copies are late, kernels are NumPy's.

Commands of different streams meet only through events, as on a real card; what was not waited for is read too early.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

from minidnn.device.cuda import CudaDevice
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.cuda_ops import CONVOLUTIONS
from minidnn.ops.kernels import Launcher
from minidnn.ops.numpy_ops import OPS
from minidnn.ops.plans import PlanStore
from tests.cuda.fake import Frontend, HostBlas, HostPlans, RuntimeLibrary, at
from tests.cuda.support import EmulatedKernels

Command = Callable[[], object]


class Moment:
    """What an event's last record stands for."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at = 0.0

    def reach(self) -> None:
        """The stream is here."""
        self.at = time.perf_counter()
        self.reached.set()


class Capture:
    """What streams are given while a graph is captured: nothing runs. A stream belongs to it once it has waited for an
    event of the capture, and must be waited for at its end."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.commands: list[Command] = []
        self.streams = {first}
        self.loose: set[int] = set()
        """Streams with commands that the first one does not wait for yet."""
        self.events: dict[int, int] = {}

    def add(self, stream: int, command: Command) -> None:
        """A command; in a replay they run in the order in which they were given."""
        assert stream in self.streams, "a stream outside the capture is used"
        self.commands.append(command)
        self.loose |= {stream} - {self.first}

    def wait(self, stream: int, event: int) -> None:
        """A stream waits for an event."""
        assert event in self.events, "an event from outside the capture is waited for"
        self.streams.add(stream)
        if stream == self.first:
            self.loose.discard(self.events[event])


class RunningLibrary(RuntimeLibrary):
    """Commands run when their stream gets to them. Copies take up to `late` seconds more than they need."""

    streamCaptureModeThreadLocal = 1

    def __init__(self, late: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.capture: Capture | None = None
        self.graphs: dict[int, list[Command]] = {}
        self.late = late
        self.error: BaseException | None = None
        self.timing: dict[int, bool] = {}  # by event handle: whether it has time stamps
        self.moments: dict[int, Moment] = {}
        self._draw = random.Random(seed)
        self._queues: dict[int, SimpleQueue[Command | None]] = {}
        self._threads: dict[int, threading.Thread] = {}

    def submit(self, stream: int, command: Command) -> None:
        """Behind what the stream was given before."""
        if self.capture is not None:
            self.capture.add(stream, command)
        else:
            self._queues[stream].put(command)

    def _run(self, queue: SimpleQueue[Command | None]) -> None:
        while (command := queue.get()) is not None:
            self._try(command)

    def _try(self, command: Command) -> None:
        try:
            command()
        except BaseException as error:  # whatever it is, who waits must see it
            self.error = self.error or error

    def _check(self) -> None:
        if self.error is not None:
            raise self.CUDARuntimeError(f"a command failed: {self.error!r}")

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.streamNonBlocking
        handle = self._handle()
        self._queues[handle] = SimpleQueue()
        self._threads[handle] = threading.Thread(target=self._run, args=(self._queues[handle],), daemon=True)
        self._threads[handle].start()
        return handle

    def streamDestroy(self, handle: int) -> None:
        super().streamDestroy(handle)
        self._queues.pop(handle).put(None)
        self._threads.pop(handle).join()

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        assert self.capture is None
        assert mode == self.streamCaptureModeThreadLocal
        self.capture = Capture(stream)

    def streamEndCapture(self, stream: int) -> int:
        assert self.capture is not None
        assert stream == self.capture.first
        assert not self.capture.loose, "the capture ends before its streams have joined"
        graph = self._handle()
        self.graphs[graph], self.capture = self.capture.commands, None
        return graph

    def graphInstantiate(self, graph: int) -> int:
        launchable = self._handle()
        self.graphs[launchable] = self.graphs[graph]
        return launchable

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]
        self.handles.remove(graph)

    graphExecDestroy = graphDestroy

    def graphLaunch(self, graph: int, stream: int) -> None:
        for command in self.graphs[graph]:
            self.submit(stream, command)

    def streamSynchronize(self, handle: int) -> None:
        assert self.capture is None, "a wait of the host cannot be captured"
        here = threading.Event()
        self.submit(handle, here.set)
        here.wait()
        self._check()

    def deviceSynchronize(self) -> None:
        super().deviceSynchronize()
        for handle in list(self._queues):
            self.streamSynchronize(handle)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        super().streamWaitEvent(stream, event)
        if self.capture is not None:
            self.capture.wait(stream, event)
        elif event in self.moments:  # of a later record nobody knows yet
            self.submit(stream, self.moments[event].reached.wait)

    def eventCreateWithFlags(self, flags: int) -> int:
        handle = self._handle()
        self.timing[handle] = flags == self.eventDefault
        return handle

    def eventRecord(self, event: int, stream: int) -> None:
        if self.capture is not None:
            self.capture.events[event] = stream
            self.moments.pop(event, None)  # nobody can wait for it outside
            return
        self.moments[event] = Moment()
        self.submit(stream, self.moments[event].reach)

    def eventSynchronize(self, event: int) -> None:
        assert self.capture is None, "a wait of the host cannot be captured"
        self.moments[event].reached.wait()
        self._check()

    def eventElapsedTime(self, begin: int, end: int) -> float:
        first, last = self.moments[begin], self.moments[end]
        assert self.timing[begin]
        assert self.timing[end]
        assert first.reached.is_set()
        assert last.reached.is_set()
        return (last.at - first.at) * 1e3

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        pause = self._draw.random() * self.late

        def copy() -> None:
            time.sleep(pause)
            ctypes.memmove(target, source, nbytes)

        self.submit(stream, copy)

    def free(self, address: int) -> None:
        self.deviceSynchronize()
        super().free(address)


@contextmanager
def running_card(late: float = 0.0, seed: int = 0, **options: Any) -> Iterator[tuple[CudaDevice, RunningLibrary]]:
    """An open device on such a card, which measures what it profiles; and the library that it talks to."""
    runtime = RunningLibrary(late, seed)

    def on_stream(function: str) -> Callable[..., Launcher]:
        def bound(
            context: Context, *, algorithm: str = "default", workspace: int = 0, **arguments: Any
        ) -> Launcher:
            values = {
                name: [at(a) for a in v] if isinstance(v, list) else at(v) if isinstance(v, Array) else v
                for name, v in arguments.items()
            }
            if function in CONVOLUTIONS:
                values |= {"algorithm": "implicit", "workspace": None}

            def compute() -> None:
                OPS[function](**values)

            return lambda: runtime.submit(context.stream, compute)

        return bound

    replaced: dict[str, Any] = {
        "open_libraries": lambda index: (runtime, Frontend), "Kernels": EmulatedKernels, "Plans": HostPlans,
        "Blas": HostBlas, "PlanStore": lambda path, kernels: PlanStore(None, kernels),
        "OPS": {name: on_stream(name) for name in OPS},
    }  # fmt: skip
    parts = (
        patch.multiple("minidnn.device.cuda", **replaced),
        patch("minidnn.device.cuda_profile.OPS", replaced["OPS"]), patch("minidnn.device.measure.COPY_BYTES", 2**16),
    )  # fmt: skip
    with parts[0], parts[1], parts[2]:
        device = CudaDevice(**options)
        try:
            yield device, runtime
        finally:
            device.close()
