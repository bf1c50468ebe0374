"""Zero-value compression of offloaded activations on CPU cores (vDNN++, sections III-C, IV-C and V-C).

ReLU outputs are mostly zeros, so packing them gives most of their pinned memory back. The values, taken as 32-bit or
16-bit patterns, form groups of 32; a group is kept as a 32-bit mask of its non-zero patterns, and those patterns lie
packed behind one another. "Zero" means that no bit is set, so every input comes back bit for bit: negative zeros,
NaN payloads and denormals are values.

A tensor is cut into parts (`split`); `pack` and `unpack` handle one part each, on the thread that calls them, and
release the GIL. A part's packed values grow in steps (chunks) of its bytes / FRAC, because counting first takes
twice the time (section IV-C). A part that would not get smaller is kept as it is.

    parts = [pack(words[where], memory=memory) for where in split(words.size, 8)]      one task per codec worker
    packed = compress(array, threads=8); decompress(packed)                            all of it, for users
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import ArgumentError, BudgetError, CodecError, PoolError
from minidnn.units import format_size, round_up

GROUP = 32  # values that share a mask
FRAC = 8  # steps in which a part's packed values grow to the part's size
PARTS = 8  # parts of a tensor

A = TypeVar("A")
B = TypeVar("B")
Words = NDArray[Any]  # 1-D uint32 or uint16: the bit patterns of the values


class PackedMemory:
    """Pageable memory for packed tensors: counted, limited, and re-used while its pages are mapped. Thread-safe.

    `used` and `peak` are the bytes in packed parts now and at most; freed buffers of the same size serve again (a fresh
    page costs more than packing into it), and those that wait never lift the memory held above `peak`.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ArgumentError(f"limit is {limit}; it must be 0 or more bytes, or None for no limit")
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.idle = 0
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}  # address -> bytes
        self._idle: dict[int, list[Words]] = {}  # bytes -> buffers

    def take(self, count: int, dtype: Any) -> Words:
        """`count` uninitialised elements of `dtype`. Raises BudgetError where they would exceed the limit."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return np.empty(0, dtype)
        with self._lock:
            if self.limit is not None and self.used + nbytes > self.limit:
                raise BudgetError(
                    f"packed memory is limited to {format_size(self.limit)}, of which {format_size(self.used)} are in "
                    f"use, so {format_size(nbytes)} more do not fit; allow {self.used + nbytes} bytes at least, or "
                    "compress less"
                )
            waiting = self._idle.get(nbytes)
            if waiting:
                array = waiting.pop()
                self.idle -= nbytes
            else:
                self._drop_idle(max(0, self.peak - self.used - nbytes))
                array = np.empty(nbytes, np.uint8)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            self._taken[array.__array_interface__["data"][0]] = nbytes
        return array.view(dtype)

    def give(self, array: Words) -> None:
        """Return what `take` gave. Raises PoolError for any other array and for one returned before."""
        if array.size == 0:
            return
        address, nbytes = array.__array_interface__["data"][0], array.nbytes
        with self._lock:
            if self._taken.get(address) != nbytes:
                raise PoolError(f"an array of {nbytes} bytes was returned that is not taken from this packed memory")
            del self._taken[address]
            self.used -= nbytes
            self.idle += nbytes
            self._idle.setdefault(nbytes, []).append(array)

    def trim(self) -> None:
        """Let the buffers go that wait to be used again."""
        with self._lock:
            self._drop_idle(0)

    def _drop_idle(self, allowed: int) -> None:
        while self.idle > allowed:
            nbytes, waiting = next(iter(self._idle.items()))
            while waiting and self.idle > allowed:
                waiting.pop()
                self.idle -= nbytes
            if not waiting:
                del self._idle[nbytes]


@dataclass(eq=False, slots=True)
class PackedPart:
    """A packed part of a tensor. `release` it when its values are back, or no longer needed.

    masks     (groups,) uint32: bit j of masks[g] is set where value 32 g + j is kept; empty in a raw part
    chunks    the kept values in order; used[i] of them are in chunk i
    rest      values stored as they are: those behind the last whole group, or all values of a raw part
    checksum  64 bits over all of these, or None
    """

    length: int
    memory: PackedMemory
    masks: Words
    chunks: list[Words]
    used: list[int]
    rest: Words
    checksum: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the part occupies, unused ends of chunks included."""
        return sum(array.nbytes for array in (self.masks, *self.chunks, self.rest))

    @property
    def raw(self) -> bool:
        """Whether the values are kept as they were, because packing would not make them smaller."""
        return self.rest.size == self.length

    def release(self) -> None:
        """Return the memory; a second call does nothing."""
        arrays = (self.masks, *self.chunks, self.rest)
        self.masks, self.chunks, self.used, self.rest = self.masks[:0], [], [], self.rest[:0]
        for array in arrays:
            self.memory.give(array)


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed array: its shape and dtype, and its parts in order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[PackedPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the parts occupy."""
        return sum(part.nbytes for part in self.parts)

    def release(self) -> None:
        """Return the memory of all parts."""
        for part in self.parts:
            part.release()


def split(length: int, parts: int = PARTS) -> tuple[slice, ...]:
    """`length` values as `parts` ranges of whole groups, equal to within one; the last takes what is left over."""
    if parts < 1:
        raise ArgumentError(f"parts is {parts}; it must be 1 or more")
    cuts = [k * (length // GROUP) // parts * GROUP for k in range(parts)]
    return tuple(slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], length], strict=True))


def chunk_size(length: int, frac: int = FRAC) -> int:
    """Values in a chunk of a part of `length` values: a `frac`-th of the part, in whole groups."""
    if frac < 1:
        raise ArgumentError(f"frac is {frac}; it must be 1 or more")
    return max(GROUP, round_up(-(-length // frac), GROUP))


def pack(values: Words, *, frac: int = FRAC, memory: PackedMemory | None = None, checksum: bool = False) -> PackedPart:
    """Pack one part of a tensor, on this thread.

    values: contiguous, of elements of 2 bytes or of a multiple of 4. Raises BudgetError, with nothing taken, where the
    limit of `memory` does not suffice. `checksum` guards the packed data until `unpack`; bench/zvc.py shows its cost.
    """
    words = _words(values, "values")
    step = chunk_size(words.size, frac)
    part = PackedPart(
        words.size, PackedMemory() if memory is None else memory, np.empty(0, np.uint32), [], [], words[:0]
    )
    try:
        if not _pack_groups(part, words, step):
            part.release()
            part.rest = part.memory.take(words.size, words.dtype)
            np.copyto(part.rest, words)
        if checksum:
            part.checksum = _digest(part)
    except BaseException:
        part.release()
        raise
    return part


def _pack_groups(part: PackedPart, words: Words, step: int) -> bool:
    """Fill masks, chunks and rest; False as soon as the part would not be smaller than `words`."""
    from minidnn.codec import loops

    groups, whole = divmod(words.size, GROUP)
    if groups == 0:
        return False
    part.rest = part.memory.take(whole, words.dtype)
    np.copyto(part.rest, words[groups * GROUP :])
    part.masks = part.memory.take(groups, np.uint32)
    done, _ = loops.pack(words, part.masks, 0, np.empty(0, words.dtype))  # zeros at the front need no chunk
    while done < groups:
        if part.nbytes + step * words.itemsize >= words.nbytes:
            return False
        part.chunks.append(part.memory.take(step, words.dtype))
        done, used = loops.pack(words, part.masks, done, part.chunks[-1])
        part.used.append(used)
    return True


def unpack(part: PackedPart, out: Words) -> None:
    """Write the values of `part` to `out` (contiguous, as many bytes as were packed, any dtype of the same word size).

    Raises CodecError where the packed data are damaged; `out` then holds no meaningful values. Damage that keeps the
    number of values of each chunk is noticed only with a checksum.
    """
    from minidnn.codec import loops

    words = _words(out, "out")
    if not out.flags.writeable or words.size != part.length or words.dtype != part.rest.dtype:
        raise ArgumentError(
            f"out has {words.size} {words.dtype} words (writable: {out.flags.writeable}); the part needs {part.length} "
            f"writable {part.rest.dtype} words"
        )
    groups = part.masks.size
    if groups * GROUP + part.rest.size != part.length:
        raise CodecError("the packed part was released; unpack it before its release")
    total = _fold(part.masks, part.length) if part.checksum is not None else 0
    done, _ = loops.unpack(words, part.masks, 0, part.rest[:0])
    for chunk, expected in zip(part.chunks, part.used, strict=True):
        if part.checksum is not None:  # next to its unpacking, so that the chunk is in the cache
            total = _fold(chunk[:expected], total)
        done, used = loops.unpack(words, part.masks, done, chunk)
        if used != expected:
            raise CodecError(f"a packed chunk holds {expected} values but its masks count {used}: the data are damaged")
    np.copyto(words[groups * GROUP :], part.rest)
    if done != groups or (part.checksum is not None and _fold(part.rest, total) != part.checksum):
        raise CodecError(
            f"the {part.length} values of a packed part do not match its masks or checksum: they are damaged"
        )


def compress(
    array: NDArray[Any],
    *,
    parts: int = PARTS,
    threads: int = 1,
    frac: int = FRAC,
    memory: PackedMemory | None = None,
    checksum: bool = False,
) -> Packed:
    """Pack a whole array in `parts` parts on `threads` threads. Raises as `pack`, with nothing taken."""
    words = _words(array, "array")
    memory = PackedMemory() if memory is None else memory
    packed: list[PackedPart] = []

    def pack_one(where: slice) -> PackedPart:
        packed.append(part := pack(words[where], frac=frac, memory=memory, checksum=checksum))
        return part

    try:
        return Packed(array.shape, array.dtype, tuple(_each(pack_one, split(words.size, parts), threads)))
    except BaseException:
        for part in packed:
            part.release()
        raise


def decompress(packed: Packed, *, out: NDArray[Any] | None = None, threads: int = 1) -> NDArray[Any]:
    """The array that was packed, into `out` if given (same number of elements and element size). Raises as `unpack`."""
    result = np.empty(packed.shape, packed.dtype) if out is None else out
    words = _words(result, "out")
    length = sum(part.length for part in packed.parts)
    if words.size != length:
        raise ArgumentError(f"out has {words.size} words of {words.itemsize} bytes; the packed array needs {length}")
    places = split(length, len(packed.parts))
    _each(lambda k: unpack(packed.parts[k], words[places[k]]), range(len(places)), threads)
    return result


def density(array: NDArray[Any], samples: int = 16384) -> float:
    """Share of values that are not zero (0 to 1), estimated from `samples` values spread evenly over the array.

    Exact for arrays of up to `samples` values; 0 for an empty one. The places follow the golden ratio, so they fall in
    step with no row or channel width.
    """
    words = _words(array, "array")
    if samples < 1:
        raise ArgumentError(f"samples is {samples}; it must be 1 or more")
    if words.size > samples:
        places = np.arange(1, samples + 1) * ((5**0.5 - 1) / 2) % 1.0
        words = words[(places * words.size).astype(np.intp)]
    return np.count_nonzero(words) / words.size if words.size else 0.0


def estimate_nbytes(nbytes: int, density: float, *, itemsize: int = 4, parts: int = PARTS, frac: int = FRAC) -> int:
    """Bytes that a tensor of `nbytes` is expected to occupy when packed, its zeros spread evenly."""
    total = 0
    for where in split(nbytes // itemsize, parts):
        length = where.stop - where.start
        step = chunk_size(length, frac)
        filled = step - (GROUP - density * GROUP) / 2  # on average, a chunk ends with this many values in it
        chunks = -(-length * density // filled)
        total += min(length * itemsize, 4 * (length // GROUP) + int(chunks) * step * itemsize)
    return total


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache, before anything is timed."""
    from minidnn.codec import loops  # noqa: F401


def _words(array: NDArray[Any], argument: str) -> Words:
    """The bit patterns of a contiguous array as 1-D uint16 (elements of 2 bytes) or uint32."""
    size = array.dtype.itemsize
    if array.dtype.hasobject or (size != 2 and size % 4 != 0) or size == 0:
        raise ArgumentError(f"{argument} has dtype {array.dtype}; elements must be 2 bytes, or a multiple of 4, long")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ArgumentError(f"{argument} has strides {array.strides}; it must be C-contiguous and aligned")
    return array.reshape(-1).view(np.uint16 if size == 2 else np.uint32)


def _digest(part: PackedPart) -> int:
    total = _fold(part.masks, part.length)
    for chunk, used in zip(part.chunks, part.used, strict=True):
        total = _fold(chunk[:used], total)
    return _fold(part.rest, total)


def _fold(array: Words, start: int) -> int:
    """Continue a checksum over the bytes of `array`."""
    from minidnn.codec import loops

    data = array.view(np.uint8)
    lines = data.size // 64 * 64
    return int(loops.checksum(data[:lines].view(np.uint64), data[lines:], start))


def _each(task: Callable[[A], B], items: Iterable[A], threads: int) -> list[B]:
    """task(item) for each item, on this thread or on `threads` of their own; all have ended when this returns."""
    if threads < 1:
        raise ArgumentError(f"threads is {threads}; it must be 1 or more")
    if threads == 1:
        return [task(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, items))
