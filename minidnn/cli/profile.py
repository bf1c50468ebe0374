"""`minidnn profile MODEL`: measure every operation of a network, with every algorithm, and the host link, on a GPU."""

from __future__ import annotations

import argparse
import datetime
from dataclasses import replace
from typing import Any

from minidnn.cli.options import Console, add_model, count, output, writing
from minidnn.cli.planning import training_graphs
from minidnn.device.base import Device
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, OutOfDeviceMemory
from minidnn.graph.graph import Graph
from minidnn.profile.profile import Profile, op_key
from minidnn.units import format_size

EXAMPLE = "minidnn profile vgg16 --batch 64 --precision bf16 -o profile.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, what to measure, and the file."""
    add_model(parser)
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--batch", type=count, default=64, metavar="N", help="images in a batch (default: 64)")
    run_group.add_argument(
        "--precision", default="fp32", choices=("fp32", "tf32", "bf16"), help="of the network (default: fp32)"
    )
    run_group.add_argument("--device", default="cuda", metavar="D", help="cuda or cuda:1 (default: cuda)")
    run_group.add_argument("--deterministic", action="store_true", help="deterministic algorithms alone")
    run_group.add_argument(
        "-o", "--output", type=output, required=True, metavar="FILE", help="the profile (JSON) for --profile"
    )


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, write, print a summary; return it."""
    if not args.device.startswith("cuda"):
        raise ArgumentError(f"--device is {args.device!r}; it must be a CUDA device, such as cuda or cuda:1")
    with open_device(args.device, precision=args.precision, deterministic=args.deterministic) as device:
        graphs = _graphs(args, device)
        found = [device.profile(graph) for graph in graphs]
    entries = {key: ways for part in found for key, ways in part.entries.items()}
    unknown = [op.name for graph in graphs for op in graph.ops if op_key(graph, op) not in entries]
    if unknown or found[-1].link is None:
        raise OutOfDeviceMemory(f"{', '.join(unknown) or 'the link'} could not be measured; use a smaller batch")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    profile = replace(found[0], source=f"{found[0].source}, {today}", entries=entries, link=found[-1].link)
    with writing(args.output) as file:
        profile.save(file)
    result = _summary(args, profile, graphs[0])
    console.say(_report(result))
    return result


def _graphs(args: argparse.Namespace, device: Device) -> list[Graph]:
    """The training iteration as base and keep have it, and as the other modes do."""
    modes = ("keep", "vdnn:all")
    return [graph for _, graph in training_graphs(args, modes, device.target_for(args.precision))]


def _summary(args: argparse.Namespace, profile: Profile, graph: Graph) -> dict[str, Any]:
    kinds: dict[str, float] = {}
    for op in graph.ops:
        kinds[op.kind] = kinds.get(op.kind, 0.0) + (profile.algorithms(graph, op)[0].ms or 0.0)
    assert profile.link is not None
    return {
        "model": args.model, "batch": args.batch, "precision": args.precision, "source": profile.source,
        "entries": len(profile.entries), "algorithms": sum(len(ways) for ways in profile.entries.values()),
        "compute_ms": sum(kinds.values()), "ms_by_kind": kinds, "d2h_gb_per_s": profile.link.d2h / 1e9,
        "h2d_gb_per_s": profile.link.h2d / 1e9, "duplex": profile.link.duplex,
        "launch_ms": profile.launch_ms, "action_ms": profile.action_ms, "wake_ms": profile.wake_ms,
        "scratch_bytes": profile.scratch_bytes, "file": str(args.output),
    }  # fmt: skip


def _report(result: dict[str, Any]) -> str:
    """The same for a reader."""
    ways = f"{result['entries']} operations, {result['algorithms']} algorithms"
    lines = [f"{result['model']}, batch {result['batch']}, {result['precision']}, {result['source']}: {ways}"]
    kinds = sorted(result["ms_by_kind"].items(), key=lambda item: -item[1])
    lines += [f"  {kind:20} {ms:9.3f} ms" for kind, ms in kinds]
    both = "both ways at once" if result["duplex"] else "one way at a time"
    lines += [
        f"  all, fastest         {result['compute_ms']:9.3f} ms",
        f"link: {result['d2h_gb_per_s']:.1f} GB/s to the host, {result['h2d_gb_per_s']:.1f} GB/s from it, {both}",
        f"libraries' scratch: {format_size(result['scratch_bytes'])}; a launch costs the host "
        f"{result['launch_ms'] * 1e3:.0f} us, another action {result['action_ms'] * 1e3:.0f}, a wait "
        f"{result['wake_ms'] * 1e3:.0f} more",
        f"written to {result['file']}",
    ]
    return "\n".join(lines)
