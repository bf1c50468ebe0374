"""Allocations that wait for announced frees, and those that must not wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, RLock, Thread

import pytest

from minidnn.errors import OutOfDeviceMemory, PoolError
from minidnn.memory.pool import UNLIMITED, Allocator, Bell, Block, Pool
from minidnn.memory.wrappers import LimitedPool, VerifiedPool

KB = 512


def test_no_room_and_nothing_pending_raises_at_once_and_says_all_there_is_to_know() -> None:
    pool = Pool(10 * KB)
    pool.allocate(4 * KB, "kept", "features.0.y#0")
    middle = pool.allocate(KB)
    pool.allocate(2 * KB, "gradient")
    pool.free(middle)
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.allocate(4 * KB, "offloaded", "features.2.y#0")
    assert str(caught.value) == (
        "no room for 2.0 KiB (offloaded features.2.y#0): 3.0 KiB of 5.0 KiB are in use, the largest free block is "
        "1.5 KiB (usable for this request: 1.5 KiB), the limit is 5.0 KiB, no release is pending; live buffers: "
        "features.0.y#0 2.0 KiB, gradient 1.0 KiB"
    )


def test_the_sentence_shows_what_the_heuristic_could_use() -> None:
    pool = Pool(4 * KB, "high-end", limit=UNLIMITED)
    top = pool.allocate(KB, "kept")
    pool.allocate(KB, "kept")
    pool.free(top)
    full = LimitedPool(pool, 2 * KB)
    with pytest.raises(OutOfDeviceMemory, match=r"largest free block is 1\.0 KiB \(usable for this request: 512 B\)"):
        full.allocate(2 * KB, "kept")


def test_many_live_buffers_are_summed_up() -> None:
    pool = Pool(10 * KB)
    for i in range(10):
        pool.allocate(KB, label=f"b{i}")
    with pytest.raises(OutOfDeviceMemory, match=r"b7 512 B and 2 more$"):
        pool.allocate(KB)


class Script(Bell):
    """Stands for the pool's condition: each wait performs the next step of other threads."""

    def __init__(self, pool: Allocator, *steps: Callable[[], None]) -> None:
        super().__init__(pool.lock)
        self.steps = list(steps)

    def wait(self, timeout: float | None = None) -> bool:
        self.steps.pop(0)()
        return True


class Telling(Bell):
    """Sets `told` when a thread is about to wait; the lock is held from there until it does."""

    def __init__(self, lock: RLock) -> None:
        super().__init__(lock)
        self.told = Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.told.set()
        return super().wait(timeout)


@pytest.mark.parametrize("limited", [False, True])
def test_an_allocation_waits_for_an_announced_free(limited: bool) -> None:
    pool = LimitedPool(Pool(8 * KB), 4 * KB) if limited else Pool(4 * KB)
    block = pool.allocate(4 * KB)
    pool.announce(block)
    assert pool.pending == 1
    pool.changed = script = Script(pool, lambda: pool.free(block))
    assert pool.allocate(3 * KB).address == 0
    assert script.steps == []
    assert pool.pending == 0


def test_a_free_that_does_not_suffice_lets_the_allocation_wait_for_the_next() -> None:
    pool = Pool(4 * KB)
    first, second = pool.allocate(2 * KB), pool.allocate(2 * KB)
    pool.announce(first)
    pool.announce(second)
    pool.changed = script = Script(pool, lambda: pool.free(first), lambda: pool.free(second))
    assert pool.allocate(4 * KB).nbytes == 4 * KB
    assert script.steps == []


def test_fragmentation_that_no_announced_free_heals_raises_instead_of_hanging() -> None:
    pool = Pool(4 * KB)
    first, _, third = pool.allocate(2 * KB), pool.allocate(KB), pool.allocate(KB)
    pool.announce(first)
    pool.announce(third)
    pool.changed = script = Script(pool, lambda: pool.free(third), lambda: pool.free(first))
    with pytest.raises(OutOfDeviceMemory, match=r"largest free block is 1\.0 KiB"):
        pool.allocate(3 * KB)
    assert script.steps == []


