"""`minidnn sweep MODEL`: what policies would take at budgets from the least that works to the most that helps."""

from __future__ import annotations

import argparse
import re
from typing import Any

from minidnn.cli.comparing import check_sets
from minidnn.cli.options import (
    PRECISION_HELP,
    PRECISIONS,
    TARGET_HELP,
    Console,
    add_model,
    count,
    drawing,
    number,
    writing,
)
from minidnn.cli.planning import add_source, heading, profile_for, training_graph
from minidnn.errors import ArgumentError
from minidnn.plan.registry import parse_mode
from minidnn.profile.nominal import with_times
from minidnn.progress import bar
from minidnn.report.tables import text_table
from minidnn.run.sweep import Sweep, at_bandwidth, budgets_of, sweep
from minidnn.units import format_ms, format_size

EXAMPLE = "minidnn sweep vgg16 --batch 64 --gpu v100 --plot ratio.png --throughput rate.png"
POLICIES = ("best", "dynprog", "greedy", "vdnn-threshold", "autoswap", "tflms", "vdnn++:dyn")

MOST_BUDGETS = 1000
"""More than a plot can show, and minutes of planning."""
FACTORS = 1e-3, 1e3
"""Beyond these a link is no machine's, and in the end its rate is no number."""

LEGEND = (
    "ms of an iteration by policy and memory; -: does not fit; a plan for less memory stays a candidate for more\n"
    "bound: no schedule is faster, whatever it offloads; paper's: Proposition 3 of Beaumont et al.; rematerialized: "
    "the fastest\nthat computes activations again and copies nothing"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, policies, budgets, and what to plan with."""
    add_model(parser)
    add_source(parser)
    group = parser.add_argument_group("sweep")
    group.add_argument("--policies", default=",".join(POLICIES), metavar="LIST",
                       help=f"policies or memory modes, with commas (default: {','.join(POLICIES)})")  # fmt: skip
    group.add_argument("--budgets", type=count, default=12, metavar="N", help="how many budgets (default: 12)")
    group.add_argument("--bandwidths", type=factors, default="1,2,3", metavar="LIST",
                       help="with --throughput: multiples of the link's rates (default: 1,2,3)")  # fmt: skip
    group.add_argument("--precision", default="fp32", choices=PRECISIONS, help=PRECISION_HELP)
    group.add_argument("--target", choices=("paper", "native"), help=TARGET_HELP)
    files = parser.add_argument_group("files")
    files.add_argument("--plot", type=drawing, metavar="PNG", help="draw time over the lower bound against memory")
    files.add_argument("--throughput", type=drawing, metavar="PNG",
                       help="draw images per second against memory for the first policy at several bandwidths, and "
                       "for optimal rematerialization")  # fmt: skip


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the sweep."""
    policies = tuple(dict.fromkeys(filter(None, re.split(r"[,\s]+", args.policies))))
    if not policies:
        raise ArgumentError(f"--policies is {args.policies!r}; name at least one, such as best,greedy")
    for policy in policies:
        parse_mode(policy)
    if args.budgets > MOST_BUDGETS:
        raise ArgumentError(f"--budgets is {args.budgets}; it must be at most {MOST_BUDGETS}")
    graph = training_graph(args, "best")  # all policies are compared on the iteration of planners
    profile = with_times(graph, profile_for(args, graph))
    check_sets(policies, graph)
    budgets = budgets_of(graph, profile, args.budgets)
    with bar("planning", len(policies) * len(budgets), console.progress) as done:
        found = sweep(graph, profile, policies, budgets, lambda text: done.update())
    title = heading(args, graph, profile)
    console.say(title)
    console.say(_table(found))
    console.say(LEGEND)
    result = {
        "model": args.model, "batch": args.batch, "precision": args.precision, "target": graph.target.name,
        "profile": profile.source, **found.as_dict(),
    }  # fmt: skip
    if args.plot is not None:
        from minidnn.report.sweeps import ratio_plot

        with writing(args.plot) as file:
            ratio_plot({title: found}, file)
    if args.throughput is not None:
        from minidnn.report.sweeps import throughput_plot

        assert profile.link is not None
        curves = {}
        for factor in args.bandwidths:
            again = sweep(graph, at_bandwidth(profile, factor), policies[:1], budgets) if factor != 1 else found
            rate = f"{profile.link.d2h * factor / 1e9:g} GB/s"
            curves[f"{policies[0]}, {rate}"] = [p.ms for p in again.points[policies[0]]]
        with writing(args.throughput) as file:
            throughput_plot(curves, found.rematerialized_ms, budgets, args.batch, file, title=title)
        result["bandwidths"] = curves
    return result


def factors(text: str) -> list[float]:
    """`1,2,3` -> numbers within `FACTORS`."""
    found = [number(*FACTORS)(part) for part in filter(None, re.split(r"[,\s]+", text))]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names none; write numbers with commas, such as 1,2,3")
    return found


def _table(found: Sweep) -> str:
    header = ["memory", "bound ms", "paper's", *found.points, "rematerialized"]
    rows = []
    for i, budget in enumerate(found.budgets):
        times = [points[i].ms for points in found.points.values()]
        rows.append(
            [format_size(budget), format_ms(found.bound_ms[i]), format_ms(found.paper_bound_ms[i]),
             *(format_ms(ms) for ms in (*times, found.rematerialized_ms[i]))]
        )  # fmt: skip
    return text_table(header, rows)
