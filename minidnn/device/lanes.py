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

from minidnn.arguments import choice
from minidnn.device.base import Event, check_open
from minidnn.errors import DeviceError, raise_at

INTERLEAVINGS = ("eager", "lazy", "random", "threads")


class HostEvent(Event):
    """Done when its command has run."""

    __slots__ = ("command", "done")

    def __init__(self) -> None:
        self.done = False
        self.command: Command | None = None


@dataclass(slots=True, eq=False)
class Command:
    """Something to do on a lane after the lane's earlier commands and after `waits`; `label` is the action it is of."""

    lane: str
    run: Callable[[], None] | None
    waits: tuple[HostEvent, ...]
    label: str
    event: HostEvent = field(default_factory=HostEvent)

    @property
    def ready(self) -> bool:
        """Whether all that it waits for is done."""
        return all(e.done for e in self.waits)

    def perform(self) -> None:
        """Run it. What it raises names the action that it is of, not the one that happened to wait for it."""
        try:
            if self.run is not None:
                self.run()
        except BaseException as error:
            raise_at(error, self.label)

    def end(self) -> None:
        """It has run, or never will: nobody waits for it, and it holds on to no memory."""
        self.run, self.event.command, self.event.done = None, None, True


class Lanes:
    """The deterministic emulation: one thread, queues, and a rule for who gets the baton."""

    def __init__(self, interleaving: str = "eager", seed: int = 0) -> None:
        choice(interleaving, "interleaving", INTERLEAVINGS)
        self.interleaving = interleaving
        self.label = ""
        self.closed = False
        self.random = random.Random(seed)
        self.ahead = self.random.randrange(4)  # so many commands at most at each submit: some seeds fall far behind
        self.queues: dict[str, deque[Command]] = {}

    def submit(self, lane: str, run: Callable[[], None] | None, waits: Iterable[Event] = ()) -> HostEvent:
        """Issue a command; returns the event of its completion."""
        check_open("host", self.closed)
        command = Command(lane, run, tuple(e for e in waits if isinstance(e, HostEvent)), self.label)
        command.event.command = command
        self.queues.setdefault(lane, deque()).append(command)
        if self.interleaving == "eager":
            self._drain()
        elif self.interleaving == "random":
            for _ in range(self.random.randrange(self.ahead + 1)):
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

    def abandon(self) -> None:
        """Drop what has not run."""
        _drop(self.queues)

    def close(self) -> None:
        """Take no more."""
        self.closed = True
        self.abandon()

    def _run_head(self, lane: str) -> None:
        command = self.queues[lane].popleft()
        try:
            command.perform()
        finally:
            command.end()

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


class ThreadLanes:
    """The free-running emulation: a daemon thread for each lane. The first error stops all lanes and is raised by every
    call until `abandon`."""

    def __init__(self) -> None:
        self.label = ""
        # Taken by itself: between the condition's own __enter__ and its lock an interrupt could leave it taken.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.queues: dict[str, deque[Command]] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.last: dict[str, HostEvent] = {}
        self.error: BaseException | None = None
        self.running = 0
        self.closed = False

    def submit(self, lane: str, run: Callable[[], None] | None, waits: Iterable[Event] = ()) -> HostEvent:
        """Issue a command; returns the event of its completion."""
        check_open("host", self.closed)
        command = Command(lane, run, tuple(e for e in waits if isinstance(e, HostEvent)), self.label)
        with self.lock:
            self._check()
            self.queues.setdefault(lane, deque()).append(command)
            self.last[lane] = command.event
            if lane not in self.threads:
                thread = threading.Thread(target=self._work, args=(lane,), name=f"lane {lane}", daemon=True)
                thread.start()
                self.threads[lane] = thread
            self.changed.notify_all()
        return command.event

    def wait(self, event: Event) -> None:
        """The host waits for the event."""
        assert isinstance(event, HostEvent)
        with self.lock:
            while not event.done:
                self._check()
                if not self.running and not any(queue and queue[0].ready for queue in self.queues.values()):
                    raise DeviceError("deadlock: the host waits for an event that no lane can reach")
                self.changed.wait()
            self._check()

    def sync(self, lane: str) -> None:
        """The host waits for everything on a lane."""
        if lane in self.last:
            self.wait(self.last[lane])

    def abandon(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with self.lock:
            _drop(self.queues)
            while self.running:
                self.changed.wait()
            self.error = None

    def close(self) -> None:
        """Stop and join all threads."""
        with self.lock:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads.values():
            thread.join()
        self.abandon()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self, lane: str) -> None:
        queue = self.queues[lane]
        while True:
            with self.lock:
                while not self.closed and not (self.error is None and queue and queue[0].ready):
                    self.changed.wait()
                if self.closed:
                    return
                command = queue.popleft()
                self.running += 1
            error: BaseException | None = None
            try:
                command.perform()
            except BaseException as raised:  # whatever it is, the host must see it
                error = raised
            with self.lock:
                self.running -= 1
                self.error = self.error or error
                command.end()
                self.changed.notify_all()


def _drop(queues: dict[str, deque[Command]]) -> None:
    """Empty the queues; nobody is left waiting for what was in them."""
    for queue in queues.values():
        while queue:
            queue.popleft().end()
