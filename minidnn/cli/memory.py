"""`minidnn memory MODEL`: the bytes that a mode needs, to the last one, without running anything."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minidnn.cli.options import Console, add_planning, drawing, output, path, shape, source, writing
from minidnn.cli.planning import (
    add_density,
    add_source,
    card_memory,
    check_rule,
    densities,
    profile_for,
    training_graph,
)
from minidnn.errors import ArgumentError, BudgetError
from minidnn.memory.place import intervals, place
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import aggregate_peak, load_trace, save_trace
from minidnn.plan.registry import parse_mode
from minidnn.run.choose import check_placement
from minidnn.run.footprint import footprint
from minidnn.schedule.actions import Schedule
from minidnn.schedule.lifetimes import trace
from minidnn.schedule.timings import observe
from minidnn.units import format_size

EXAMPLE = 'minidnn memory vgg16 --batch 64 --mode "vdnn:all(m)" --plot map.png'

TRACE_HELP = "replay an allocation trace (JSON lines) instead of a model"
PLOT_HELP = "draw address against schedule position, coloured by role"
TITLES = {
    "aggregate_peak_bytes": "aggregate peak of the pool",
    "forward_peak_bytes": "  in forward",
    "backward_peak_bytes": "  in backward",
    "pool_bytes": "smallest sufficient pool (run-time, {fit})",
    "placed_bytes": "pool with planned placement",
    "lower_bound_bytes": "  lower bound of any placement",
    "parameter_bytes": "parameters, as the driver rounds them",
    "pinned_bytes": "pinned host memory",
    "pinned_raw_bytes": "  without compression",
    "packed_bytes": "packed in pageable memory, predicted",
    "offloaded_bytes": "copied out in an iteration",
    "persistent_bytes": "weights, optimizer state and what else stays",
    "peak_bytes": "device memory in all, with planned placement",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL or --trace, the mode, and what plans an iteration."""
    parser.add_argument("model", metavar="MODEL", nargs="?", type=source, help="a name that `minidnn models` lists, or "
                        "path/to/file.py:function")  # fmt: skip
    parser.add_argument("--input", type=shape, metavar="CxHxW", help="shape of one input (default: the model's own)")
    parser.add_argument("--mode", default="base(m)", metavar="MODE", help="memory mode (default: base(m))")
    add_source(parser)
    add_planning(parser)
    add_density(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--trace", type=path, metavar="FILE", help=TRACE_HELP)
    files.add_argument("--save-trace", type=output, metavar="FILE", help="write the mode's allocation trace")
    files.add_argument("--plot", type=drawing, metavar="PNG", help=PLOT_HELP)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the footprint."""
    if (args.model is None) == (args.trace is None):
        raise ArgumentError("give either a MODEL or --trace FILE (see minidnn memory --help)")
    if args.trace is not None:
        for name in ("plot", "save_trace", "budget", "profile", "gpu", "density"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name.replace('_', '-')} goes with a MODEL; a --trace has --fit alone")
        return _foreign(args, console)
    check_placement(parse_mode(args.mode), args.placement)
    graph = training_graph(args, args.mode)
    profile = profile_for(args, graph)
    check_rule(args.mode, profile)
    fit = "best-fit" if args.fit is None else args.fit
    compress = "all" if args.compress == "off" and args.density is not None else args.compress
    room = card_memory(args)
    found, schedule = footprint(
        graph, args.mode, profile, order=args.order, fit=fit, compress=compress, density=densities(args, graph),
        budget=room,
    )  # fmt: skip
    if args.budget is not None and schedule.peak_bytes > args.budget:
        raise BudgetError(
            f"--budget is {format_size(args.budget)}; {args.mode} needs {schedule.peak_bytes} bytes "
            f"({format_size(schedule.peak_bytes)}): persistent {format_size(schedule.persistent_bytes)} and pool "
            f"{format_size(schedule.pool_bytes)}"
        )
    graph_name = f"{graph.target.name} graph, {args.precision}"
    console.say(f"{args.model}, batch {args.batch}, {args.mode}, {args.order}, {graph_name}")
    sizes = {"persistent_bytes": schedule.persistent_bytes, "peak_bytes": schedule.peak_bytes}
    console.say(_table({**found.as_dict(), **sizes}, fit))
    if room is not None:
        fits = "fits" if schedule.peak_bytes <= room else "does not fit"
        console.say(f"{fits} {args.gpu or 'the budget'}, which has {format_size(room)}")
    if found.compressed:
        from minidnn.report import densities_table

        console.say(densities_table([found.as_dict()]))
    observed = _observed(schedule, fit, console) if args.placement == "live" else {}
    if args.save_trace is not None:
        with writing(args.save_trace) as file:
            save_trace(trace(graph, schedule.plan, schedule.actions), file)
    if args.plot is not None:
        with writing(args.plot) as file:
            _plot(schedule, file)
    return {
        "model": args.model, "batch": args.batch, "mode": args.mode, "order": args.order, "fit": fit,
        "target": graph.target.name, "precision": args.precision, "profile": profile.source, "compress": compress,
        **found.as_dict(), **sizes, **observed,
    }  # fmt: skip


def _table(found: Mapping[str, Any], fit: str) -> str:
    lines = []
    for key, title in TITLES.items():
        size = found[key]
        if size is None or (key == "pinned_raw_bytes" and not found["compressed"]):
            continue
        lines.append(f"{title.format(fit=fit):52} {format_size(size):>12}  {size:>14}")
    pairs = " ".join(f"{m}->{i}" for m, i in found["prefetch"])
    return "\n".join([*lines, f"prefetch (during backward of m, X of layer i): {pairs or 'none'}"])


def _observed(schedule: Schedule, fit: str, console: Console) -> dict[str, int]:
    """What a run-time pool needs when releases come at times that nobody planned."""
    found = observe(schedule, fit)
    title = f"largest need observed over {found.timings} release timings ({fit})"
    console.say(f"{title:52} {format_size(found.nbytes):>12}  {found.nbytes:>14}")
    console.say(f"timings that end in a dead end at the searched size: {found.dead_ends} of {found.timings}")
    return {"observed_pool_bytes": found.nbytes, "dead_ends": found.dead_ends, "timings": found.timings}


def _foreign(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Sizes of a trace that came from elsewhere."""
    events = load_trace(Path(args.trace))
    fit = "best-fit" if args.fit is None else args.fit
    sizing, placement = smallest_pool(events, fit), place(intervals(events))
    result = {
        "trace": args.trace, "fit": fit, "aggregate_peak_bytes": aggregate_peak(events), "pool_bytes": sizing.nbytes,
        "placed_bytes": placement.nbytes, "lower_bound_bytes": placement.lower_bound,
    }  # fmt: skip
    for key in ("aggregate_peak_bytes", "pool_bytes", "placed_bytes", "lower_bound_bytes"):
        console.say(f"{TITLES[key].format(fit=fit):52} {format_size(result[key]):>12}  {result[key]:>14}")
    return result


def _plot(schedule: Schedule, path: Path) -> None:
    from minidnn.report import memory_map

    memory_map(schedule, path)
