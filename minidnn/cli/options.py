"""What the commands share: the parser, the types of options, and where text goes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from minidnn.errors import ArgumentError
from minidnn.units import parse_size

# Repeated here because the modules that own them load NumPy, and `minidnn --help` should not.
PRECISIONS = ("fp32", "tf32", "bf16", "fp64")
PLACEMENTS = ("planned", "live")
ORDERS = ("prefetch-first", "derivative-first")
COMPRESSION = ("off", "all", "auto")

MODEL_HELP = """a name that `minidnn models` lists, with options if need be (vgg16, vgg:extra=20), or
    path/to/file.py:function"""
INPUT_HELP = "shape of one input, such as 3x64x64 (default: the model's own)"
BUDGET_HELP = "device memory that may be used, such as 4GiB (default: what the mode needs)"
PRECISION_HELP = "arithmetic and activations (default: fp32; fp64 on the host alone)"
TARGET_HELP = """the papers' graph, or the one that saves less and fuses more (default: the device's own, paper on the
    host and native on CUDA)"""
ORDER_HELP = "what a layer allocates first in backward (default: prefetch-first)"
PLACEMENT_HELP = """offsets planned before the run, or the papers' pool, which places while it runs and can get stuck
    (default: planned)"""
COMPRESS_HELP = """on idle CPU cores, pack what was copied out, so that less host memory is pinned: nothing, everything,
    or what the share of zeros makes worth it (default: off)"""
FIT_HELP = "place tensors by this run-time heuristic, such as best-fit (default: the smallest placement found)"


class Parser(argparse.ArgumentParser):
    """argparse with our manners: options are not abbreviated, examples keep their lines, an error is one sentence."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class Console:
    """Where a command's text goes: to stdout for a reader, nowhere with --quiet or --json."""

    def __init__(self, json: bool, quiet: bool) -> None:
        self.silent = json or quiet
        self.progress = not quiet and sys.stderr.isatty()
        self.exit_code = 0

    def say(self, text: str = "") -> None:
        """Print one text to stdout, unless the user asked for silence or for JSON."""
        if not self.silent:
            print(text, flush=True)


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--quiet`, which every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors (and the JSON object)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """`MODEL` and `--input`, which every command about one network has."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--input", type=shape, metavar="CxHxW", help=INPUT_HELP)


def add_planning(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What every command has that plans an iteration: budget, precision, target, order, fit, compression."""
    group = parser.add_argument_group("memory")
    group.add_argument("--budget", type=size, metavar="SIZE", help=BUDGET_HELP)
    group.add_argument("--precision", default="fp32", choices=PRECISIONS, help=PRECISION_HELP)
    group.add_argument("--target", choices=("paper", "native"), help=TARGET_HELP)
    group.add_argument("--order", default=ORDERS[0], choices=ORDERS, help=ORDER_HELP)
    group.add_argument("--fit", metavar="F", help=FIT_HELP)
    group.add_argument("--placement", default=PLACEMENTS[0], choices=PLACEMENTS, help=PLACEMENT_HELP)
    group.add_argument("--compress", default=COMPRESSION[0], choices=COMPRESSION, help=COMPRESS_HELP)
    return group


def option_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of values whose ArgumentError becomes argparse's error, which adds the option's name."""

    def wrapped(text: str) -> Any:
        try:
            return parse(text)
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return wrapped


@option_type
def shape(text: str) -> tuple[int, int, int]:
    """`3x64x64` -> (3, 64, 64)."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None or "0" in match.groups():
        raise ArgumentError(f"{text!r} is no shape; write channels x height x width, such as 3x64x64")
    return int(match[1]), int(match[2]), int(match[3])


@option_type
def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise ArgumentError(f"{text!r} must be a whole number of at least 1")
    return int(text)


@option_type
def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not re.fullmatch(r"\d+", text):
        raise ArgumentError(f"{text!r} must be a whole number of at least 0")
    return int(text)


@option_type
def size(text: str) -> int:
    """`8GiB` -> bytes."""
    return parse_size(text)


def number(least: float, above: bool = False) -> Callable[[str], float]:
    """A finite number of at least `least`, or above it."""
    bound = f"above {least:g}" if above else f"of at least {least:g}"

    @option_type
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (value > least if above else value >= least) or value == float("inf"):
            raise ArgumentError(f"{text!r} must be a number {bound}")
        return value

    return parse
