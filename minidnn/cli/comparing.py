"""What `compare` and `simulate` share: the list of modes, and the table, plots and page that both write."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from minidnn.cli.options import Console, drawing, output, page, writing
from minidnn.errors import ArgumentError, BudgetError
from minidnn.graph.graph import Graph
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.plan.vdnn import offloaded_layers
from minidnn.run.choose import Options, check_placement
from minidnn.run.compare import DEFAULT_MODES, ModeResult
from minidnn.run.timeline import save_trace
from minidnn.units import format_size

MODES_HELP = "memory modes, separated by commas (default: those of the vDNN papers, keep and best)"

TRACE_HELP = "write the timelines for chrome://tracing or Perfetto"
HTML_HELP = "write one page with table, timelines and memory maps"
FILES = ("plot", "trace", "html")
"""Options that name a file to write."""


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """`--modes` and the files to write."""
    parser.add_argument("--modes", metavar="LIST", help=MODES_HELP)
    parser.add_argument("--check", action="store_true", help="verify each schedule with the independent checker")
    files = parser.add_argument_group("files")
    files.add_argument("--plot", type=drawing, metavar="PNG", help="draw the timelines of all modes below each other")
    files.add_argument("--trace", type=output, metavar="JSON", help=TRACE_HELP)
    files.add_argument("--html", type=page, metavar="FILE", help=HTML_HELP)


def modes_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The modes asked for; each is parsed at once, so that a typing error costs no run."""
    modes = _default(args) if args.modes is None else tuple(filter(None, re.split(r"[,\s]+", args.modes)))
    if not modes:
        raise ArgumentError(f"--modes is {args.modes!r}; name at least one mode, such as base,vdnn++:conv(p)")
    for mode in modes:
        check_placement(parse_mode(mode), args.placement)
    return tuple(dict.fromkeys(modes))


def check_sets(modes: Sequence[str], graph: Graph) -> None:
    """Refuse an offload set that names a layer which the network does not have, before the first mode is planned."""
    for mode in map(parse_mode, modes):
        if mode.offload_set not in (None, "dyn"):
            offloaded_layers(graph, mode.offload_set)


def _default(args: argparse.Namespace) -> tuple[str, ...]:
    """All modes that the placement can have: planners say where everything lies."""
    return tuple(m for m in DEFAULT_MODES if args.placement == "planned" or parse_mode(m).family not in PLANNERS)


def options_of(args: argparse.Namespace, density: Mapping[str, float] | None = None) -> Options:
    """Order, fit, placement, budget and compression as typed."""
    return Options(args.order, args.fit, args.placement, args.budget, compress=args.compress, density=density or {})


def check_schedules(results: Sequence[ModeResult], console: Console) -> None:
    """Run the independent checker over what was planned. Raises ScheduleError."""
    from minidnn.schedule.check import verify

    for result in results:
        if result.schedule is not None:
            verify(result.schedule)
    console.say("checker: every schedule is right at every speed")


def write_files(args: argparse.Namespace, title: str, results: Sequence[ModeResult]) -> None:
    """Write what `--plot`, `--trace` and `--html` ask for."""
    timelines = {r.mode: r.timeline for r in results if r.timeline is not None and r.fits}
    if args.trace is not None:
        with writing(args.trace) as path:
            save_trace(timelines, path)
    if args.plot is not None:
        from minidnn.report import timeline_plot

        with writing(args.plot) as path:
            timeline_plot(timelines, path, title=title)
    if args.html is not None:
        from minidnn.report import html_report

        maps = {r.mode: r.schedule for r in results if r.schedule is not None and r.schedule.placement == "planned"}
        with writing(args.html) as path:
            path.write_text(
                html_report(title, rows(results), timelines, maps), encoding="utf-8", errors="backslashreplace"
            )


def check_files(args: argparse.Namespace, results: Sequence[ModeResult]) -> None:
    """Raises BudgetError where a file is asked for and there is nothing to write, because no mode fits."""
    wanted = [f"--{name} {file}" for name in FILES if (file := getattr(args, name)) is not None]
    if wanted and not any(result.fits for result in results):
        raise BudgetError(f"{refusal(args, results)}; there is nothing to write for {', '.join(wanted)}")


def refusal(args: argparse.Namespace, results: Sequence[ModeResult]) -> str:
    """What to say where no mode fits."""
    least = min(results, key=lambda result: result.peak_bytes)
    room = "device" if args.budget is None else f"budget {format_size(args.budget)}"
    return (
        f"no mode fits the {room}; of these {least.mode} needs the least, {least.peak_bytes} bytes "
        f"({format_size(least.peak_bytes)})"
    )


def rows(results: Sequence[ModeResult]) -> list[dict[str, Any]]:
    """One dict per mode."""
    return [r.as_dict() for r in results]


def say_table(results: Sequence[ModeResult], console: Console) -> None:
    """Print the table, and why a mode does not fit."""
    from minidnn.report import compression_table, densities_table, modes_table

    console.say(modes_table(rows(results)))
    if any(result.more.get("compressed") for result in results):
        console.say("\n" + compression_table(rows(results)))
        console.say("\n" + densities_table(rows(results)) + "\n")
    for result in results:
        if result.reason:
            console.say(f"{result.mode}: {result.reason}")
