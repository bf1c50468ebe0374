"""The free blocks of a pool, in two orders that are always up to date: by address and by size.

By address they lie in short segments, each with its largest size, so that the first block that is large enough is found
without visiting the small ones; by size in one sorted list. A search takes O(log n) or, for first fit, O(sqrt n) steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

SEGMENT = 32  # a segment holds up to twice as many blocks: near sqrt(n) at the 10^4 blocks of a large pool
SHIFT = 64  # bits of an address
ADDRESS = (1 << SHIFT) - 1


class FreeList:
    """Disjoint free blocks (address, nbytes). It does not merge: the pool knows which neighbours may be merged."""

    def __init__(self) -> None:
        self.total = 0  # bytes
        self._nbytes: dict[int, int] = {}  # address -> bytes
        self._by_size: list[int] = []  # bytes << SHIFT | address: integers compare faster than pairs
        self._segments: list[list[int]] = []  # addresses in order
        self._starts: list[int] = []  # first address of each segment
        self._maxima: list[int] = []  # largest block of each segment, bytes

    def __len__(self) -> int:
        return len(self._nbytes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(address, nbytes) in order of address."""
        return ((address, self._nbytes[address]) for segment in self._segments for address in segment)

    # -- changes -----------------------------------------------------------------------------------------------------

    def add(self, address: int, nbytes: int) -> None:
        """Put a block in."""
        self._nbytes[address] = nbytes
        self.total += nbytes
        insort(self._by_size, nbytes << SHIFT | address)
        if not self._segments:
            self._segments, self._starts, self._maxima = [[address]], [address], [nbytes]
            return
        i = self._segment(address)
        segment = self._segments[i]
        insort(segment, address)
        self._starts[i] = segment[0]
        if nbytes > self._maxima[i]:
            self._maxima[i] = nbytes
        if len(segment) > 2 * SEGMENT:
            halves = segment[:SEGMENT], segment[SEGMENT:]
            self._segments[i : i + 1] = halves
            self._starts[i : i + 1] = [half[0] for half in halves]
            self._maxima[i : i + 1] = [self._maximum(half) for half in halves]

    def remove(self, address: int) -> int:
        """Take the block at `address` out; returns its bytes."""
        nbytes = self._nbytes.pop(address)
        self.total -= nbytes
        del self._by_size[bisect_left(self._by_size, nbytes << SHIFT | address)]
        i = self._segment(address)
        segment = self._segments[i]
        del segment[bisect_left(segment, address)]
        if not segment:
            del self._segments[i], self._starts[i], self._maxima[i]
            return nbytes
        self._starts[i] = segment[0]
        if nbytes == self._maxima[i]:
            self._maxima[i] = self._maximum(segment)
        return nbytes

    def resize(self, address: int, to: int, nbytes: int) -> None:
        """The block at `address` becomes [to, to + nbytes), with the same neighbours: cheaper than remove and add."""
        before = self._nbytes.pop(address)
        self._nbytes[to] = nbytes
        self.total += nbytes - before
        del self._by_size[bisect_left(self._by_size, before << SHIFT | address)]
        insort(self._by_size, nbytes << SHIFT | to)
        i = self._segment(address)
        segment = self._segments[i]
        if to != address:
            segment[bisect_left(segment, address)] = to
            self._starts[i] = segment[0]
        if nbytes >= self._maxima[i]:
            self._maxima[i] = nbytes
        elif before == self._maxima[i]:
            self._maxima[i] = self._maximum(segment)

    # -- questions ---------------------------------------------------------------------------------------------------

    def size_at(self, address: int) -> int | None:
        """Bytes of the block that begins at `address`; None where none does."""
        return self._nbytes.get(address)

    def before(self, address: int) -> tuple[int, int] | None:
        """The last block (address, nbytes) that begins at or below `address`."""
        if not self._starts or address < self._starts[0]:
            return None
        segment = self._segments[self._segment(address)]
        found = segment[bisect_right(segment, address) - 1]
        return found, self._nbytes[found]

    def first(self, nbytes: int) -> int | None:
        """Lowest address of a block with `nbytes` or more."""
        for i, largest in enumerate(self._maxima):
            if largest >= nbytes:
                return next(a for a in self._segments[i] if self._nbytes[a] >= nbytes)
        return None

    def highest(self, nbytes: int) -> tuple[int, int] | None:
        """The block (address, nbytes) with the highest address among those with `nbytes` or more."""
        for i in range(len(self._maxima) - 1, -1, -1):
            if self._maxima[i] >= nbytes:
                address = next(a for a in reversed(self._segments[i]) if self._nbytes[a] >= nbytes)
                return address, self._nbytes[address]
        return None

    def smallest(self, nbytes: int) -> tuple[int, int] | None:
        """The smallest block (address, nbytes) with `nbytes` or more; of equal ones the lowest address."""
        i = bisect_left(self._by_size, nbytes << SHIFT)
        if i == len(self._by_size):
            return None
        found = self._by_size[i]
        return found & ADDRESS, found >> SHIFT

    @property
    def largest(self) -> int:
        """Bytes of the largest block; 0 without blocks."""
        return self._by_size[-1] >> SHIFT if self._by_size else 0

    @property
    def last(self) -> tuple[int, int] | None:
        """The block (address, nbytes) with the highest address."""
        if not self._segments:
            return None
        address = self._segments[-1][-1]
        return address, self._nbytes[address]

    def _segment(self, address: int) -> int:
        """Index of the segment that holds, or would hold, `address`."""
        i = bisect_right(self._starts, address)
        return i - 1 if i else 0

    def _maximum(self, segment: list[int]) -> int:
        return max(map(self._nbytes.__getitem__, segment))
