"""What the planning commands share: the graph and the profile that their options name."""

from __future__ import annotations

import argparse
from pathlib import Path

from minidnn import nn, optim
from minidnn.cli.options import count
from minidnn.errors import ArgumentError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.models import create
from minidnn.plan.registry import parse_mode
from minidnn.profile.profile import Profile

PROFILE_HELP = "times and workspaces that `minidnn profile` measured (JSON)"
GPU_HELP = "model a GPU instead: gtx970, gtx1080ti, k40, p100, v100, rtx2080ti, a100 or h100"
NO_PROFILE = "no profile: memory-optimal algorithms only"


def add_source(parser: argparse.ArgumentParser, batch: int = 64) -> None:
    """`--batch` and where times and workspaces come from: `--profile` or `--gpu`."""
    group = parser.add_argument_group("plan")
    group.add_argument("--batch", type=count, default=batch, metavar="N", help=f"images in a batch (default: {batch})")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--profile", "--workspaces", metavar="F", help=PROFILE_HELP)
    source.add_argument("--gpu", metavar="G", help=GPU_HELP)


def training_graph(args: argparse.Namespace, target: Target | None = None) -> Graph:
    """One training iteration (SGD with momentum) of the network that the options name."""
    net = create(args.model, input_shape=args.input)
    if net.input_shape is None:
        raise ArgumentError(f"model {args.model} says no input shape; give --input CxHxW")
    chosen = target or _measured_target(args) or Target(args.target or "paper", args.precision)
    shape = (args.batch, *net.input_shape)
    return build(net, nn.CrossEntropyLoss(), shape, chosen, optimizer=optim.SGD(0.01, momentum=0.9))


def _measured_target(args: argparse.Namespace) -> Target | None:
    """What a measured profile was measured for, unless `--target` names another."""
    if args.profile is None or args.target is not None:
        return None
    target = Profile.load(Path(args.profile)).target
    if target is not None and target.precision != args.precision:
        raise ArgumentError(
            f"--precision is {args.precision}; profile {args.profile} was measured at {target.precision}: "
            f"add --precision {target.precision}"
        )
    return target


def profile_for(args: argparse.Namespace, graph: Graph) -> Profile:
    """The profile of `--profile` or `--gpu`; with neither, one that knows zero-workspace algorithms only."""
    if args.profile is not None:
        return Profile.load(Path(args.profile))
    if args.gpu is not None:
        from minidnn.profile.gpus import named_gpu
        from minidnn.profile.model import modelled

        return modelled(graph, named_gpu(args.gpu))
    return Profile(NO_PROFILE)


def check_rule(mode: str, profile: Profile) -> None:
    """Refuse `p` and `g` where nothing is known of fast algorithms and their workspaces."""
    parsed = parse_mode(mode)
    if parsed.rule != "m" and profile.source == NO_PROFILE:
        suggestion = mode.removesuffix(f"({parsed.rule})") + "(m)"
        raise ArgumentError(
            f"mode {mode!r} needs the workspaces of fast algorithms; give --profile FILE or --gpu NAME, or ask for "
            f"memory-optimal ones: {suggestion!r}"
        )
