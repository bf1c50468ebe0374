"""The chain model and Algorithm 1 (Beaumont et al. 2020, sections 3 to 5) against independent computations."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf
from typing import Any, cast

import pytest

from minidnn.plan.chain import Chain
from minidnn.plan.dynprog import best_set
from minidnn.plan.moments import arrange
from minidnn.plan.outline import Movable, Outline
from minidnn.plan.rematerialize import SLOTS, rematerialized_ms
from minidnn.profile.profile import Algorithm, Link

from .chains import every_set, linear_program_ms, random_chain, replace_memory, replayed_ms

CHAINS = 1500


def same(a: float, b: float) -> bool:
    return a == b or abs(a - b) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_the_model_is_the_linear_program(seed: int) -> None:
    rng = random.Random(seed)
    possible = 0
    for _ in range(100):
        chain = random_chain(rng, rng.randint(1, 4))
        fitting = [amounts for amounts in every_set(chain) if chain.idle_ms(amounts) < inf]
        amounts = rng.choice(fitting if fitting and rng.random() < 0.8 else every_set(chain))
        expected = linear_program_ms(chain, amounts)
        possible += expected < inf
        assert same(chain.idle_ms(amounts), expected), (chain, amounts)
    assert 20 <= possible < 100


@pytest.mark.parametrize("seed", range(4))
def test_dynprog_is_brute_force_over_all_sets(seed: int) -> None:
    rng = random.Random(100 + seed)
    possible = 0
    for _ in range(CHAINS // 4):
        chain = random_chain(rng, rng.randint(1, 7))
        least = min(map(chain.idle_ms, every_set(chain)))
        found = best_set(chain, states=10**9)
        if found is None:
            assert least == inf, chain
            continue
        possible += 1
        leaving = [nbytes * leaves for nbytes, leaves in zip(chain.x, found.offload, strict=False)]
        assert same(found.idle_ms, least), chain
        assert same(chain.idle_ms(leaving), least), chain
    assert possible > CHAINS // 20


def test_rounding_costs_little_and_claims_nothing_wrong() -> None:
    rng = random.Random(3)
    exact = rounded = 0.0
    for _ in range(60):
        chain = random_chain(rng, 7)
        best, rough = best_set(chain, states=10**9), best_set(chain, states=4)
        if best is None or rough is None:
            continue
        leaving = [nbytes * leaves for nbytes, leaves in zip(chain.x, rough.offload, strict=False)]
        assert same(chain.idle_ms(leaving), rough.idle_ms)
        assert rough.idle_ms >= best.idle_ms - 1e-6
        exact, rounded = exact + best.idle_ms, rounded + rough.idle_ms
    assert 0 < exact <= rounded <= 1.5 * exact


def test_what_can_stay_for_the_same_time_stays() -> None:
    chain = Chain((4, 4, 4, 4), (0,) * 4, (9, 9, 9), (9, 9, 9), (0,) * 3, (0,) * 3, 1, 12)
    found = best_set(chain)
    assert found is not None
    assert (sum(found.offload), found.idle_ms) == (1, 0)


def test_parts_of_tensors_are_at_least_as_good_as_whole_ones() -> None:
    """Theorem 2: no set of whole tensors beats the first M_peak - M_GPU bytes."""
    rng = random.Random(4)
    better = 0
    for _ in range(400):
        chain = random_chain(rng, rng.randint(1, 6))
        whole = min(map(chain.idle_ms, every_set(chain)))
        parts = chain.fractional_ms() - chain.compute_ms
        assert parts <= whole + 1e-6, chain
        better += parts < whole - 1e-6
    assert better > 5


def test_nothing_leaves_where_everything_fits() -> None:
    rng = random.Random(5)
    for _ in range(50):
        chain = random_chain(rng, 5)
        found = best_set(replace_memory(chain, chain.peak + 1))
        assert found is not None
        assert not any(found.offload)
        assert found.idle_ms == 0


# -- Theorem 1: whole transfers, m groups of three that add up to V each -----------------------------------------------


def partition_instance(sizes: list[int]) -> tuple[Outline, list[Movable], list[Algorithm], int]:
    """The instance of Theorem 1's proof for 3m sizes of sum m V. Op i makes tensor i; ops 5m.. are backward."""
    m = len(sizes) // 3
    total = sum(sizes) // m
    tensors = [*sizes, *([0, total] * m)]
    count = len(tensors)
    times = [0.0] * (3 * m) + [1.0, 0.0] * m
    backward = [0.0] * count
    backward[3 * m] = float(m)
    held = [sum(tensors[: i + 1]) for i in range(count)]
    resident = (*held, *reversed(held))
    algorithms = [Algorithm(ms=ms) for ms in (*times, *reversed(backward))]
    movable = [Movable(str(i), n, n, n, i, i, 2 * count - 1 - i) for i, n in enumerate(tensors) if n]
    link = Link(total * 1e3, total * 1e3, 0.0)
    outline = Outline(cast(Any, None), link, resident, tuple(movable), tuple((a,) for a in algorithms), 0.0, 1)
    return outline, movable[: 3 * m], algorithms, m * total


