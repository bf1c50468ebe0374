"""Each heuristic on a list of free blocks that tells them apart."""

from __future__ import annotations

import pytest

from minidnn.errors import ArgumentError
from minidnn.memory.fit import FITS, Fit, named_fit
from minidnn.memory.freelist import FreeList
from minidnn.memory.pool import Pool
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import Allocate


def free_list(*blocks: tuple[int, int]) -> FreeList:
    free = FreeList()
    for address, nbytes in blocks:
        free.add_chunk(address, nbytes)
    return free


BLOCKS = ((0, 6), (10, 3), (20, 9), (30, 3), (40, 9), (50, 2))


@pytest.mark.parametrize(
    ("fit", "role", "addresses"),
    [
        # requests of                    1   2   3   4   7   10
        ("best-fit", "kept", (50, 50, 10, 0, 20, None)),
        ("first-fit", "kept", (0, 0, 0, 0, 20, None)),
        ("exact-then-first", "kept", (0, 50, 10, 0, 20, None)),
        ("worst-fit", "kept", (20, 20, 20, 20, 20, None)),
        ("high-end", "kept", (51, 50, None, None, None, None)),
        ("high-end", "offloaded", (50, 50, 10, 0, 20, None)),
        ("high-end", "gradient", (50, 50, 10, 0, 20, None)),
        ("high-end-offloaded", "offloaded", (51, 50, 46, 45, 42, None)),
        ("high-end-offloaded", "kept", (50, 50, 10, 0, 20, None)),
    ],
)
def test_the_address_each_heuristic_chooses(fit: str, role: str, addresses: tuple[int | None, ...]) -> None:
    free = free_list(*BLOCKS)
    assert tuple(named_fit(fit).choose(free, n, role) for n in (1, 2, 3, 4, 7, 10)) == addresses


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("role", ["kept", "offloaded", ""])
def test_reach_is_the_largest_request_that_would_be_served(fit: str, role: str) -> None:
    for blocks in (BLOCKS, BLOCKS[:1], ()):
        free = free_list(*blocks)
        reach = named_fit(fit).reach(free, role)
        assert reach == max((n for n in range(1, 20) if named_fit(fit).choose(free, n, role) is not None), default=0)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"fit is 'buddy'; it must be one of best-fit, first-fit, .*end-offloaded"):
        Pool(512, "buddy")


def test_a_new_heuristic_is_one_small_class() -> None:
    class LastFit(Fit):
        name = "last-fit"

        def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
            found = free.highest(nbytes)
            return found[0] if found else None

    pool = Pool(4 * 512, LastFit())
    a, _, c = (pool.allocate(512) for _ in range(3))
    pool.free(a)
    pool.free(c)
    assert pool.allocate(512).address == 2 * 512
    assert smallest_pool((Allocate("x", 512),), LastFit()).fit == "last-fit"


def test_free_list_keeps_its_orders_through_many_changes() -> None:
    """Enough blocks for many segments; every second is taken, so that nothing merges until the end."""
    free, known = FreeList(), {}
    free.add_chunk(0, 20_000)
    for address in range(0, 20_000, 20):
        assert free.cut(address + 10, 10)
        known[address] = 10
    for address in sorted(known, key=lambda a: a * 7919 % 20_011)[:700]:
        taken = 1 + address % 10  # some from the low end, some from the high, some all
        at = address if address % 3 else address + 10 - taken
        assert free.cut(at, taken)
        del known[address]
        if taken < 10:
            known[address + (taken if at == address else 0)] = 10 - taken
    assert list(free) == sorted(known.items())
    assert (len(free), free.largest, free.last) == (len(known), 10, max(known.items()))
    for nbytes in range(1, 12):
        fitting = {a: n for a, n in known.items() if n >= nbytes}
        assert free.first(nbytes) == min(fitting, default=None)
        assert free.highest(nbytes) == max(fitting.items(), default=None)
        assert free.smallest(nbytes) == min(fitting.items(), key=lambda b: (b[1], b[0]), default=None)
    end = 0
    for address, nbytes in [*sorted(known.items()), (20_000, 0)]:
        if address > end:
            free.give(end, address - end)
        end = address + nbytes
    assert list(free) == [(0, 20_000)]


def test_free_list_cuts_within_one_block_only() -> None:
    free = free_list((0, 6), (10, 3))
    assert not any(free.cut(*wrong) for wrong in ((0, 7), (5, 3), (6, 1), (9, 2), (12, 2), (20, 1), (-1, 3), (9, 4)))
    assert list(free) == [(0, 6), (10, 3)]
    assert free.cut(2, 3)
    assert list(free) == [(0, 2), (5, 1), (10, 3)]
    assert free.cut(10, 3)
    assert free.cut(0, 2)
    assert free.cut(5, 1)
    assert (list(free), free.largest, free.last, free.first(1), free.smallest(1)) == ([], 0, None, None, None)


def test_free_list_finds_small_blocks_again_after_all_small_ones_were_taken() -> None:
    free = FreeList()
    for i in range(300):
        free.add_chunk(1000 * i, 1 + i)
    for i in range(150):
        assert free.cut(1000 * i, 1 + i)
    free.give(5000, 6)
    assert free.smallest(1) == (5000, 6)
    assert free.first(7) == 150_000
    assert [free.smallest(n) for n in (151, 300, 301)] == [(150_000, 151), (299_000, 300), None]
