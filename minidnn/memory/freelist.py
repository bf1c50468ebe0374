"""The free blocks of a pool: cut and merged, in order of size, with their neighbours by address.

The order lies in short segments, each with its lowest and highest address: a search by size takes O(log n) steps, one
for the lowest or highest block that is large enough looks at one segment and at the bounds of the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

SEGMENT = 64  # a segment holds up to twice as many blocks: near sqrt(n) at the 10^4 blocks of a large pool
SHIFT = 64  # bits of an address; bytes << SHIFT | address sorts by size, then by address


class FreeList:
    """Free blocks (address, nbytes) of one or more chunks. Neighbours in the same chunk are always merged."""

    def __init__(self) -> None:
        self.heads: set[int] = set()  # addresses at which chunks begin
        self._nbytes: dict[int, int] = {}  # address -> bytes
        self._ends: dict[int, int] = {}  # first address behind a block -> its address
        # Per segment, in order: its keys; the addresses in them; the key from which on keys belong to it (0 for the
        # first, so that every key belongs to one); its lowest and highest address. There is always a segment.
        self._keys: list[list[int]] = [[]]
        self._addresses: list[list[int]] = [[]]
        self._starts = [0]
        self._lows = [0]
        self._highs = [0]

    def __len__(self) -> int:
        return len(self._nbytes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(address, nbytes) in order of address."""
        return iter(sorted(self._nbytes.items()))

    # -- changes -----------------------------------------------------------------------------------------------------

    def add_chunk(self, address: int, nbytes: int) -> None:
        """A new chunk, all free. It never merges with what lies before or behind it."""
        self.heads.add(address)
        self._add(address, nbytes)

    def cut(self, address: int, nbytes: int) -> bool:
        """Take [address, address + nbytes) out of the block around it; False where no block contains it."""
        start = address if address in self._nbytes else self._ends.get(address + nbytes)
        if start is None:  # at neither end of a block: no heuristic here does that, so look at all
            start = next((a for a, n in self._nbytes.items() if a < address < a + n), address)
        low, high = address - start, start + self._nbytes.get(start, 0) - address - nbytes
        if low < 0 or high < 0:
            return False
        self._remove(start)
        if low:
            self._add(start, low)
        if high:
            self._add(address + nbytes, high)
        return True

    def give(self, address: int, nbytes: int) -> None:
        """Put a block back, together with its free neighbours in the same chunk."""
        after = address + nbytes
        if after in self._nbytes and after not in self.heads:
            nbytes += self._remove(after)
        if address in self._ends and address not in self.heads:
            address = self._ends[address]
            nbytes += self._remove(address)
        self._add(address, nbytes)

    def _add(self, address: int, nbytes: int) -> None:
        self._nbytes[address] = nbytes
        self._ends[address + nbytes] = address
        key = nbytes << SHIFT | address
        i = bisect_right(self._starts, key) - 1
        keys, addresses = self._keys[i], self._addresses[i]
        at = bisect_left(keys, key)
        keys.insert(at, key)
        addresses.insert(at, address)
        if len(keys) == 1:
            self._lows[i] = self._highs[i] = address
        elif address < self._lows[i]:
            self._lows[i] = address
        elif address > self._highs[i]:
            self._highs[i] = address
        if len(keys) > 2 * SEGMENT:
            self._halve(i)

    def _remove(self, address: int) -> int:
        nbytes = self._nbytes.pop(address)
        del self._ends[address + nbytes]
        key = nbytes << SHIFT | address
        i = bisect_right(self._starts, key) - 1
        keys, addresses = self._keys[i], self._addresses[i]
        at = bisect_left(keys, key)
        del keys[at], addresses[at]
        if not keys:
            if len(self._keys) > 1:
                for column in (self._keys, self._addresses, self._starts, self._lows, self._highs):
                    del column[i]
                self._starts[0] = 0
            return nbytes
        if address == self._lows[i]:
            self._lows[i] = min(addresses)
        if address == self._highs[i]:
            self._highs[i] = max(addresses)
        return nbytes

    # -- questions ---------------------------------------------------------------------------------------------------

    def smallest(self, nbytes: int) -> tuple[int, int] | None:
        """The smallest block (address, nbytes) with `nbytes` or more; of equal ones the lowest address."""
        i, at = self._position(nbytes)
        if at == len(self._keys[i]):
            if i + 1 == len(self._keys):
                return None
            i, at = i + 1, 0
        return self._addresses[i][at], self._keys[i][at] >> SHIFT

    def first(self, nbytes: int) -> int | None:
        """Lowest address of a block with `nbytes` or more."""
        i, at = self._position(nbytes)
        return min(self._addresses[i][at:] + self._lows[i + 1 :], default=None)

    def highest(self, nbytes: int) -> tuple[int, int] | None:
        """The block (address, nbytes) with the highest address among those with `nbytes` or more."""
        i, at = self._position(nbytes)
        found = self._addresses[i][at:] + self._highs[i + 1 :]
        return (max(found), self._nbytes[max(found)]) if found else None

    @property
    def largest(self) -> int:
        """Bytes of the largest block; 0 without blocks."""
        return self._keys[-1][-1] >> SHIFT if self._nbytes else 0

    @property
    def last(self) -> tuple[int, int] | None:
        """The block (address, nbytes) with the highest address."""
        return self.highest(0)

    def _position(self, nbytes: int) -> tuple[int, int]:
        """Segment, and index in it, where the blocks with `nbytes` or more begin."""
        key = nbytes << SHIFT
        i = bisect_right(self._starts, key) - 1
        return i, bisect_left(self._keys[i], key)

    def _halve(self, i: int) -> None:
        keys, addresses = self._keys[i], self._addresses[i]
        low, high = addresses[:SEGMENT], addresses[SEGMENT:]
        self._keys[i : i + 1] = [keys[:SEGMENT], keys[SEGMENT:]]
        self._addresses[i : i + 1] = [low, high]
        self._starts.insert(i + 1, keys[SEGMENT])
        self._lows[i : i + 1] = [min(low), min(high)]
        self._highs[i : i + 1] = [max(low), max(high)]
