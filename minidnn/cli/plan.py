"""`minidnn plan MODEL`: which activation goes when and why, within a budget; nothing runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from minidnn.cli.options import Console, add_model, add_planning, drawing, writing
from minidnn.cli.planning import add_source, card_memory, heading, profile_for, training_graph
from minidnn.errors import ArgumentError
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.profile.nominal import NOMINAL, with_times
from minidnn.report import sparkline, text_table
from minidnn.run.bound import iteration_bound, paper_bound
from minidnn.run.choose import Options, choose
from minidnn.run.explain import Decision, Slower, decisions, fractional_ms, slower_algorithms
from minidnn.run.simulator import simulate
from minidnn.run.timeline import Timeline
from minidnn.units import format_ms, format_size

EXAMPLE = "minidnn plan vgg16 --batch 256 --budget 14GiB --gpu v100"
POLICY_HELP = f"policy: {', '.join(sorted(PLANNERS))}, or any memory mode (default: best)"


LEGEND = (
    "copied after: the op that makes it; gone before: from that op on its bytes serve others; back before: its copy-in "
    "is issued then;\nwhy: of the ops that run while it is away, the fullest, and what the pool would be short of"
)
SHOWN = 3
"""So many ops are named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the budget, the policy, and what to plan with."""
    add_model(parser)
    add_source(parser)
    add_planning(parser)
    parser.add_argument("--policy", default="best", metavar="P", help=POLICY_HELP)
    parser.add_argument("--check", action="store_true", help="verify the schedule with the independent checker")
    files = parser.add_argument_group("files")
    files.add_argument("--plot", type=drawing, metavar="PNG", help="draw the predicted timeline and memory curve")


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the plan."""
    parse_mode(args.policy)
    if args.placement != "planned":
        raise ArgumentError(f"--placement is {args.placement!r}; a plan says where everything lies: leave it out")
    graph = training_graph(args, args.policy)
    profile = with_times(graph, profile_for(args, graph))
    args.budget = card_memory(args)
    options = Options(args.order, args.fit, budget=args.budget, compress=args.compress)
    schedule = choose(graph, args.policy, profile, options, score=lambda s: simulate(s, profile).iteration_ms)
    found = simulate(schedule, profile)
    budget = schedule.peak_bytes if args.budget is None else args.budget
    bound = iteration_bound(graph, profile, budget).ms(2 if schedule.plan.sync == "none" else 1)
    decided = list(decisions(schedule, profile, budget - schedule.persistent_bytes))
    slower = slower_algorithms(schedule, profile)
    result = {
        "model": args.model, "batch": args.batch, "precision": args.precision, "target": graph.target.name,
        "profile": profile.source, "policy": args.policy, "budget": args.budget, "peak_bytes": schedule.peak_bytes,
        "persistent_bytes": schedule.persistent_bytes, "pool_bytes": schedule.pool_bytes,
        "pinned_bytes": schedule.pinned_bytes, "offloaded_bytes": schedule.offloaded_bytes,
        "iteration_ms": found.iteration_ms, "stall_ms": dict(found.stall_ms), "lower_bound_ms": bound,
        "paper_bound_ms": paper_bound(graph, profile, budget),
        "fractional_bound_ms": fractional_ms(schedule, profile, budget),
        "activations": [d.as_dict() for d in decided],
        "slower_algorithms": [asdict(s) for s in slower],
        "algorithms": {op.name: schedule.plan.algorithm(op).name for op in graph.ops if "conv2d" in op.function},
        "memory": [[ms, nbytes] for ms, nbytes in found.timeline.memory],
    }  # fmt: skip
    limit = "none" if args.budget is None else format_size(args.budget)
    console.say(f"{heading(args, graph, profile)}, policy {args.policy}, budget {limit}")
    _say(result, decided, slower, found.timeline, console)
    if args.check:
        from minidnn.schedule.check import verify

        verify(schedule)
        console.say("checker: the schedule is right at every speed")
    if args.plot is not None:
        from minidnn.report import timeline_plot

        with writing(args.plot) as path:
            timeline_plot(found.timeline, path, title=f"{args.model}, batch {args.batch}, {args.policy}")
    return result


def _say(
    result: dict[str, Any], decided: list[Decision], slower: list[Slower], timeline: Timeline, console: Console
) -> None:
    console.say(_table(decided))
    if result["activations"] and any(d.offloaded for d in decided):
        console.say(LEGEND)
    stays = [d for d in decided if not d.offloaded]
    console.say(f"{len(stays)} {'tensors stay' if len(stays) == len(decided) else 'more stay'} on the device "
                f"({format_size(sum(d.nbytes for d in stays))})")  # fmt: skip
    if slower:
        most = ", ".join(f"{s.op} {s.algorithm} for {s.fastest} (+{format_ms(s.more_ms)} ms)" for s in slower[:SHOWN])
        console.say(
            f"no room for the fastest algorithm's workspace: {len(slower)} {'ops' if slower[1:] else 'op'}, at a cost "
            f"of {format_ms(sum(s.more_ms for s in slower))} ms: {most}{', ...' if len(slower) > SHOWN else ''}"
        )
    bound, ms = result["lower_bound_ms"], result["iteration_ms"]
    stalls = ", ".join(f"{format_ms(s)} ms for {cause}" for cause, s in result["stall_ms"].items() if s >= 0.05)
    console.say(f"expected: {format_ms(ms)} ms, {ms / bound:.3f} times the lower bound; waits: {stalls or 'none'}")
    fractional = result["fractional_bound_ms"]
    if result["profile"] == NOMINAL:
        console.say(f"these times are {NOMINAL}, those of no card: give --gpu NAME or --profile FILE for a card's")
    console.say(
        f"lower bound: {format_ms(bound)} ms, whatever is offloaded (the paper's: Proposition 3 "
        f"{format_ms(result['paper_bound_ms'])} ms; Theorem 2, with these algorithms and one transfer at a time, "
        f"{'none' if fractional is None else format_ms(fractional) + ' ms'})"
    )
    console.say(
        f"memory: peak {format_size(result['peak_bytes'])} (persistent {format_size(result['persistent_bytes'])}, pool "
        f"{format_size(result['pool_bytes'])}), pinned {format_size(result['pinned_bytes'])}"
    )
    full = result["peak_bytes"] if result["budget"] is None else result["budget"]
    console.say(f"in use from 0 to {format_ms(timeline.end_ms)} ms; a full block is {format_size(full)}:")
    console.say(sparkline(timeline, full))


def _table(decided: list[Decision]) -> str:
    header = ["leaves", "size", "copied after", "gone before", "back before", "needed by", "why"]
    rows = [
        [d.tensor, format_size(d.nbytes), d.copied_after or "(the host has it)", d.gone_before or "",
         d.back_before or "", d.needed, d.why]
        for d in decided
        if d.offloaded
    ]  # fmt: skip
    return text_table(header, rows) if rows else "nothing has to leave"
