"""Zero-value compression: bit-exact for every input, counted, limited, and damage is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minidnn import codec
from minidnn.errors import ArgumentError, BudgetError, CodecError, PoolError

Array = NDArray[Any]

# Patterns that a test for "equals zero" or "greater than zero" would lose: -0.0, quiet and signalling NaNs with
# payloads and signs, the smallest denormals, infinities; their upper halves are such patterns of bfloat16.
PATTERNS = [0x0, 0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFBFFFFF, 0x1, 0x80000001, 0x7F800000, 0x3F800000]
DTYPES = ["uint32", "uint16", "float32", "float16", "int64", "float64", "bfloat16"]


def as_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def sparse(length: int, density: float, dtype: str = "uint32", seed: int = 0) -> Array:
    """`length` values, each non-zero with probability `density`."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 2**16, length).astype(dtype)
    values[rng.random(length) >= density] = 0
    return values


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Arrays of any codec dtype and 0 to 3000 values: runs of zeros, of special patterns, and of random bits."""
    dtype = as_dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = st.sampled_from(["zero", "special", "random", "mixed"])
    runs = draw(st.lists(st.tuples(kinds, st.integers(1, 300)), max_size=10))
    pieces = [np.empty(0, np.uint32)]
    for kind, length in runs:
        bits = rng.integers(0, 2**32, length, dtype=np.uint32)
        special = rng.choice(np.array(PATTERNS, np.uint32), length)
        zero = np.zeros(length, np.uint32)
        mixed = np.where(rng.random(length) < draw(st.floats(0, 1)), bits, zero) if kind == "mixed" else bits
        pieces.append({"zero": zero, "special": special, "random": bits, "mixed": mixed}[kind])
    words = np.concatenate(pieces)
    if dtype.itemsize == 2:
        return (words >> 16).astype(np.uint16).view(dtype)
    return words[: words.size // (dtype.itemsize // 4) * (dtype.itemsize // 4)].view(dtype)


@given(arrays(), st.integers(1, 9), st.sampled_from([1, 3]), st.sampled_from([1, 2, 8, 50]), st.booleans())
def test_every_input_comes_back_bit_for_bit(array: Array, parts: int, threads: int, frac: int, checksum: bool) -> None:
    memory = codec.PackedMemory()
    packed = codec.compress(array, parts=parts, threads=threads, frac=frac, memory=memory, checksum=checksum)
    assert packed.nbytes == memory.used <= array.nbytes
    restored = codec.decompress(packed, threads=threads)
    assert restored.dtype == array.dtype
    assert restored.shape == array.shape
    assert restored.tobytes() == array.tobytes()
    packed.release()
    assert memory.used == packed.nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.8, 1.0])
def test_a_large_array_comes_back_whatever_its_density(dtype: str, density: float) -> None:
    array = (sparse(100_003, density) % 1000).astype(as_dtype(dtype)).reshape(1, -1)
    assert codec.decompress(codec.compress(array, threads=2), threads=2).tobytes() == array.tobytes()


def test_a_group_is_a_mask_and_its_nonzero_values_in_order() -> None:
    values = np.zeros(20 * 32 + 1, np.uint32)
    values[[3, 31, 32, 640]] = [7, 8, 9, 10]
    part = codec.pack(values)
    assert part.masks.tolist() == [2**3 + 2**31, 1] + [0] * 18
    assert [chunk[:used].tolist() for chunk, used in zip(part.chunks, part.used, strict=True)] == [[7, 8, 9]]
    assert part.rest.tolist() == [10]  # the value behind the last whole group


def test_space_grows_in_steps_of_an_eighth_of_the_part() -> None:
    values = sparse(8 * 3200, 0.5)
    part = codec.pack(values)
    assert [chunk.size for chunk in part.chunks] == [3200] * len(part.chunks)
    assert sum(part.used) == np.count_nonzero(values)
    assert all(3200 - codec.GROUP < used <= 3200 for used in part.used[:-1])  # left only for want of 32 places
    assert part.nbytes == 4 * part.masks.size + 4 * 3200 * len(part.chunks)


def test_zeros_take_only_their_masks() -> None:
    part = codec.pack(np.zeros(32_000, np.float32))
    assert part.chunks == []
    assert part.nbytes == 32_000 * 4 // 32


@pytest.mark.parametrize("dtype", ["uint32", "uint16"])
@pytest.mark.parametrize("density", [0.95, 1.0])
def test_data_that_would_not_get_smaller_are_kept_as_they_are(dtype: str, density: float) -> None:
    values = sparse(10_000, density, dtype)
    memory = codec.PackedMemory()
    part = codec.pack(values, memory=memory)
    assert part.raw
    assert part.nbytes == memory.used == values.nbytes
    assert not codec.pack(sparse(10_000, 0.5, dtype)).raw


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_parts_are_whole_groups_and_cover_the_tensor(length: int, parts: int) -> None:
    places = codec.split(length, parts)
    assert len(places) == parts
    assert places[0].start == 0
    assert places[-1].stop == length
    assert all(left.stop == right.start for left, right in pairwise(places))
    assert all(place.start % codec.GROUP == 0 for place in places)
    groups = [(place.stop - place.start) // codec.GROUP for place in places]
    assert max(groups) - min(groups) <= 1


def test_parts_pack_and_unpack_independently_on_any_thread() -> None:
    values = sparse(50_000, 0.4)
    places = codec.split(values.size, 8)
    memory = codec.PackedMemory()
    out = np.full_like(values, 9)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda where: codec.pack(values[where], memory=memory), places))
        list(pool.map(lambda k: codec.unpack(parts[k], out[places[k]]), [5, 0, 7, 2, 1, 6, 3, 4]))
    assert memory.used == sum(part.nbytes for part in parts)
    np.testing.assert_array_equal(out, values)


@given(st.integers(0, 20_000), st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.sampled_from([1, 3]))
def test_a_limit_is_kept_or_refused_with_nothing_taken(limit: int, density: float, threads: int) -> None:
    values = sparse(4000, density)
    memory = codec.PackedMemory(limit)
    try:
        packed = codec.compress(values, threads=threads, memory=memory)
    except BudgetError:
        assert memory.used == 0
        assert memory.peak <= limit < values.nbytes + 4 * 4000 // 32
    else:
        assert memory.used == packed.nbytes <= memory.peak <= limit
        np.testing.assert_array_equal(codec.decompress(packed), values)


def test_the_peak_of_one_run_is_the_limit_that_the_next_one_needs() -> None:
    values = sparse(20_000, 0.5)
    free = codec.PackedMemory()
    codec.pack(values, memory=free)
    codec.pack(values, memory=codec.PackedMemory(free.peak))
    with pytest.raises(BudgetError, match=f"allow {free.peak} bytes"):
        codec.pack(values, memory=codec.PackedMemory(free.peak - 1))


@pytest.mark.parametrize("dtype", ["uint32", "uint16"])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_the_checksum_notices_every_single_flipped_bit(dtype: str, density: float) -> None:
    values = sparse(333, density, dtype)
    part = codec.pack(values, checksum=True)
    out = np.empty_like(values)
    codec.unpack(part, out)
    kept = [chunk[:used] for chunk, used in zip(part.chunks, part.used, strict=True)]
    flips = 0
    for array in (part.masks, *kept, part.rest):
        data = array.view(np.uint8)
        for place in range(data.size):
            for bit in range(8):
                data[place] ^= 1 << bit
                with pytest.raises(CodecError, match="damaged"):
                    codec.unpack(part, out)
                data[place] ^= 1 << bit
                flips += 1
    assert flips >= 8 * 4 * (333 // 32)
    codec.unpack(part, out)
    np.testing.assert_array_equal(out, values)


@given(st.integers(0, 2**32), st.sampled_from(["uint32", "uint16"]), st.floats(0, 1))
def test_damaged_masks_never_write_outside_the_output(seed: int, dtype: str, density: float) -> None:
    rng = np.random.default_rng(seed)
    part = codec.pack(sparse(1000, 0.3, dtype))
    part.masks[:] = np.packbits(rng.random(part.masks.size * 32) < density).view(np.uint32)
    around = np.full(1200, 77, dtype)
    try:
        codec.unpack(part, around[100:1100])
    except CodecError as error:
        assert "damaged" in str(error)  # noqa: PT017 - some random masks count as many values as the right ones
    assert np.all(around[:100] == 77)
    assert np.all(around[1100:] == 77)


def test_masks_that_count_other_values_are_noticed_without_a_checksum() -> None:
    values = sparse(1000, 0.3)
    part = codec.pack(values)
    part.masks[5] ^= 1
    with pytest.raises(CodecError, match="damaged"):
        codec.unpack(part, np.empty_like(values))
    part.masks[:] = 2**32 - 1
    with pytest.raises(CodecError, match="damaged"):
        codec.unpack(part, np.empty_like(values))
    zeros = codec.pack(np.zeros_like(values))
    zeros.masks[-1] = 1
    with pytest.raises(CodecError, match="damaged"):
        codec.unpack(zeros, np.empty_like(values))


def test_a_released_part_cannot_be_unpacked() -> None:
    values = sparse(1000, 0.3)
    part = codec.pack(values)
    part.release()
    part.release()
    with pytest.raises(CodecError, match="released"):
        codec.unpack(part, np.empty_like(values))


def test_released_memory_serves_again_and_never_lifts_what_is_held_above_the_peak() -> None:
    memory = codec.PackedMemory()
    first = codec.pack(sparse(50_000, 0.5), memory=memory)
    chunks = list(first.chunks)  # held here, so that only the packed memory can hand them out again
    first.release()
    assert (memory.used, memory.idle) == (0, memory.peak)
    again = codec.pack(sparse(50_000, 0.5, seed=1), memory=memory)
    assert {chunk.ctypes.data for chunk in chunks} & {chunk.ctypes.data for chunk in again.chunks}
    again.release()
    peak = memory.peak
    for length in range(1000, 40_000, 1111):
        part = codec.pack(sparse(length, 0.5), memory=memory)
        assert memory.used + memory.idle <= memory.peak == peak
        part.release()
    memory.trim()
    assert memory.idle == 0


def test_memory_takes_back_only_what_it_gave_and_only_once() -> None:
    memory = codec.PackedMemory()
    array = memory.take(10, np.uint32)
    with pytest.raises(PoolError):
        memory.give(np.empty(10, np.uint32))
    with pytest.raises(PoolError):
        memory.give(array[:5])
    memory.give(array)
    with pytest.raises(PoolError):
        memory.give(array)


@pytest.mark.parametrize("width", [7, 64, 192, 55 * 55, 224 * 224])
def test_density_is_exact_when_small_and_close_when_large(width: int) -> None:
    few = sparse(5000, 0.37)
    assert codec.density(few) == np.count_nonzero(few) / 5000
    assert codec.density(np.array([0.0, -0.0], np.float32)) == 0.5  # a negative zero is a value
    assert codec.density(np.empty(0, np.float32)) == 0.0
    columns = np.zeros((16384 * 192 // width, width), np.float32)  # 64 and 192 divide the mean distance of samples
    columns[:, : width // 2] = 1.0
    assert codec.density(columns) == pytest.approx(width // 2 / width, abs=0.02)
    assert codec.density(sparse(3_000_000, 0.2, "uint16")) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("dtype", ["uint32", "uint16"])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.45, 0.8, 1.0])
def test_the_estimate_is_within_one_chunk_of_each_part(dtype: str, density: float) -> None:
    values = sparse(300_000, density, dtype)
    estimate = codec.estimate_nbytes(values.nbytes, density, itemsize=values.itemsize)
    assert abs(estimate - codec.compress(values).nbytes) <= values.nbytes / codec.FRAC + 8 * 128


def test_arguments_that_cannot_work_are_named() -> None:
    good = np.zeros(100, np.float32)
    with pytest.raises(ArgumentError, match="values has dtype int8"):
        codec.pack(np.zeros(8, np.int8))
    with pytest.raises(ArgumentError, match="values has dtype object"):
        codec.pack(np.zeros(8, object))
    with pytest.raises(ArgumentError, match="C-contiguous"):
        codec.pack(good[::2])
    with pytest.raises(ArgumentError, match="aligned"):
        codec.pack(np.zeros(41, np.uint8)[1:].view(np.float32))
    with pytest.raises(ArgumentError, match="frac is 0"):
        codec.pack(good, frac=0)
    with pytest.raises(ArgumentError, match="parts is 0"):
        codec.compress(good, parts=0)
    with pytest.raises(ArgumentError, match="threads is 0"):
        codec.compress(good, threads=0)
    with pytest.raises(ArgumentError, match="samples is 0"):
        codec.density(good, samples=0)
    with pytest.raises(ArgumentError, match="limit is -1"):
        codec.PackedMemory(-1)


def test_an_output_that_does_not_fit_is_refused() -> None:
    packed = codec.compress(np.ones(100, np.float32), parts=2)
    for out in (np.empty(101, np.float32), np.empty(100, np.float16), np.empty(200, np.float16)):
        with pytest.raises(ArgumentError, match="out has"):
            codec.decompress(packed, out=out)
    read_only = np.empty(100, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match="writable: False"):
        codec.decompress(packed, out=read_only)


def test_read_only_input_needs_no_second_compilation() -> None:
    values = sparse(1000, 0.3)
    values.flags.writeable = False
    assert codec.decompress(codec.compress(values)).tobytes() == values.tobytes()
    loops: Any = import_module("minidnn.codec.loops")
    assert [len(loop.signatures) for loop in (loops.pack, loops.unpack, loops.checksum)] == [2, 2, 1]


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_compiler_is_loaded_only_when_something_is_packed() -> None:
    assert python("import sys, minidnn.codec; print('numba' in sys.modules)") == "False"
    assert python("import sys, minidnn.codec as c; c.warm_up(); print('numba' in sys.modules)") == "True"


# Leaves numba no place to write its cache to.
NO_CACHE = {"NUMBA_CACHE_DIR": "/dev/null/none", "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}

# Packs and unpacks arrays of both element kinds; prints which form of the loops ran, and the packed data's checksums.
PORTABLE = """
import numpy as np
from minidnn import codec
from minidnn.codec import loops
from tests.unit.test_zvc import sparse
sums = []
for dtype in ("uint32", "uint16"):
    for density in (0.0, 0.1, 0.5, 0.8, 1.0):
        values = sparse(3333, density, dtype)
        values[1000:1400] = 0
        values[7::97] = 1
        packed = codec.compress(values, parts=2, checksum=True)
        assert codec.decompress(packed).tobytes() == values.tobytes()
        sums += [part.checksum for part in packed.parts]
print(loops.HAS_AVX512, sums)
"""


def test_processors_without_wide_vectors_make_the_same_bytes_and_no_cache_is_needed() -> None:
    plain = python(PORTABLE, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", **NO_CACHE)
    assert plain.split(" ", 1)[0] == "False"
    assert plain.split(" ", 1)[1] == python(PORTABLE).split(" ", 1)[1]
