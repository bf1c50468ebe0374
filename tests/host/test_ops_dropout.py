"""Philox4x32-10 gives the published words, and dropout draws exactly the bits that its definition says."""

from __future__ import annotations

from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.ops.philox import dropout, philox4x32
from tests.host.ops_support import Maker, bits, dtypes, layouts, run, seeds

# Counter, key, words: the known answers for philox4x32 with 10 rounds that Random123 publishes (kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


def words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(word) for word in philox4x32(*(np.uint64(v) for v in (*counter, *key))))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert words(counter, key) == expected


@given(shape=st.tuples(*[st.integers(1, 4)] * 4), dtype=dtypes, layout=layouts, seed=seeds, in_place=st.booleans(),
       p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), op=st.integers(0, 300), step=st.integers(0, 2**32 - 1),
       micro_step=st.integers(0, 9))  # fmt: skip
def test_dropout_keeps_what_its_definition_keeps(
    shape: tuple[int, ...], dtype: str, layout: str, seed: int, in_place: bool, p: float, op: int, step: int,
    micro_step: int,
) -> None:  # fmt: skip
    make = Maker(dtype, layout, seed)
    x = make.normal(*shape)
    high = seed ^ 0xDEADBEEF
    scalars = make.scalars(step=step, micro_step=micro_step, seed_low=seed, seed_high=high)
    drawn = [words((i // 4, op, step, micro_step), (seed, high))[i % 4] for i in range(x.size)]
    keep = np.array([word >= floor(p * 2**32) for word in drawn]).reshape(shape)
    compute = np.float64 if dtype == "float64" else np.float32
    scale = compute(1 / (1 - p)) if p < 1 else compute(0)
    expected = make.place(x.astype(compute) * np.where(keep, scale, compute(0)))
    for name, (source, target) in {"dropout_forward": ("x", "y"), "dropout_backward": ("dy", "dx")}.items():
        given_array = x.copy(order="K")
        out = given_array if in_place else make.blank(shape)
        run(name, scalars=scalars, p=p, op=op, **{source: given_array, target: out})
        assert bits(out) == bits(expected)


def test_a_word_equal_to_the_threshold_is_kept() -> None:
    x, y = np.ones(4, np.float32), np.empty(4, np.float32)
    expected = words((0, 0, 0, 0), (0, 0))
    for lane, threshold in enumerate(expected):
        dropout(x, y, np.zeros(5, np.uint64), np.uint64(threshold), np.float32(1))
        assert y[lane] == 1
        dropout(x, y, np.zeros(5, np.uint64), np.uint64(threshold + 1), np.float32(1))
        assert y[lane] == 0


def test_dropout_drops_the_share_that_it_is_told_to() -> None:
    x, y = np.ones((4, 25, 50, 50), np.float32), np.empty((4, 25, 50, 50), np.float32)
    run("dropout_forward", x=x, y=y, scalars=Maker("float32", "NCHW").scalars(seed_low=7), p=0.3, op=2)
    assert abs(float((y == 0).mean()) - 0.3) < 0.005
    assert np.unique(y).tolist() == [0, np.float32(1 / 0.7)]


def test_every_part_of_the_counter_and_key_changes_the_bits() -> None:
    make = Maker("float32", "NCHW")
    x = np.ones((1, 1, 16, 16), np.float32)
    base = {"step": 0, "micro_step": 0, "seed_low": 0, "seed_high": 0}
    seen = set()
    for change in ({}, *({name: 1} for name in base), {"op": 1}):
        numbers = {**base, **change}
        op, y = numbers.pop("op", 0), np.empty_like(x)
        run("dropout_forward", x=x, y=y, scalars=make.scalars(**numbers), p=0.5, op=op)
        seen.add(bits(y))
    assert len(seen) == 6


def test_nan_survives_dropout_as_in_torch() -> None:
    x, y = np.full((1, 1, 8, 8), np.nan, np.float32), np.zeros((1, 1, 8, 8), np.float32)
    run("dropout_forward", x=x, y=y, scalars=Maker("float32", "NCHW").scalars(), p=0.5, op=0)
    assert np.isnan(y).all()
