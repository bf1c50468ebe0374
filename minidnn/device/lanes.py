"""Lanes of the host emulator: FIFO queues of commands with events between them, in four interleavings.

`eager` runs a command as soon as it may, `lazy` only when the host, in the end, needs it, `random` draws by seed. These
three are deterministic: one baton passes among the host and the lanes, so a seed replays exactly. `threads` runs each
lane in a thread of its own.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minidnn.device.base import Event
from minidnn.errors import ArgumentError, DeviceError

INTERLEAVINGS = ("eager", "lazy", "random", "threads")


class HostEvent(Event):
    """Done when its command has run."""

    __slots__ = ("command", "done")

    def __init__(self) -> None:
        self.done = False
        self.command: Command | None = None


@dataclass(slots=True, eq=False)
class Command:
    """Something to do on a lane after the lane's earlier commands and after `waits`."""

    lane: str
    run: Callable[[], None] | None
    waits: tuple[HostEvent, ...]
    event: HostEvent = field(default_factory=HostEvent)

    @property
    def ready(self) -> bool:
        """Whether all that it waits for is done."""
        return all(e.done for e in self.waits)


class Lanes:
    """The deterministic emulation: one thread, queues, and a rule for who gets the baton."""

    def __init__(self, interleaving: str = "eager", seed: int = 0) -> None:
        if interleaving not in ("eager", "lazy", "random"):
            raise ArgumentError(f"interleaving is {interleaving!r}; it must be one of {', '.join(INTERLEAVINGS)}")
        self.interleaving = interleaving
        self.random = random.Random(seed)
        self.queues: dict[str, deque[Command]] = {}

    def submit(self, lane: str, run: Callable[[], None] | None, waits: Iterable[Event] = ()) -> HostEvent:
        """Issue a command; returns the event of its completion."""
        command = Command(lane, run, tuple(e for e in waits if isinstance(e, HostEvent)))
        command.event.command = command
        self.queues.setdefault(lane, deque()).append(command)
        if self.interleaving == "eager":
            self._drain()
        elif self.interleaving == "random":
            for _ in range(self.random.randrange(4)):
                if not self._step_at_random():
                    break
        return command.event

    def wait(self, event: Event) -> None:
        """The host needs the event: run what it depends on."""
        assert isinstance(event, HostEvent)
        while not event.done:
            if self.interleaving == "random":
                if not self._step_at_random():
                    raise DeviceError("deadlock: the host waits for an event that no lane can reach")
            else:
                self._demand(event)

    def sync(self, lane: str) -> None:
        """The host needs everything on a lane."""
        queue = self.queues.get(lane)
        if queue:
            self.wait(queue[-1].event)

    def close(self) -> None:
        """Forget what has not run."""
        self.queues.clear()

    def _run_head(self, lane: str) -> None:
        command = self.queues[lane].popleft()
        try:
            if command.run is not None:
                command.run()
        finally:
            command.event.done = True

    def _drain(self) -> None:
        progress = True
        while progress:
            progress = False
            for lane, queue in list(self.queues.items()):
                while queue and queue[0].ready:
                    self._run_head(lane)
                    progress = True

    def _step_at_random(self) -> bool:
        ready = [lane for lane, queue in self.queues.items() if queue and queue[0].ready]
        if not ready:
            return False
        self._run_head(self.random.choice(ready))
        return True

    def _demand(self, event: HostEvent) -> None:
        """Run the commands that `event` depends on, and nothing else; deepest first, without recursion."""
        stack = [event]
        seen: set[int] = set()
        while stack:
            target = stack[-1]
            if target.done:
                stack.pop()
                continue
            assert target.command is not None
            head = self.queues[target.command.lane][0]
            blocked = next((e for e in head.waits if not e.done), None)
            if blocked is None:
                self._run_head(head.lane)
                seen.clear()
            elif id(blocked) in seen:
                raise DeviceError("deadlock: lanes wait for each other")
            else:
                seen.add(id(blocked))
                stack.append(blocked)

    def run_everything(self) -> None:
        """Run all that can run (the host idles)."""
        self._drain()


class ThreadLanes:
    """The free-running emulation: a daemon thread for each lane; the first error stops all and reaches the host."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[str, deque[Command]] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.last: dict[str, HostEvent] = {}
        self.error: BaseException | None = None
        self.closing = False

    def submit(self, lane: str, run: Callable[[], None] | None, waits: Iterable[Event] = ()) -> HostEvent:
        """Issue a command; returns the event of its completion."""
        command = Command(lane, run, tuple(e for e in waits if isinstance(e, HostEvent)))
        with self.changed:
            self._raise()
            self.queues.setdefault(lane, deque()).append(command)
            self.last[lane] = command.event
            if lane not in self.threads:
                self.threads[lane] = threading.Thread(target=self._work, args=(lane,), name=f"lane {lane}", daemon=True)
                self.threads[lane].start()
            self.changed.notify_all()
        return command.event

    def wait(self, event: Event) -> None:
        """The host waits for the event."""
        assert isinstance(event, HostEvent)
        with self.changed:
            while not event.done:
                self._raise()
                self.changed.wait()
            self._raise()

    def sync(self, lane: str) -> None:
        """The host waits for everything on a lane."""
        if lane in self.last:
            self.wait(self.last[lane])

    def close(self) -> None:
        """Stop and join all threads."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for thread in self.threads.values():
            if thread is not threading.current_thread():
                thread.join()

    def _raise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _work(self, lane: str) -> None:
        queue = self.queues[lane]
        while True:
            with self.changed:
                while not self.closing and not (queue and queue[0].ready):
                    self.changed.wait()
                if self.closing:
                    return
                command = queue.popleft()
            try:
                if command.run is not None:
                    command.run()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the host must see it
                with self.changed:
                    self.error = self.error or error
            with self.changed:
                command.event.done = True
                self.changed.notify_all()