def test_a_failed_release_reaches_the_waiting_thread_and_later_ones() -> None:
    pool = Pool(KB)
    block = pool.allocate(KB)
    pool.announce(block)
    pool.changed = Script(pool, lambda: pool.fail(RuntimeError("the copy-out failed")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the copy-out failed"):
            pool.allocate(KB)
    pool.free(block)
    assert pool.allocate(KB).address == 0


def test_a_waiting_thread_is_woken_by_a_free_and_by_a_failure() -> None:
    for end in ("free", "fail"):
        pool = Pool(KB)
        block = pool.allocate(KB)
        pool.announce(block)
        pool.changed = bell = Telling(pool.lock)
        with ThreadPoolExecutor(1) as main:
            future = main.submit(pool.allocate, KB)
            bell.told.wait()
            if end == "free":
                pool.free(block)
                assert future.result().address == 0
            else:
                pool.fail(ValueError("gone"))
                with pytest.raises(ValueError, match="gone"):
                    future.result()


def test_every_waiting_thread_is_told_when_nothing_is_left_to_wait_for() -> None:
    pool = Pool(2 * KB)
    small, _ = pool.allocate(KB), pool.allocate(KB)
    pool.announce(small)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(pool.allocate, 2 * KB) for _ in range(3)]
        pool.free(small)
        for future in waiting:
            with pytest.raises(OutOfDeviceMemory):
                future.result()


def test_a_release_is_announced_once() -> None:
    pool = Pool(KB)
    block = pool.allocate(KB)
    pool.announce(block)
    with pytest.raises(PoolError, match="announced before"):
        pool.announce(block)


def test_growth_comes_before_waiting() -> None:
    pool = Pool(KB, limit=2 * KB)
    pool.announce(pool.allocate(KB))
    assert pool.allocate(KB).address == KB


def test_patterns_of_eight_threads_survive() -> None:
    """Each thread allocates, holds and frees; each block keeps its own bytes, and in the end all is merged."""
    size = 64 * KB
    pool = VerifiedPool(Pool(size), memoryview(bytearray(size)))

    def work(seed: int) -> int:
        rng, held, served = random.Random(seed), list[Block](), 0
        for _ in range(1500):
            block = pool.try_allocate(rng.randint(1, 4 * KB), label=f"thread {seed}")
            if block is not None:
                held.append(block)
                served += 1
            if held and (block is None or len(held) > 4):
                pool.free(held.pop(rng.randrange(len(held))))
        for block in held:
            pool.free(block)
        return served

    with ThreadPoolExecutor(8) as threads:
        served = list(threads.map(work, range(8)))
    assert min(served) > 100
    assert [(r.address, r.nbytes) for r in pool.dump().free] == [(0, size)]


def test_eight_threads_that_wait_for_one_another_all_finish() -> None:
    """A main thread per pool fills it; a release worker frees behind it, as vDNN++ does."""
    pool = Pool(6 * KB)
    allocated = [Event() for _ in range(300)]
    blocks: list[Block] = []

    def release() -> None:
        for i in range(300):
            allocated[i].wait()
            pool.free(blocks[i])

    worker = Thread(target=release)
    worker.start()
    rng = random.Random(0)
    for i in range(300):
        block = pool.allocate(rng.randint(1, 3) * KB)
        pool.announce(block)
        blocks.append(block)
        allocated[i].set()
    worker.join()
    assert pool.largest_free == 6 * KB


def test_threads_compete_for_room_through_announced_frees() -> None:
    """Each thread announces its block as soon as it has it, so that the others may wait for it."""
    pool = Pool(4 * KB)

    def work(seed: int) -> int:
        rng = random.Random(seed)
        for done in range(200):
            with pool.lock:
                try:
                    block = pool.allocate(rng.randint(1, 2) * KB)
                except OutOfDeviceMemory:
                    return done
                pool.announce(block)
            pool.free(block)
        return 200

    with ThreadPoolExecutor(8) as threads:
        futures: list[Future[int]] = [threads.submit(work, seed) for seed in range(8)]
        assert [future.result() for future in futures] == [200] * 8
    assert pool.largest_free == 4 * KB
