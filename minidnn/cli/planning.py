"""What the planning commands share: the graph and the profile that their options name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path

from minidnn import nn, optim
from minidnn.arguments import number, shown
from minidnn.cli.options import count, path, source
from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph, Target
from minidnn.models import create
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.profile.profile import Profile, op_key
from minidnn.run.choose import Options
from minidnn.run.program import Purpose, Recipe
from minidnn.units import parse_number

PROFILE_HELP = "times and workspaces that `minidnn profile` measured (JSON)"
GPU_HELP = """model a GPU instead: gtx970, gtx1080ti, k40, p100, v100, rtx2080ti, t4, a100, rtx3090, rtx4090, l4, h100
    or h200"""
DENSITY_HELP = """share of values that are not zero, 0 to 1, to predict compression with: a number, or a JSON file of
    numbers by tensor or layer (default: 0.5)"""
NO_PROFILE = "no profile: memory-optimal algorithms only"


def add_source(parser: argparse.ArgumentParser, batch: int = 64) -> None:
    """`--batch` and where times and workspaces come from: `--profile` or `--gpu`."""
    group = parser.add_argument_group("plan")
    group.add_argument("--batch", type=count, default=batch, metavar="N", help=f"images in a batch (default: {batch})")
    times = group.add_mutually_exclusive_group()
    times.add_argument("--profile", "--workspaces", type=path, metavar="F", help=PROFILE_HELP)
    times.add_argument("--gpu", metavar="G", help=GPU_HELP)


def add_density(parser: argparse.ArgumentParser) -> None:
    """`--density`, of commands that predict compression."""
    parser.add_argument("--density", type=source, metavar="F|FILE", help=DENSITY_HELP)


def densities(args: argparse.Namespace, graph: Graph) -> dict[str, float]:
    """What `--density` says, by tensor: one number for all, or those that a file has."""
    if args.density is None:
        return {}
    share = parse_number(args.density)
    if isnan(share):
        return _read_densities(args.density, graph)
    return dict.fromkeys(graph.tensors, number(share, "--density", 0, 1, "[]"))


def _read_densities(path: str, graph: Graph) -> dict[str, float]:
    """A JSON object: density by tensor, or by the layer that reads it."""
    inputs = {layer.name: layer.x for layer in graph.layers}
    try:
        stored: dict[str, object] = dict(json.loads(Path(path or "?").read_text(encoding="utf-8")).items())
    except OSError as error:
        raise ArgumentError(
            f"--density is {shown(path)}; give a number from 0 to 1 or a JSON file ({error.strerror})"
        ) from None
    except (ValueError, AttributeError, RecursionError):
        raise ArgumentError(
            f'--density {path} is not a JSON object; write densities by tensor or layer, such as {{"features.0": 0.5}}'
        ) from None
    found: dict[str, float] = {}
    for name, share in stored.items():
        tensor = inputs.get(name, name)
        if tensor not in graph.tensors:
            raise ArgumentError(
                f"--density {path} names {shown(name)}, which is no tensor or layer of this network; use names such as "
                f"{', '.join(list(inputs)[:6])}, ..."
            )
        found[tensor] = number(share, f"density of {name} in {path}", 0, 1, "[]")
    return found


def training_graph(args: argparse.Namespace, mode: str) -> Graph:
    """The iteration (SGD with momentum) that a trainer runs in a mode, of the network that the options name."""
    (_, graph), *_ = training_graphs(args, [mode])
    return graph


def training_graphs(
    args: argparse.Namespace, modes: Sequence[str], target: Target | None = None
) -> Iterator[tuple[str, Graph]]:
    """Each mode with the iteration that a trainer runs in it; the same graph where that is the same."""
    net = create(args.model, input_shape=args.input)
    if net.input_shape is None:
        raise ArgumentError(f"model {args.model} says no input shape; give --input CxHxW")
    target = target or _measured_target(args) or _target(args)
    made: dict[tuple[bool, bool], Graph] = {}
    for mode in modes:
        recipe = Recipe(
            net, nn.CrossEntropyLoss(), optim.SGD(0.01, momentum=0.9), target, parse_mode(mode), Options(),
            net.input_shape,
        )  # fmt: skip
        kind = recipe.at_end, recipe.own_input
        if kind not in made:
            made[kind] = recipe.graph(Purpose(train=True), args.batch)
        yield mode, made[kind]


def _target(args: argparse.Namespace) -> Target:
    """What CUDA runs, on the card that `--gpu` names or on one that has tensor cores."""
    if args.gpu is None:
        return Target.on_cuda(args.target or "paper", args.precision)
    from minidnn.profile.gpus import named_gpu

    return Target.on_cuda(args.target or "paper", args.precision, named_gpu(args.gpu).has_matrix_units(args.precision))


def _measured_target(args: argparse.Namespace) -> Target | None:
    """What a measured profile was measured for, unless `--target` names another."""
    target = None if args.profile is None else Profile.load(Path(args.profile)).target
    if target is None or args.target not in (None, target.name):
        return None
    if target.precision != args.precision:
        raise ArgumentError(
            f"--precision is {args.precision}; profile {args.profile} was measured at {target.precision}: "
            f"add --precision {target.precision}"
        )
    return target


def heading(args: argparse.Namespace, graph: Graph, profile: Profile) -> str:
    """What is planned, of which graph, with whose times."""
    return f"{args.model}, batch {args.batch}, {args.precision}, {graph.target.name} graph, {profile.source}"


def profile_for(args: argparse.Namespace, graph: Graph) -> Profile:
    """The profile of `--profile` or `--gpu`; with neither, one that knows zero-workspace algorithms only."""
    if args.profile is not None:
        return _read_profile(args, graph)
    if args.gpu is not None:
        from minidnn.profile.gpus import named_gpu
        from minidnn.profile.model import modelled

        return modelled(graph, named_gpu(args.gpu))
    return Profile(NO_PROFILE)


def card_memory(args: argparse.Namespace) -> int | None:
    """The budget that is meant: `--budget`, or all that the card of `--gpu` has."""
    if args.budget is not None or args.gpu is None:
        budget: int | None = args.budget
        return budget
    from minidnn.profile.gpus import named_gpu

    return named_gpu(args.gpu).memory_bytes


def _read_profile(args: argparse.Namespace, graph: Graph) -> Profile:
    """The profile of `--profile`. Raises ArgumentError where it is another network's: what a profile does not know
    would count as free of workspace."""
    profile = Profile.load(Path(args.profile))
    unknown = [op.name for op in graph.ops if "conv2d" in op.function and op_key(graph, op) not in profile.entries]
    if unknown:
        raise ArgumentError(
            f"profile {args.profile} does not know {unknown[0]} at batch {args.batch}, {args.precision}, "
            f"{graph.target.name} graph; make one of this network with 'minidnn profile'"
        )
    return profile


def check_rule(mode: str, profile: Profile) -> None:
    """Refuse `p` and `g` where nothing is known of fast algorithms and their workspaces; and planners, which weigh
    their times."""
    parsed = parse_mode(mode)
    if parsed.family in PLANNERS and profile.source == NO_PROFILE:
        raise ArgumentError(f"mode {mode!r} weighs times; give --gpu NAME (such as v100 or h100) or --profile FILE")
    if parsed.rule != "m" and profile.source == NO_PROFILE:
        suggestion = mode.removesuffix(f"({parsed.rule})") + "(m)"
        raise ArgumentError(
            f"mode {mode!r} needs the workspaces of fast algorithms; give --profile FILE or --gpu NAME, or ask for "
            f"memory-optimal ones: {suggestion!r}"
        )
