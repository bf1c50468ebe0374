"""What README shows runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from minidnn.cli import COMMANDS
from tests.cli import COMMAND, ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_run_one_after_another(block: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[0] == "minidnn"
        done = subprocess.run(
            [*COMMAND, *words[1:]], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
        )
        assert (done.returncode, done.stderr) == (0, ""), line


def test_every_command_is_listed() -> None:
    assert re.findall(r"^\| `minidnn (\w+)", README, re.MULTILINE) == list(COMMANDS)
