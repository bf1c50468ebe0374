"""What the commands share: the parser, the types of options, and where text goes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from math import inf, isnan
from pathlib import Path
from typing import Any, NoReturn

from minidnn.arguments import shown
from minidnn.errors import ArgumentError, MiniDnnError
from minidnn.units import parse_number, parse_shape, parse_size, parse_whole

# Repeated here because the modules that own them load NumPy, and `minidnn --help` should not.
PRECISIONS = ("fp32", "tf32", "bf16", "fp64")
PLACEMENTS = ("planned", "live")
ORDERS = ("prefetch-first", "derivative-first")
COMPRESSION = ("off", "all", "auto")

MODEL_HELP = """a name that `minidnn models` lists, with options if need be (vgg16, vgg:extra=20), or
    path/to/file.py:function"""
INPUT_HELP = "shape of one input, such as 3x64x64 (default: the model's own)"
BUDGET_HELP = "device memory that may be used, such as 4GiB (default: what the mode needs, or all that --gpu has)"
PRECISION_HELP = "arithmetic and activations (default: fp32; fp64 on the host alone)"
TARGET_HELP = """the papers' graph, or the one that CUDA runs, which saves less and fuses more (default: what the device
    runs, or what a measured profile is of, else paper)"""
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

    def print_help(self, file: Any = None) -> None:
        """As argparse's own, which keeps silent where that is impossible."""
        print(self.format_help(), end="", file=sys.stdout if file is None else file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, which would take `--option=--` for an option without a value."""
        args = sys.argv[1:] if args is None else args
        for option, value in pairwise(args):
            if option.startswith("--") and re.fullmatch(r"-[0-9.]+[A-Za-z]+", value):
                raise ArgumentError(f"{option}: {value!r} is below 0; write a size such as 8GiB")
        for argument in args:
            option, equals, value = argument.partition("=")
            if equals and option.startswith("-") and value == "--":
                raise ArgumentError(f"{option} is '--', which is no value; write one, or leave {option} out")
        found = super().parse_known_args(args, namespace)
        self._check_files(found[0])
        return found

    def _check_files(self, namespace: argparse.Namespace) -> None:
        """Refuse an option whose file another one names, to read it or to write it as well: one would be lost."""
        named: dict[str, str] = {}
        given = [(a, value) for a in self._actions if isinstance(value := getattr(namespace, a.dest, None), str)]
        for action, text in given:
            file = text if action.type is path else _file_of(text) if action.type is source else ""
            if os.path.isfile(file):
                named[os.path.realpath(file)] = _called(action)
        for action, text in given:
            if action.type in (appended, drawing, output, page):
                first = named.setdefault(os.path.realpath(text), _called(action))
                if first != _called(action):
                    raise ArgumentError(f"{_called(action)} {text} is what {first} names; give another file")

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def _file_of(text: str) -> str:
    """The file that a `source` names: what has a suffix and is no number."""
    file = os.path.expanduser(text.partition(":")[0])
    return file if os.path.splitext(file)[1] and isnan(parse_number(file)) else ""


def _called(action: argparse.Action) -> str:
    """An argument as the user knows it."""
    return next((o for o in action.option_strings if o.startswith("--")), str(action.metavar or action.dest))


class Console:
    """Where a command's text goes: to stdout for a reader, nowhere with --quiet or --json."""

    def __init__(self, json: bool, quiet: bool) -> None:
        self.stdout = sys.stdout
        self.silent = json or quiet
        self.progress = not quiet and sys.stderr.isatty()
        self.exit_code = 0

    def say(self, text: str = "") -> None:
        """Print one text to stdout, unless the user asked for silence or for JSON."""
        if not self.silent:
            self.write(text)

    def write(self, text: str) -> None:
        """Print one text to stdout. A reader that has gone (`minidnn models | head -1`) ends no work: the rest is not
        said. Raises MiniDnnError where the disk behind stdout is full."""
        try:
            print(text, file=self.stdout, flush=True)
        except BrokenPipeError:
            self.silent = True
            self._forget()
        except OSError as error:
            self._forget()
            raise MiniDnnError(
                f"standard output cannot be written: {error.strerror}; "
                "name a file that can take it"
            ) from None

    def _forget(self) -> None:
        """What the buffer still holds must not fail again when the process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stdout.fileno())
        os.close(nowhere)


def _put(part: Path, final: Path) -> None:
    """Give a whole file its name. Where the folder forbids that, or the name is a mount, its content goes there."""
    import shutil

    if final.exists():
        shutil.copymode(final, part)
    try:
        part.replace(final)
    except OSError:
        shutil.copyfile(part, final)
        part.unlink()


@contextmanager
def writing(file: str) -> Iterator[Path]:
    """Write a file that the user named: it is the old one until the new one is whole, whatever stops the writing.
    Raises ArgumentError naming it where the disk is full or forbids it."""
    from tempfile import gettempdir

    plain = not os.path.exists(file) or os.path.isfile(file)  # else a device or a pipe: nothing to keep
    final = Path(os.path.realpath(file) if plain else file)  # what a link leads to is replaced, not the link
    folder = final.parent if os.access(final.parent, os.W_OK) else Path(gettempdir())
    part = folder / f".minidnn-{os.urandom(8).hex()}.part" if plain else final
    try:
        yield part
        if plain:
            _put(part, final)
    except BaseException as error:  # Ctrl-C too
        if plain:
            with suppress(OSError):
                part.unlink()
        if not isinstance(error, OSError):
            raise
        raise ArgumentError(f"{file} cannot be written: {error.strerror or error}; name another file") from None


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--quiet`, which every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors (and the JSON object)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """`MODEL` and `--input`, which every command about one network has."""
    parser.add_argument("model", metavar="MODEL", type=source, help=MODEL_HELP)
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
    return parse_shape(text)


@option_type
def count(text: str) -> int:
    """A whole number of at least 1."""
    return parse_whole(text)


@option_type
def natural(text: str) -> int:
    """A whole number of at least 0."""
    return parse_whole(text, least=0)


@option_type
def seed(text: str) -> int:
    """A whole number of 64 bits."""
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise ArgumentError(f"{shown(text)} must be a whole number from 0 to 2^64 - 1")
    return int(text)


@option_type
def size(text: str) -> int:
    """`8GiB` -> bytes."""
    return parse_size(text, "")


@option_type
def path(text: str) -> str:
    """The path of a file or directory."""
    if not text or "\0" in text:
        raise ArgumentError(f"{text!r} is no path; name a file or directory")
    return text


def source(text: str) -> str:
    """A name, or a file to read, with what is wanted of it behind a colon (`net.py:build`)."""
    return text


def appended(text: str) -> str:
    """The path of a file to be written line by line."""
    return str(path(text))


@option_type
def output(text: str) -> str:
    """The path of a file to be written at a command's end."""
    return _output(text)


def _output(text: str) -> str:
    """What can be known to fail at the end fails now."""
    folder = os.path.dirname(os.path.realpath(text) if os.path.islink(text) else text) or "."
    if not text or "\0" in text:
        raise ArgumentError(f"{text!r} is no path; name a file")
    if os.path.isdir(text):
        raise ArgumentError(f"{text!r} is a directory; name a file")
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass  # not there yet: its folder decides
    except OSError as error:  # a loop of links, a name that no file system takes
        raise ArgumentError(f"{shown(text)} cannot be written: {error.strerror}; name another file") from None
    if not os.path.isdir(folder):
        raise ArgumentError(f"{text!r} cannot be written: there is no folder {folder}; make it, or name another file")
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise ArgumentError(f"{text!r} cannot be written: no permission, or a read-only file system; name another file")
    return text


@option_type
def drawing(text: str) -> str:
    """The path of a plot to be written at a command's end."""
    return _drawn(text, "a PNG", ".png")


@option_type
def page(text: str) -> str:
    """The path of a page with plots to be written at a command's end."""
    return _drawn(text, "an HTML page", ".html", ".htm")


def _drawn(text: str, what: str, *endings: str) -> str:
    """A suffix may not promise what the file will not be; without one it promises nothing."""
    if find_spec("matplotlib") is None:
        raise ArgumentError("plots need matplotlib; pip install 'minidnn[plot]'")
    ending = os.path.splitext(_output(text))[1].lower()
    if ending not in ("", *endings):
        raise ArgumentError(f"{text!r} would be {what} whatever its name says; name a file that ends in {endings[0]}")
    return text


def number(least: float, most: float = inf, above: bool = False) -> Callable[[str], float]:
    """A finite number from `least` to `most`; with `above` not `least` itself."""
    bound = f"from {least:g} to {most:g}" if most < inf else f"above {least:g}" if above else f"of at least {least:g}"

    @option_type
    def parse(text: str) -> float:
        value = parse_number(text)
        if not ((value > least if above else value >= least) and value <= most):
            raise ArgumentError(f"{shown(text)} must be a number {bound}")
        return value

    return parse
