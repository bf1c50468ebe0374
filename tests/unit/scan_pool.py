"""The pool as one list of cells that every operation scans: slow, and plain enough to be the oracle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Cell:
    address: int
    nbytes: int
    used: bool
    head: bool  # begins a chunk


class ScanPool:
    """CNMeM's rules by linear scans over all cells in order of address."""

    def __init__(self, nbytes: int, fit: str, limit: int) -> None:
        self.fit = fit
        self.limit = limit
        size = -(-nbytes // 512) * 512
        self.cells = [Cell(0, size, False, True)] if size else []

    @property
    def size(self) -> int:
        return sum(cell.nbytes for cell in self.cells)

    def allocate(self, nbytes: int, role: str) -> int | None:
        """Address of a block, None where there is no room."""
        nbytes = -(-nbytes // 512) * 512
        high = (self.fit, role) in (("high-end", "kept"), ("high-end-offloaded", "offloaded"))
        chosen = self._choose(nbytes, high)
        if chosen is None:
            if self.size + nbytes > self.limit:
                return None
            chosen = Cell(self.size, nbytes, False, True)
            self.cells.append(chosen)
        i = self.cells.index(chosen)
        rest = chosen.nbytes - nbytes
        if high:
            parts = [
                Cell(chosen.address, rest, False, chosen.head),
                Cell(chosen.address + rest, nbytes, True, chosen.head and not rest),
            ]
        else:
            parts = [
                Cell(chosen.address, nbytes, True, chosen.head),
                Cell(chosen.address + nbytes, rest, False, False),
            ]
        self.cells[i : i + 1] = [part for part in parts if part.nbytes]
        return next(part.address for part in parts if part.used)

    def free(self, address: int) -> None:
        """Give back the block at `address`."""
        next(cell for cell in self.cells if cell.address == address).used = False
        merged: list[Cell] = []
        for cell in self.cells:
            if merged and not cell.used and not merged[-1].used and not cell.head:
                merged[-1].nbytes += cell.nbytes
            else:
                merged.append(cell)
        self.cells = merged

    def _choose(self, nbytes: int, high: bool) -> Cell | None:
        free = [cell for cell in self.cells if not cell.used]
        room = [cell for cell in free if cell.nbytes >= nbytes]
        if high and self.fit == "high-end":
            return free[-1] if free and free[-1].nbytes >= nbytes else None
        if not room:
            return None
        if high:
            return room[-1]
        if self.fit == "first-fit":
            return room[0]
        if self.fit == "worst-fit":
            return max(room, key=lambda cell: cell.nbytes)  # the first of equal ones
        smallest = min(room, key=lambda cell: cell.nbytes)
        if self.fit == "exact-then-first" and smallest.nbytes != nbytes:
            return room[0]
        return smallest
