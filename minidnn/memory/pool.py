"""A run-time memory pool after CNMeM, in integers: it hands out addresses and touches no bytes.

`Allocator` is what callers see; `Pool` is the root, `wrappers` stack limits, statistics, logs and checks on top. Every
allocator of a stack shares the root's re-entrant lock, so each call of a stack is one atomic step.

vDNN++ frees offloaded activations late, on release workers (section IV-A): such a free is announced beforehand, and an
allocation that finds no room waits while announced frees are outstanding. When none is, waiting cannot help, and the
allocation raises at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from threading import Condition, RLock
from typing import NamedTuple

from minidnn.arguments import shown
from minidnn.errors import ArgumentError, OutOfDeviceMemory, PoolError
from minidnn.memory.fit import Fit, named_fit
from minidnn.memory.freelist import FreeList
from minidnn.memory.trace import GRANULARITY
from minidnn.units import format_size, round_up

UNLIMITED = 2**63
"""A limit that never binds: the pool grows whenever it must."""


class Block(NamedTuple):
    """A piece of the pool in use: address and bytes (rounded up), and what the caller said it is for.

    The pool knows the blocks that it gave out by identity, not by value.
    """

    address: int
    nbytes: int
    role: str = ""
    label: str = ""


NULL = Block(0, 0)
"""What a request for 0 bytes gets. Freeing it does nothing."""


@dataclass(frozen=True, slots=True)
class Region:
    """A line of a dump. `head`: the region begins a chunk, so it never merges with what lies before it."""

    address: int
    nbytes: int
    head: bool
    role: str = ""
    label: str = ""

    def __str__(self) -> str:
        text = f"{self.address:#14x} {self.nbytes:>14} {'head' if self.head else '    '} {self.role} {self.label}"
        return text.rstrip()


@dataclass(frozen=True, slots=True)
class Dump:
    """The used and free regions of a pool, each in order of address."""

    used: tuple[Region, ...]
    free: tuple[Region, ...]

    def __str__(self) -> str:
        lines = [f"used: {len(self.used)}", *map(str, self.used), f"free: {len(self.free)}", *map(str, self.free)]
        return "\n".join(lines)


class Bell(Condition):
    """A condition that knows whether anybody waits, so that a free costs nothing more where nobody does."""

    waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


class Allocator(ABC):
    """A pool or a wrapper around one. Thread-safe."""

    lock: RLock
    """Makes each call of the stack one step."""
    changed: Bell
    """On `lock`; notified at every free and failure."""

    @abstractmethod
    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        """A block for `nbytes`, or None where there is no room now. Never waits. 0 bytes give `NULL`."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give a block back. Raises PoolError for a block that is not in use here."""

    @abstractmethod
    def announce(self, block: Block) -> None:
        """Promise that `block` will be freed without the help of a thread that may be waiting in `allocate`."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """An announced free cannot come: allocations that wait, or would, raise `error` instead."""

    @abstractmethod
    def reach(self, role: str) -> int:
        """Bytes of the largest request of this role that would be served now."""

    @abstractmethod
    def live(self) -> Iterator[Block]:
        """The blocks in use, in order of address."""

    @abstractmethod
    def dump(self) -> Dump:
        """The used and free lists."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all chunks."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """Bytes that may be in use at most."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes in blocks, rounded as the pool rounds."""

    @property
    @abstractmethod
    def largest_free(self) -> int:
        """Bytes of the largest free block."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Announced frees that have not come yet."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What `fail` was told."""

    def allocate(self, nbytes: int, role: str = "", label: str = "") -> Block:
        """A block for `nbytes`; waits for announced frees where there is no room.

        Raises OutOfDeviceMemory when no room is left and no announced free is outstanding, and what `fail` was told.
        """
        block = self.try_allocate(nbytes, role, label)  # the usual case, without the lock around it twice
        if block is not None:
            return block
        with self.lock:
            while True:
                block = self.try_allocate(nbytes, role, label)
                if block is not None:
                    return block
                if self.error is not None:
                    raise self.error
                if not self.pending:
                    raise OutOfDeviceMemory(self._out_of_memory(nbytes, role, label))
                self.changed.wait()

    def _out_of_memory(self, nbytes: int, role: str, label: str) -> str:
        what = " ".join(word for word in (role, label) if word)
        live = sorted(self.live(), key=lambda b: (-b.nbytes, b.address))
        names = [f"{b.label or b.role or 'block'} {format_size(b.nbytes)}" for b in live[:8]]
        more = f" and {len(live) - 8} more" if len(live) > 8 else ""
        limit = "none" if self.limit >= UNLIMITED else format_size(self.limit)
        return (
            f"no room for {format_size(nbytes)}{f' ({what})' if what else ''}: {format_size(self.used)} of "
            f"{format_size(self.size)} are in use, the largest free block is {format_size(self.largest_free)} "
            f"(usable for this request: {format_size(self.reach(role))}), the limit is {limit}, no release is pending; "
            f"live buffers: {', '.join(names) or 'none'}{more}"
        )