@pytest.mark.parametrize(
    ("sizes", "divides"),
    [
        ([2, 3, 5, 1, 4, 5], True), ([5, 5, 4, 3, 2, 1], True), ([5, 4, 5, 3, 2, 1], False),
        ([4, 5, 6, 4, 5, 6, 6, 5, 4], True), ([4, 5, 4, 6, 5, 6, 6, 5, 4], False),
    ],
)  # fmt: skip
def test_theorem_1(sizes: list[int], divides: bool) -> None:
    """In the order in which they leave, tensors fill whole units of time exactly if and only if T = 2m is reached."""
    outline, offload, algorithms, memory = partition_instance(sizes)
    found = arrange(outline, offload, algorithms, memory)
    assert found is not None
    assert (found.ms == pytest.approx(2 * len(sizes) / 3)) == divides
    assert found.ms >= 2 * len(sizes) / 3 - 1e-9
    assert arrange(outline, offload[1:], algorithms, memory - 1) is None


# -- rematerialization ------------------------------------------------------------------------------------------------


def uniform(layers: int, memory: float) -> Chain:
    """Layers of one time unit each way, activations of one unit of memory, no gradients."""
    zero = (0.0,) * layers
    return Chain((1.0,) * (layers + 1), (0.0,) * (layers + 1), (1.0,) * layers, (1.0,) * layers, zero, zero, 1, memory)


def test_rematerialization_computes_nothing_twice_where_all_fits() -> None:
    chain = uniform(6, 20)
    assert rematerialized_ms(chain)[SLOTS] == chain.compute_ms


def test_rematerialization_of_three_uniform_layers() -> None:
    """With x_0, the waiting gradient and two activations: forward 3, again 2 + 1, backward 3, and x_1 made again."""
    times = rematerialized_ms(uniform(3, 4))
    assert times[SLOTS] == 6
    assert times[int(SLOTS * 3 / 4)] > 6
    assert times[int(SLOTS / 4)] == inf


def test_rematerialization_is_what_an_abstract_machine_can_do() -> None:
    """Never faster than the machine, which may also drop what it kept; in most cases as fast."""
    rng = random.Random(8)
    possible = equal = 0
    for _ in range(150):
        chain = replace_memory(random_chain(rng, rng.randint(2, 5)), SLOTS)
        scale = rng.choice((9, 12, 16, 20))  # whole slots: nothing is rounded

        def scaled(numbers: tuple[float, ...], scale: int = scale) -> tuple[float, ...]:
            return tuple(n * scale for n in numbers)

        chain = Chain(
            scaled(chain.x), scaled(chain.y), chain.u_f, chain.u_b, scaled(chain.ex_f), scaled(chain.ex_b), 1, SLOTS
        )
        found, least = float(rematerialized_ms(chain)[SLOTS]), replayed_ms(chain)
        assert found >= least - 1e-9, chain
        possible += least < inf
        equal += found == least < inf
    assert possible > 60
    assert equal > 0.8 * possible


def test_rematerialization_is_never_slower_with_more_memory() -> None:
    rng = random.Random(6)
    for _ in range(10):
        times = rematerialized_ms(random_chain(rng, 6))
        assert all(a >= b for a, b in pairwise(times))
