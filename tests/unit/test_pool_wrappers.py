"""Limit, statistics, log and fill-and-verify, alone and stacked."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from minidnn.errors import OutOfDeviceMemory, PoolError
from minidnn.memory.pool import NULL, UNLIMITED, Block, Dump, Pool
from minidnn.memory.sizing import replay
from minidnn.memory.trace import Allocate, Free, aggregate_peak
from minidnn.memory.wrappers import LimitedPool, LoggedPool, StatisticsPool, VerifiedPool, Wrapper

KB = 512


def test_limit_keeps_the_rounded_bytes_in_use_below_it() -> None:
    pool = LimitedPool(Pool(8 * KB), 3 * KB)
    block = pool.allocate(2 * KB + 1)
    assert (pool.limit, pool.used, pool.reach("")) == (3 * KB, 3 * KB, 0)
    with pytest.raises(OutOfDeviceMemory, match=r"the limit is 1\.5 KiB"):
        pool.allocate(1)
    assert pool.allocate(0) is NULL
    pool.free(block)
    assert pool.reach("") == 3 * KB
    assert pool.allocate(3 * KB).address == 0


def test_limit_counts_requests_as_the_pool_rounds_them() -> None:
    pool = LimitedPool(Pool(8 * KB), 2 * KB - 1)
    pool.allocate(1)
    assert pool.try_allocate(1) is None


def test_limit_of_the_pool_itself_binds_first() -> None:
    assert LimitedPool(Pool(2 * KB), 3 * KB).limit == 2 * KB
    assert LimitedPool(Pool(2 * KB, limit=UNLIMITED), 3 * KB).limit == 3 * KB


def test_statistics_count_and_measure_fragmentation() -> None:
    pool = StatisticsPool(Pool(10 * KB))
    blocks = [pool.allocate(2 * KB) for _ in range(4)]
    assert pool.try_allocate(3 * KB) is None
    pool.free(blocks[0])
    pool.free(blocks[2])
    now = pool.statistics
    assert (now.size, now.used, now.peak, now.largest_free) == (10 * KB, 4 * KB, 8 * KB, 2 * KB)
    assert (now.allocations, now.frees) == (4, 2)
    assert now.external_fragmentation == pytest.approx(1 - 2 / 6)


def test_a_full_pool_and_an_empty_one_are_not_fragmented() -> None:
    pool = StatisticsPool(Pool(KB))
    assert pool.statistics.external_fragmentation == 0
    pool.allocate(KB)
    assert pool.statistics.external_fragmentation == 0


def test_a_failed_free_is_not_counted() -> None:
    pool = StatisticsPool(LoggedPool(Pool(KB)))
    block = pool.allocate(KB)
    pool.free(block)
    with pytest.raises(PoolError):
        pool.free(block)
    assert pool.statistics.frees == 1


def test_log_holds_what_was_asked_for() -> None:
    pool = LoggedPool(Pool(2 * KB))
    a = pool.allocate(700, "kept", "y")
    assert pool.try_allocate(KB) is None
    pool.allocate(0)
    pool.free(a)
    pool.allocate(1)
    assert pool.trace == (Allocate("y:0", 700, "kept"), Free("y:0"), Allocate("block:1", 1))


@pytest.mark.parametrize("fit", ["best-fit", "high-end-offloaded"])
def test_a_replayed_log_gives_the_same_addresses(fit: str) -> None:
    rng = random.Random(fit)
    log = LoggedPool(Pool(100 * KB, fit))
    live: list[Block] = []
    served: list[int] = []
    for _ in range(400):
        if live and rng.random() < 0.5:
            log.free(live.pop(rng.randrange(len(live))))
        elif block := log.try_allocate(rng.randint(1, 8 * KB), rng.choice(["kept", "offloaded"])):
            live.append(block)
            served.append(block.address)
    again = StatisticsPool(Pool(100 * KB, fit))
    assert [block.address for block in replay(log.trace, again).values()] == served
    assert again.statistics.peak == aggregate_peak(log.trace)
    assert again.used == log.used


def test_a_write_into_a_live_block_is_found_at_its_free() -> None:
    memory = bytearray(4 * KB)
    pool = VerifiedPool(Pool(4 * KB), memoryview(memory))
    a, b = pool.allocate(KB, label="a"), pool.allocate(2 * KB, label="b")
    pool.verify()
    memory[b.address + 600] ^= 1
    pool.free(a)
    for look in (pool.verify, lambda: pool.free(b)):
        with pytest.raises(PoolError, match="b at 0x200 was overwritten from byte 600 on"):
            look()


class Overlapping(Wrapper):
    """A broken pool: its second block begins within the first."""

    def __init__(self) -> None:
        super().__init__(Pool(8 * KB))
        self.blocks: list[Block] = []

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        self.blocks.append(Block(len(self.blocks) * KB, 2 * KB, role, label))
        return self.blocks[-1]

    def free(self, block: Block) -> None:
        self.blocks.remove(block)

    def live(self) -> Iterator[Block]:
        return iter(self.blocks)


def test_overlapping_blocks_are_found() -> None:
    pool = VerifiedPool(Overlapping(), memoryview(bytearray(8 * KB)))
    first = pool.allocate(2 * KB, label="first")
    pool.allocate(2 * KB, label="second")
    with pytest.raises(PoolError, match="first at 0x0 was overwritten from byte 512 on"):
        pool.free(first)


def test_verified_blocks_lie_within_the_memory() -> None:
    pool = VerifiedPool(Pool(8 * KB), memoryview(bytearray(KB)))
    pool.allocate(KB)
    with pytest.raises(PoolError, match="ends behind the 512 bytes"):
        pool.allocate(KB)
    assert pool.used == KB


def test_double_frees_are_found_through_a_stack() -> None:
    pool = VerifiedPool(LoggedPool(StatisticsPool(LimitedPool(Pool(4 * KB), 4 * KB))), memoryview(bytearray(4 * KB)))
    block = pool.allocate(KB)
    assert pool.allocate(0) is NULL
    pool.free(NULL)
    pool.announce(block)
    assert pool.pending == 1
    pool.free(block)
    with pytest.raises(PoolError, match="is not in use"):
        pool.free(block)
    assert pool.pending == 0
    assert pool.dump() == Dump((), pool.dump().free)
