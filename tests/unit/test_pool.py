"""The run-time pool: CNMeM's rules, against a plain scan and in its corners."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.arguments import shown
from minidnn.errors import ArgumentError, OutOfDeviceMemory, PoolError
from minidnn.memory.fit import FITS, BestFit, Fit
from minidnn.memory.freelist import FreeList
from minidnn.memory.pool import NULL, UNLIMITED, Block, Dump, Pool
from minidnn.memory.sizing import smallest_pool

from .scan_pool import ScanPool

KB = 512
ROLES = ("kept", "offloaded", "gradient")


def spans(dump: Dump) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int, bool]]]:
    """Used and free regions as (address, nbytes, head)."""
    used = [(r.address, r.nbytes, r.head) for r in dump.used]
    return used, [(r.address, r.nbytes, r.head) for r in dump.free]


def scanned(oracle: ScanPool) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int, bool]]]:
    used = [(c.address, c.nbytes, c.head) for c in oracle.cells if c.used]
    return used, [(c.address, c.nbytes, c.head) for c in oracle.cells if not c.used]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("limit", "largest"), [(400_000, 20_000), (2_000_000, 9_000), (UNLIMITED, 100_000)])
def test_agrees_with_the_plain_scan(fit: str, limit: int, largest: int) -> None:
    """6000 random operations for each heuristic and limit, 108 000 in all: same addresses, same lists."""
    rng = random.Random(f"{fit} {limit}")
    pool = Pool(min(limit, 400_000), fit, limit)
    oracle = ScanPool(min(limit, 400_000), fit, limit)
    blocks: list[Block] = []
    for step in range(6000):
        if blocks and (rng.random() < 0.5 or len(blocks) > 150):
            block = blocks.pop(rng.randrange(len(blocks)))
            pool.free(block)
            oracle.free(block.address)
        else:
            nbytes, role = rng.choice((rng.randint(1, largest), 1024, 4096)), rng.choice(ROLES)
            served = pool.try_allocate(nbytes, role)
            assert (served.address if served else None) == oracle.allocate(nbytes, role)
            if served:
                blocks.append(served)
        if step % 20 == 0:
            assert spans(pool.dump()) == scanned(oracle)
    for block in blocks:
        pool.free(block)
        oracle.free(block.address)
    assert spans(pool.dump()) == scanned(oracle)
    assert pool.used == 0


def test_agrees_with_the_plain_scan_with_thousands_of_free_blocks() -> None:
    """Enough of them for the address order to be kept in many segments."""
    for fit in FITS:
        rng = random.Random(fit)
        pool, oracle = Pool(1500 * 40 * KB, fit), ScanPool(1500 * 40 * KB, fit, 0)
        blocks = [pool.allocate(rng.randint(1, 20) * KB, "gradient") for _ in range(1500)]
        assert [block.address for block in blocks] == [oracle.allocate(block.nbytes, "gradient") for block in blocks]
        rng.shuffle(blocks)
        for _ in range(700):
            block = blocks.pop()
            pool.free(block)
            oracle.free(block.address)
        for _ in range(150):
            nbytes, role = rng.randint(1, 20) * KB, rng.choice(ROLES)
            served = pool.try_allocate(nbytes, role)
            assert (served.address if served else None) == oracle.allocate(nbytes, role)
        assert spans(pool.dump()) == scanned(oracle)


@given(
    st.sampled_from(sorted(FITS)),
    st.lists(st.tuples(st.integers(0, 9000), st.sampled_from(ROLES), st.booleans()), max_size=60),
    st.booleans(),
)
def test_blocks_never_overlap_and_all_free_space_merges(
    fit: str, requests: list[tuple[int, str, bool]], grows: bool
) -> None:
    pool = Pool(30_000, fit, UNLIMITED if grows else None)
    live: list[Block] = []
    for nbytes, role, frees in requests:
        if frees and live:
            pool.free(live.pop(nbytes % len(live)))
        block = pool.try_allocate(nbytes, role)
        if block is not None and block is not NULL:
            live.append(block)
        dump = pool.dump()
        regions = sorted((r.address, r.nbytes) for r in dump.used + dump.free)
        ends = [0, *(address + size for address, size in regions)]
        assert [address for address, _ in regions] == ends[:-1]  # neither overlap nor gap
        assert ends[-1] == pool.size
        assert pool.used == sum(block.nbytes for block in live)
        assert pool.largest_free == max((r.nbytes for r in dump.free), default=0)
    for block in live:
        pool.free(block)
    free = pool.dump().free
    assert all(region.head for region in free)  # one block for each chunk
    assert sum(region.nbytes for region in free) == pool.size
    assert grows or len(free) == 1


def test_requests_and_the_pool_are_rounded_up_to_512_bytes() -> None:
    pool = Pool(1000)
    assert pool.size == 1024
    assert [pool.allocate(n).nbytes for n in (1, 512)] == [512, 512]


def test_an_exact_block_is_not_split_and_a_larger_one_gives_its_low_part() -> None:
    pool = Pool(4 * KB)
    a = pool.allocate(2 * KB)
    pool.allocate(KB)
    pool.free(a)
    assert pool.allocate(KB).address == 3 * KB  # the exact block at the end, not the larger one before
    assert pool.allocate(KB).address == 0
    assert spans(pool.dump())[1] == [(KB, KB, False)]


def test_zero_bytes_give_the_null_block_and_freeing_it_does_nothing() -> None:
    pool = Pool(KB)
    assert pool.allocate(0) is NULL
    pool.free(NULL)
    pool.free(NULL)
    pool.announce(NULL)
    assert (pool.used, pool.pending) == (0, 0)


def test_double_free_is_an_error() -> None:
    pool = Pool(KB)
    block = pool.allocate(1, label="features.0.y")
    pool.free(block)
    with pytest.raises(PoolError, match=r"features\.0\.y .* is not in use in this pool"):
        pool.free(block)
    again = pool.allocate(1, label="features.0.y")
    with pytest.raises(PoolError):
        pool.free(block)  # its address is in use again, but by another block
    pool.free(again)


def test_a_foreign_block_is_an_error() -> None:
    ours, other = Pool(KB), Pool(KB)
    block = other.allocate(1)
    ours.allocate(1)
    for call in (ours.free, ours.announce):
        with pytest.raises(PoolError, match="not in use in this pool"):
            call(block)
    with pytest.raises(PoolError):
        ours.free(Block(5 * KB, KB))


def test_sizes_below_zero_are_errors() -> None:
    with pytest.raises(PoolError, match="request is -1"):
        Pool(KB).allocate(-1)
    with pytest.raises(ArgumentError, match="pool is -5"):
        Pool(-5)


def test_growth_adds_chunks_of_exactly_the_rounded_request_and_never_merges_them() -> None:
    pool = Pool(2 * KB, limit=UNLIMITED)
    blocks = [pool.allocate(n) for n in (2 * KB, 700, 1)]
    assert [(b.address, b.nbytes) for b in blocks] == [(0, 2 * KB), (2 * KB, 2 * KB), (4 * KB, KB)]
    for block in blocks:
        pool.free(block)
    assert spans(pool.dump())[1] == [(0, 2 * KB, True), (2 * KB, 2 * KB, True), (4 * KB, KB, True)]
    assert pool.allocate(3 * KB).address == 5 * KB


def test_growth_stops_at_the_limit() -> None:
    pool = Pool(2 * KB, limit=4 * KB)
    pool.allocate(2 * KB)
    with pytest.raises(OutOfDeviceMemory):
        pool.allocate(3 * KB)
    assert pool.allocate(2 * KB).address == 2 * KB
    assert pool.size == 4 * KB
    with pytest.raises(OutOfDeviceMemory):
        pool.allocate(1)


def test_a_pool_without_bytes_serves_nothing_or_grows() -> None:
    assert Pool(0).try_allocate(1) is None
    assert Pool(0, limit=UNLIMITED).allocate(1).address == 0


def test_dump_lists_address_size_and_chunk_heads() -> None:
    pool = Pool(3 * KB, limit=UNLIMITED)
    pool.allocate(KB, "kept", "x1")
    pool.allocate(3 * KB, "gradient", "dx2")
    assert str(pool.dump()).splitlines() == [
        "used: 2",
        "           0x0            512 head kept x1",
        "         0x600           1536 head gradient dx2",
        "free: 1",
        "         0x200           1024",
    ]


def test_a_heuristic_that_points_outside_the_free_blocks_is_an_error() -> None:
    class Wrong(Fit):
        name = "wrong"

        def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
            return 3 * KB

    pool = Pool(4 * KB, Wrong())
    with pytest.raises(PoolError, match="wrong chose 0x600 for 1024 bytes, which is not free"):
        pool.allocate(2 * KB)
    assert pool.allocate(KB).address == 3 * KB
    with pytest.raises(PoolError):
        pool.allocate(KB)
    assert pool.used == KB


@pytest.mark.parametrize("address", ["0", 0.0, (0, 512), np.zeros(2)])
def test_a_heuristic_that_returns_no_address_is_an_error(address: Any) -> None:
    class Wrong(Fit):
        name = "wrong"

        def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
            return address  # type: ignore[no-any-return]

    pool = Pool(4 * KB, Wrong())
    with pytest.raises(PoolError) as refused:
        pool.allocate(KB)
    assert str(refused.value) == f"wrong chose {shown(address)} for 512 bytes; it must be an int or None"
    assert pool.used == 0


@pytest.mark.parametrize("fit", [5, None, BestFit, ["best-fit"]])
def test_what_is_no_heuristic_is_refused(fit: Any) -> None:
    for use in (lambda: Pool(KB, fit), lambda: smallest_pool((), fit)):
        with pytest.raises(ArgumentError, match=r"fit is .*; it must be one of best-fit, first-fit"):
            use()