class Pool(Allocator):
    """Chunks of memory from which blocks are split off and into which they are merged back.

    Requests, and the pool itself, are rounded up to 512 bytes. A free block merges with free neighbours of its own
    chunk. Where no block serves, the pool grows by a chunk of exactly the rounded request as long as all chunks stay
    within `limit` (default: the first size, so it cannot grow); chunks are never merged, even when adjacent.
    """

    def __init__(self, nbytes: int, fit: Fit | str = "best-fit", limit: int | None = None) -> None:
        if nbytes < 0:
            raise ArgumentError(f"nbytes of the pool is {nbytes}; it must be 0 or more bytes")
        self.lock = RLock()
        self.changed = Bell(self.lock)
        self.fit = fit if isinstance(fit, Fit) else named_fit(fit)
        self._size = round_up(nbytes, GRANULARITY)
        self._limit = self._size if limit is None else limit
        self._free = FreeList()
        self._used: dict[int, Block] = {}
        self._used_bytes = 0
        self._announced: set[int] = set()  # addresses
        self._error: BaseException | None = None
        if self._size:
            self._free.add_chunk(0, self._size)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        if nbytes < 0:
            raise PoolError(f"nbytes of a request is {nbytes}; it must be 0 or more bytes")
        if nbytes == 0:
            return NULL
        nbytes = round_up(nbytes, GRANULARITY)
        with self.lock:
            address = self.fit.choose(self._free, nbytes, role)
            if address is not None and not isinstance(address, Integral):  # by a heuristic of the user's own
                raise PoolError(f"{self.fit.name} chose {shown(address)} for {nbytes} bytes; it must be an int or None")
            if address is None:
                if self._size + nbytes > self._limit:
                    return None
                address = self._size
                self._free.add_chunk(address, nbytes)
                self._size += nbytes
            if not self._free.cut(address, nbytes):
                raise PoolError(f"{self.fit.name} chose {address:#x} for {nbytes} bytes, which is not free")
            block = Block(address, nbytes, role, label)
            self._used[address] = block
            self._used_bytes += nbytes
            return block

    def free(self, block: Block) -> None:
        if block is NULL:
            return
        with self.lock:
            self._check(block)
            del self._used[block.address]
            self._used_bytes -= block.nbytes
            self._announced.discard(block.address)
            self._free.give(block.address, block.nbytes)
            if self.changed.waiting:
                self.changed.notify_all()

    def announce(self, block: Block) -> None:
        if block is NULL:
            return
        with self.lock:
            self._check(block)
            if block.address in self._announced:
                raise PoolError(f"the release of {_name(block)} was announced before; announce it once")
            self._announced.add(block.address)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self._error = error
            self.changed.notify_all()

    def _check(self, block: Block) -> None:
        if self._used.get(block.address) is not block:
            raise PoolError(f"{_name(block)} is not in use in this pool: freed before, or of another pool")

    # -- questions ---------------------------------------------------------------------------------------------------

    def reach(self, role: str) -> int:
        with self.lock:
            return self.fit.reach(self._free, role)

    def live(self) -> Iterator[Block]:
        with self.lock:
            return iter(sorted(self._used.values(), key=lambda block: block.address))

    def dump(self) -> Dump:
        with self.lock:
            used = (Region(b.address, b.nbytes, b.address in self._free.heads, b.role, b.label) for b in self.live())
            free = (Region(address, nbytes, address in self._free.heads) for address, nbytes in self._free)
            return Dump(tuple(used), tuple(free))

    @property
    def size(self) -> int:
        return self._size

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def used(self) -> int:
        return self._used_bytes

    @property
    def largest_free(self) -> int:
        with self.lock:
            return self._free.largest

    @property
    def pending(self) -> int:
        return len(self._announced)

    @property
    def error(self) -> BaseException | None:
        return self._error


def _name(block: Block) -> str:
    return f"{block.label or 'block'} (address {block.address:#x}, {block.nbytes} bytes)"
