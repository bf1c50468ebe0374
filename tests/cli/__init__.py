"""The commands a user types, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "minidnn"]


def minidnn(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def succeed(*arguments: str) -> str:
    """The text that a command prints; it must exit 0 and leave stderr empty."""
    done = minidnn(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def json_of(*arguments: str) -> dict[str, Any]:
    """The object that a command prints with --json: one line, nothing else."""
    text = succeed(*arguments, "--json")
    assert text.count("\n") == 1
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def refuse(*arguments: str) -> str:
    """The sentence with which a command refuses: exit 2, one line on stderr, nothing on stdout."""
    done = minidnn(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("minidnn: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("minidnn: ").rstrip("\n")
