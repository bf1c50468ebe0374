"""Concerns that stack on any allocator: limit, statistics, log, fill-and-verify.

    pool = StatisticsPool(LoggedPool(Pool(size, "high-end")))

Each wrapper does its own part and hands the call on; blocking, announcements and the lock stay those of the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minidnn.errors import PoolError
from minidnn.memory.pool import NULL, Allocator, Block, Dump
from minidnn.memory.trace import GRANULARITY, Allocate, Event, Free, Trace
from minidnn.units import round_up


class Wrapper(Allocator):
    """Hands everything to `upstream`."""

    def __init__(self, upstream: Allocator) -> None:
        self.upstream = upstream
        self.lock, self.changed = upstream.lock, upstream.changed

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        return self.upstream.try_allocate(nbytes, role, label)

    def free(self, block: Block) -> None:
        self.upstream.free(block)

    def announce(self, block: Block) -> None:
        self.upstream.announce(block)

    def fail(self, error: BaseException) -> None:
        self.upstream.fail(error)

    def reach(self, role: str) -> int:
        return self.upstream.reach(role)

    def live(self) -> Iterator[Block]:
        return self.upstream.live()

    def dump(self) -> Dump:
        return self.upstream.dump()

    @property
    def size(self) -> int:
        return self.upstream.size

    @property
    def limit(self) -> int:
        return self.upstream.limit

    @property
    def used(self) -> int:
        return self.upstream.used

    @property
    def largest_free(self) -> int:
        return self.upstream.largest_free

    @property
    def pending(self) -> int:
        return self.upstream.pending

    @property
    def error(self) -> BaseException | None:
        return self.upstream.error


class LimitedPool(Wrapper):
    """Keeps the bytes in use within `limit`; requests beyond it wait or fail as if the pool were full."""

    def __init__(self, upstream: Allocator, limit: int) -> None:
        super().__init__(upstream)
        self._limit = limit

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        with self.lock:
            if nbytes > 0 and self.used + round_up(nbytes, GRANULARITY) > self._limit:
                return None
            return self.upstream.try_allocate(nbytes, role, label)

    def reach(self, role: str) -> int:
        with self.lock:
            return min(self.upstream.reach(role), max(self._limit - self.used, 0))

    @property
    def limit(self) -> int:
        return min(self._limit, self.upstream.limit)


@dataclass(frozen=True, slots=True)
class Statistics:
    """A pool at one moment, in bytes; `peak` is the most in use so far."""

    size: int
    used: int
    peak: int
    largest_free: int
    allocations: int
    frees: int

    @property
    def external_fragmentation(self) -> float:
        """Share of the free bytes that the largest free block does not have: 0 is one free block, near 1 is dust."""
        free = self.size - self.used
        return 1 - self.largest_free / free if free else 0.0


class StatisticsPool(Wrapper):
    """Counts."""

    def __init__(self, upstream: Allocator) -> None:
        super().__init__(upstream)
        self._peak = upstream.used
        self._allocations = 0
        self._frees = 0

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        with self.lock:
            block = self.upstream.try_allocate(nbytes, role, label)
            if block is not None:
                self._allocations += 1
                self._peak = max(self._peak, self.used)
            return block

    def free(self, block: Block) -> None:
        with self.lock:
            self.upstream.free(block)
            self._frees += 1

    @property
    def statistics(self) -> Statistics:
        """The counts now."""
        with self.lock:
            return Statistics(self.size, self.used, self._peak, self.largest_free, self._allocations, self._frees)


class LoggedPool(Wrapper):
    """Writes down every allocation and free that succeeds, as a trace that can be replayed through another pool."""

    def __init__(self, upstream: Allocator) -> None:
        super().__init__(upstream)
        self._events: list[Event] = []
        self._ids: dict[int, str] = {}  # address -> id
        self._serial = 0

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        with self.lock:
            block = self.upstream.try_allocate(nbytes, role, label)
            if block is not None and block is not NULL:
                identity = f"{label or 'block'}:{self._serial}"
                self._serial += 1
                self._ids[block.address] = identity
                self._events.append(Allocate(identity, nbytes, role))
            return block

    def free(self, block: Block) -> None:
        with self.lock:
            self.upstream.free(block)
            if block is not NULL:
                self._events.append(Free(self._ids.pop(block.address)))

    @property
    def trace(self) -> Trace:
        """What was logged so far."""
        with self.lock:
            return tuple(self._events)


class VerifiedPool(Wrapper):
    """Fills each block of `memory` with a pattern of its own and looks at it again when the block is freed.

    `memory` are the pool's bytes (writable); blocks must not be used for anything else. Finds overlapping blocks and
    writes from outside.
    """

    def __init__(self, upstream: Allocator, memory: memoryview) -> None:
        super().__init__(upstream)
        self._memory = memory.cast("B")
        self._patterns: dict[int, bytes] = {}  # address -> what the block must hold
        self._serial = 0

    def try_allocate(self, nbytes: int, role: str = "", label: str = "") -> Block | None:
        with self.lock:
            block = self.upstream.try_allocate(nbytes, role, label)
            if block is None or block is NULL:
                return block
            if block.address + block.nbytes > len(self._memory):
                self.upstream.free(block)
                raise PoolError(f"block at {block.address:#x} ends behind the {len(self._memory)} bytes of the memory")
            self._serial += 1
            pattern = self._serial.to_bytes(8, "little") * (block.nbytes // 8)
            self._patterns[block.address] = pattern
            self._memory[block.address : block.address + block.nbytes] = pattern
            return block

    def free(self, block: Block) -> None:
        with self.lock:
            pattern = self._patterns.get(block.address)
            if block is not NULL and pattern is not None and len(pattern) == block.nbytes:
                self._verify(block, pattern)
            self.upstream.free(block)
            if block is not NULL:
                del self._patterns[block.address]

    def verify(self) -> None:
        """Look at all live blocks. Raises PoolError for the first byte that changed."""
        with self.lock:
            for block in self.live():
                self._verify(block, self._patterns[block.address])

    def _verify(self, block: Block, pattern: bytes) -> None:
        held = bytes(self._memory[block.address : block.address + block.nbytes])
        if held != pattern:
            wrong = next(i for i, (a, b) in enumerate(zip(held, pattern, strict=True)) if a != b)
            raise PoolError(f"{block.label or 'block'} at {block.address:#x} was overwritten from byte {wrong} on")
