"""`minidnn summary MODEL`: what a network is made of."""

from __future__ import annotations

import argparse
from typing import Any

from minidnn.cli.options import Console, add_model, count
from minidnn.errors import ArgumentError
from minidnn.models import create

EXAMPLE = "minidnn summary vgg16 --batch 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --input, --batch."""
    add_model(parser)
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="images in a batch (default: 1)")


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the network's table."""
    net = create(args.model, input_shape=args.input)
    if net.input_shape is None:
        raise ArgumentError(f"model {args.model} says no input shape; give --input CxHxW")
    table = net.summary(args.batch)
    console.say(str(table))
    return {
        "model": args.model,
        "input_shape": list(net.input_shape or ()),
        "batch": args.batch,
        "layers": table.rows,
        "total": table.total,
    }
