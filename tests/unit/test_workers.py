"""Release workers: in order, after their events; what goes wrong in one is heard, and nobody waits for good."""

from __future__ import annotations

import threading

import pytest

from minidnn.device.base import Event
from minidnn.device.workers import Completion, Workers


def done() -> Completion:
    """An event that lies behind."""
    event = Completion()
    event.set()
    return event


def await_event(event: Event) -> None:
    """Block until an event of a worker."""
    assert isinstance(event, Completion)
    event.wait()


def reached(events: list[Completion]) -> None:
    """Wait for all of them, not for good."""

    def wait() -> None:
        for event in events:
            event.wait()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_worker_does_things_in_order_after_their_events() -> None:
    workers, seen, gate = Workers(lambda: None, await_event), list[int](), Completion()
    first = workers.submit("a", gate, lambda: seen.append(1))
    second = workers.submit("a", done(), lambda: seen.append(2))
    workers.submit("b", done(), lambda: seen.append(0)).wait()
    assert seen == [0]
    gate.set()
    first.wait()
    second.wait()
    workers.close()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("where", ["start", "event", "action"])
def test_an_error_in_a_worker_is_raised_once_and_ends_no_wait(where: str) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError(where)

    workers = Workers(fail if where == "start" else lambda: None, fail if where == "event" else await_event)
    waits = [workers.submit("a", done(), fail if where == "action" else lambda: None) for _ in range(3)]
    reached(waits)
    workers.close()
    with pytest.raises(RuntimeError, match=where):
        workers.check()
    workers.check()


def test_a_thread_that_cannot_be_started_leaves_workers_that_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(lambda: None, await_event)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.submit("a", done(), lambda: None)
    reached([workers.submit("a", done(), lambda: None)])
    workers.close()
