"""`minidnn simulate MODEL`: predict time, stalls and memory of each mode on a named GPU, or with a measured profile."""

from __future__ import annotations

import argparse
from typing import Any

from minidnn.cli.comparing import (
    add_outputs,
    check_files,
    check_schedules,
    check_sets,
    modes_of,
    options_of,
    rows,
    say_table,
    write_files,
)
from minidnn.cli.options import Console, add_model, add_planning
from minidnn.cli.planning import (
    add_density,
    add_source,
    card_memory,
    densities,
    heading,
    profile_for,
    training_graphs,
)
from minidnn.errors import ArgumentError
from minidnn.profile.profile import Profile
from minidnn.run.bound import Bound, iteration_bound
from minidnn.run.choose import Options
from minidnn.run.compare import ModeResult, predict
from minidnn.schedule.actions import COMPUTE

EXAMPLE = "minidnn simulate vgg16 --batch 64 --gpu gtx1080ti --html report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, modes, and what to predict with."""
    add_model(parser)
    add_source(parser)
    add_planning(parser)
    add_density(parser)
    add_outputs(parser)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return one row per mode."""
    if args.profile is None and args.gpu is None:
        raise ArgumentError("simulate needs times: give --gpu NAME (such as gtx1080ti or h100) or --profile FILE")
    modes = modes_of(args)
    args.budget = card_memory(args)
    results: list[ModeResult] = []
    cases: dict[int, tuple[Profile, Options, Bound]] = {}
    for mode, graph in training_graphs(args, modes):
        if id(graph) not in cases:
            check_sets(modes, graph)
            profile = profile_for(args, graph)
            options = options_of(args, densities(args, graph))
            cases[id(graph)] = profile, options, iteration_bound(graph, profile, args.budget)
        profile, options, bound = cases[id(graph)]
        for result in predict(graph, [mode], profile, options):
            two_lanes = result.schedule is not None and len(set(result.schedule.lanes) - {"host", COMPUTE}) > 1
            result.more["lower_bound_ms"] = bound.ms(2 if two_lanes else 1)
            results.append(result)
    one_lane, two = (min(bound.ms(lanes) for _, _, bound in cases.values()) for lanes in (1, 2))
    check_files(args, results)
    title = heading(args, graph, profile)
    console.say(title)  # not before: whatever is wrong with the options is told with nothing in front of it
    say_table(results, console)
    console.say(f"lower bound: {one_lane:.2f} ms with one copy lane, {two:.2f} ms with two")
    if args.check:
        check_schedules(results, console)
    write_files(args, title, results)
    return {
        "model": args.model, "batch": args.batch, "precision": args.precision, "target": graph.target.name,
        "profile": profile.source, "budget": args.budget, "order": args.order, "fit": args.fit,
        "placement": args.placement, "compress": args.compress, "lower_bound_ms": two, "modes": rows(results),
    }  # fmt: skip
