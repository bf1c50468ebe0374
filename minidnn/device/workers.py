"""Host workers: threads that wait for an event and then do something, in order. They outlive the iterations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from minidnn.device.base import Event


class Completion(Event):
    """Becomes done when a worker says so. Waiting costs a lock, not a condition variable."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Done. Once."""
        self._lock.release()

    def wait(self) -> None:
        """Block until done."""
        with self._lock:
            pass


class Workers:
    """Named threads. `start` runs first in each (it makes the device current); `await_event` blocks until an event."""

    def __init__(self, start: Callable[[], None], await_event: Callable[[Event], None]) -> None:
        self._start = start
        self._await = await_event
        self._queues: dict[str, SimpleQueue[tuple[Event, Callable[[], None], Completion] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def submit(self, worker: str, event: Event, action: Callable[[], None]) -> Completion:
        """On that worker, after what it was given before: wait for the event, do the action."""
        queue = self._queues.get(worker)
        if queue is None:
            queue = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(queue,), name=f"minidnn {worker}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._queues[worker] = queue
        done = Completion()
        queue.put((event, action, done))
        return done

    def check(self) -> None:
        """Raise what a worker raised, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Let the workers finish what they were given, and join them."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._queues.clear()
        self._threads.clear()

    def _work(self, queue: SimpleQueue[tuple[Event, Callable[[], None], Completion] | None]) -> None:
        started = False
        while (item := queue.get()) is not None:
            event, action, done = item
            try:
                if not started:
                    self._start()
                    started = True
                self._await(event)
                action()
            except BaseException as error:  # whatever it is, the host must see it, and nobody must wait for good
                self._error = self._error or error
            finally:
                done.set()
