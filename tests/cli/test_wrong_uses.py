"""Wrong uses, one after the other: each gets its one sentence, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidnn import cli
from minidnn.errors import MiniDnnError
from tests.cli import ROOT
from tests.cli.uses import Use, names, prepare
from tests.cli.wrong_uses import USES

DOCUMENT = ROOT / "docs" / "errors.md"
COMMANDS = [use for use in USES if use.command]
CALLS = [use for use in USES if not use.command]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands name."""
    made = tmp_path_factory.mktemp("uses")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def scope() -> Iterator[dict[str, Any]]:
    """The names that the Python uses refer to."""
    found = names()
    yield found
    found["trainer"].close()


def expected(use: Use) -> str:
    """The sentence as a pattern; `...` is whatever the machine says."""
    return re.escape(use.sentence).replace(re.escape("..."), ".*")


def listing(folder: Path) -> dict[str, int]:
    """What lies in a folder, and how long it is."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


@pytest.mark.parametrize("use", COMMANDS, ids=lambda use: use.typed)
def test_a_command_says_what_is_wrong_and_leaves_nothing_behind(
    use: Use, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, _, target = use.typed.partition(" > ")
    kinds: list[str] = []
    complain = cli._complain

    def told(text: str) -> None:
        kinds.append(type(sys.exc_info()[1]).__name__)
        complain(text)

    monkeypatch.setattr(cli, "_complain", told)
    monkeypatch.chdir(folder)
    before = listing(folder)
    with open(target or os.devnull, "w") as stream:
        if target:
            monkeypatch.setattr(sys, "stdout", stream)
        code = cli.main(shlex.split(line)[1:])
        monkeypatch.undo()
    said = capsys.readouterr()
    assert (code, said.out, kinds) == (2, "", [use.kind])
    assert re.fullmatch(f"minidnn: {expected(use)}\n", said.err), said.err
    assert listing(folder) == before


@pytest.mark.parametrize("use", CALLS, ids=lambda use: use.typed)
def test_a_call_raises_the_class_with_the_sentence(use: Use, scope: dict[str, Any]) -> None:
    with pytest.raises(MiniDnnError) as caught:
        eval(use.typed, dict(scope))
    assert type(caught.value).__name__ == use.kind
    assert re.fullmatch(expected(use), str(caught.value)), str(caught.value)


def test_the_document_shows_these_uses() -> None:
    rows = [f"| `{use.typed}` | {use.kind} | {use.sentence} |" for use in USES]
    shown = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert shown == rows
