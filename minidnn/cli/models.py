"""`minidnn models`: the built-in networks."""

from __future__ import annotations

import argparse
from typing import Any

from minidnn.cli.options import Console
from minidnn.models import MODELS, create, options

EXAMPLE = "minidnn models --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`models` has no options of its own."""


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return name, input, parameters, options and description of each built-in network."""
    rows = [describe(name) for name in MODELS]
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = "x".join(map(str, row["input_shape"]))
        console.say(f"{row['name']:{width}}  {size:>9}  {row['parameters']:>11,}  {row['about']}")
    console.say("\nname, input, parameters. Options go behind a colon (vgg:extra=20,num_classes=10), and a model of "
                "one's own is path/to/file.py:function")  # fmt: skip
    return {"models": rows}


def describe(name: str) -> dict[str, Any]:
    """One built-in network as plain data."""
    net = create(name)
    return {
        "name": name,
        "input_shape": list(net.input_shape or ()),
        "parameters": net.summary().total["parameters"],
        "options": {option: list(v) if isinstance(v, tuple) else v for option, v in options(MODELS[name]).items()},
        "about": (MODELS[name].__doc__ or "").splitlines()[0],
    }
