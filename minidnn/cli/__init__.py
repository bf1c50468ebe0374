"""The command `minidnn`. Each sub-command is one module of this package, loaded when it is asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from importlib import import_module
from io import TextIOWrapper
from types import FrameType

from minidnn import __version__
from minidnn.cli.options import Console, Parser, add_output
from minidnn.errors import ArgumentError, MiniDnnError

EXAMPLE = "minidnn train smallnet --data digits --epochs 5"
COMMANDS = {
    "train": "train a network and report its accuracy, speed and memory",
    "compare": "run memory modes for real, time them, and verify that all give the same gradients",
    "simulate": "predict time, stalls and memory of each mode on a named GPU",
    "plan": "show which activation leaves when and why, within a budget; nothing runs",
    "sweep": "predict policies at many budgets, from the least to the most that helps",
    "profile": "measure a network's operations and the host link on a GPU, for planning and simulation",
    "memory": "show what a memory mode needs: pool, placement, parameters, pinned bytes; nothing runs",
    "summary": "show a network's layers, shapes, parameters, operations and activation bytes",
    "models": "list the built-in networks",
    "info": "show devices, versions and memory limits, and what is missing for CUDA",
}
"""A command's name and what it does. Its module has `EXAMPLE`, `add_arguments(parser)` and `run(args, console)`.

`run` prints for a reader with `console.say` and returns the object that `--json` prints.
"""

OWN = ("-h", "--help", "--version", "--")
"""What may stand in front of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for whatever the user can mend, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    with _own_interrupts():
        return _told(arguments)


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """A command may take Ctrl-C into its own hands; afterwards it is the caller's again."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _told(arguments: list[str]) -> int:
    """The exit code; what went wrong is told in one sentence."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except MiniDnnError as error:
        _complain(str(error))
    except BrokenPipeError:
        # The reader has gone (`minidnn --help | head -1`); what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except MemoryError as error:
        _complain(f"this machine has too little memory: {error or 'an allocation failed'}")
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    return 2


def entry() -> int:
    """`main` for a process of its own, in which Ctrl-C is told in one line wherever it strikes, and ends with it."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable  # one that struck in a destructor
    try:
        return main()
    except KeyboardInterrupt:  # a second one, while the first was being told
        return 130
    except Exception:
        if not interrupts:
            raise
        _complain("interrupted")  # while something was imported, which made another error of it
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop


def _prepare_streams() -> None:
    """Closed streams swallow what is written to them; characters that the terminal does not have are escaped."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end
        elif name != "stdin" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    """One line on stderr, in which nothing is longer than a reader can take; where even that is impossible, the exit
    code must do."""
    line = re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...{word[0][-60:]}", " ".join(text.splitlines()))
    with suppress(OSError):
        print(f"minidnn: {line}", file=sys.stderr, flush=True)


def _run(arguments: list[str]) -> int:
    early = next((a for a in arguments[:1] if a.startswith("-") and a not in OWN), None)
    behind = next((a for a in arguments if a in COMMANDS), None)
    if early is not None and behind is not None:
        raise ArgumentError(
            f"{early} stands in front of {behind}; give it behind the command (see minidnn {behind} --help)"
        )
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise ArgumentError(f"there is no command {command!r}; choose one of {', '.join(COMMANDS)}")
    args, rest = _parser(command).parse_known_args(arguments)
    if rest:
        program = " ".join(filter(None, ["minidnn", command]))
        raise ArgumentError(f"{program} does not understand {' '.join(rest)!r} (see {program} --help)")
    if args.command is None:
        _parser(None).print_help(sys.stderr)
        return 2
    console = Console(json=args.json, quiet=args.quiet)
    # What a model file prints must not mix with the object.
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        result = import_module(f"minidnn.cli.{args.command}").run(args, console)
    if args.json:
        console.write(_as_json(args.command, result))
    return console.exit_code


def _as_json(command: str, result: object) -> str:
    try:
        return json.dumps(result, allow_nan=False)
    except ValueError:
        raise ArgumentError(f"{command} found a figure that JSON cannot hold; leave out --json to see it") from None


def _parser(command: str | None) -> Parser:
    """The whole grammar, but with the arguments of `command` alone: the other modules stay unloaded."""
    parser = Parser(
        prog="minidnn",
        description="Train convolutional networks that are larger than the GPU's memory.",
        epilog=f"example:\n  {EXAMPLE}\n\nminidnn COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"minidnn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, about in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=about)
            continue
        module = import_module(f"minidnn.cli.{name}")
        sub = commands.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"example:\n  {module.EXAMPLE}"
        )
        module.add_arguments(sub)
        add_output(sub)
    return parser

