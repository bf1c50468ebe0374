"""Every memory mode trains as base does, to the bit: orders, heuristics, placements, budgets, interleavings."""

from __future__ import annotations

import itertools
import random

import pytest

from minidnn.errors import ArgumentError, BudgetError, OutOfDeviceMemory
from minidnn.plan.registry import PLANNERS
from tests.host.runs import DIMENSIONS, MODES, Case, pairwise, reference, run

SAMPLE = [Case(**row, seed=i) for i, row in enumerate(pairwise(DIMENSIONS, seed=0))]


def may_dead_end(case: Case) -> bool:
    """A run-time pool of vDNN++ frees by the clock: late frees can leave too little in one piece, or, for `high-end`,
    in the rightmost piece."""
    roomy = case.budget == "half as much again" and not case.fit.startswith("high-end")
    return case.placement == "live" and case.memory.startswith("vdnn++") and not roomy


def agrees(case: Case) -> None:
    """The run gives base's bits.

    Three refusals are right: live vDNN++ in a pool that is just large enough may run out of memory; `high-end`, which
    looks at the rightmost free block alone, serves some schedules in a pool of no size; and plans whose copies are
    ordered by offsets have none to go by in a live pool.
    """
    try:
        outcome = run(case)
    except OutOfDeviceMemory:
        if not may_dead_end(case):
            raise
        return
    except BudgetError as error:
        if error.needed is not None or case.fit != "high-end":
            raise
        return
    except ArgumentError:
        if case.placement != "live" or case.memory not in PLANNERS:
            raise
        return
    assert outcome == reference(case.update, case.precision), case


@pytest.mark.parametrize("interleaving", ["eager", "lazy"])
@pytest.mark.parametrize("memory", MODES)
def test_every_mode_trains_as_base(memory: str, interleaving: str) -> None:
    agrees(Case(memory, interleaving=interleaving))


@pytest.mark.parametrize("block", range(12))
def test_every_pair_of_settings_trains_as_base(block: int) -> None:
    for case in SAMPLE[block::12]:
        agrees(case)


@pytest.mark.parametrize("order", DIMENSIONS["order"])
@pytest.mark.parametrize("memory", ["base", "keep(m)", "vdnn:all(m)", "vdnn:aconv", "vdnn++:conv(m)", "vdnn++:all"])
def test_the_paper_s_heuristic_trains_as_base(memory: str, order: str) -> None:
    """`high-end` serves training; inference, where it serves nothing, does without it."""
    for placement in DIMENSIONS["placement"]:
        case = Case(memory, order, "high-end", "lazy", placement=placement, budget="half as much again")
        assert run(case) == reference("each")


@pytest.mark.soak
@pytest.mark.parametrize("order", DIMENSIONS["order"])
@pytest.mark.parametrize("memory", MODES)
def test_the_full_product_trains_as_base(memory: str, order: str) -> None:
    """Modes, orders, heuristics and interleavings, 20 seeds of the random one; the rest is drawn for each run."""
    ways = [("eager", 0), ("lazy", 0), ("threads", 0), *(("random", seed) for seed in range(20))]
    for fit, (interleaving, seed) in itertools.product(DIMENSIONS["fit"], ways):
        rng = random.Random(f"{memory} {order} {fit} {interleaving} {seed}")
        rest = {name: rng.choice(DIMENSIONS[name]) for name in ("target", "placement", "budget", "update", "precision")}
        agrees(Case(memory, order, fit, interleaving, seed=seed, **rest))


def test_a_planner_lets_the_input_go_in_one_program_and_keeps_it_in_another() -> None:
    """The first program fixes that the next batch comes early; a later one has a plan that would free the input."""
    agrees(
        Case(
            "best", "prefetch-first", "high-end-offloaded", "threads", target="native", placement="planned",
            budget="half as much again", update="micro", precision="fp32", seed=0,
        )
    )  # fmt: skip


def test_the_sample_holds_every_pair_of_values() -> None:
    for a, b in itertools.combinations(DIMENSIONS, 2):
        found = {(getattr(case, a), getattr(case, b)) for case in SAMPLE}
        assert found == set(itertools.product(DIMENSIONS[a], DIMENSIONS[b]))
