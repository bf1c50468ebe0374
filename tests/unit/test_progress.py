"""What takes long says so on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from minidnn import nn, optim
from minidnn.compiled import compiled
from minidnn.graph.build import build
from minidnn.models import create
from minidnn.profile.profile import Profile
from minidnn.progress import bar
from minidnn.run.choose import choose


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def plan() -> None:
    """Plan a mode of several candidates."""
    graph = build(create("smallvgg"), nn.CrossEntropyLoss(), (4, 1, 8, 8), optimizer=optim.SGD(0.1))
    choose(graph, "vdnn++", Profile("none"), score=lambda schedule: schedule.peak_bytes)


def test_planning_says_which_mode_it_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(title: str, total: int | None = None) -> object:
        return bar(title, total, True)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("minidnn.run.choose.bar", at_once)
    plan()
    assert "planning vdnn++: " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # and takes it away at the end


def test_planning_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    plan()
    assert capsys.readouterr() == ("", "")


def test_a_bar_waits_before_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar("short") as done:
        done.update()
    assert terminal.getvalue() == ""


def test_a_terminal_sees_what_is_compiled_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(number: int) -> int:
        return 2 * number

    def outer(number: int) -> int:
        return called(number) + 1  # type: ignore[no-any-return]

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for function in (inner, outer):
        function.__module__ = "minidnn.somewhere"
    called: Any = compiled(inner)
    loop = compiled(outer)
    assert terminal.getvalue() == ""
    assert loop(3) == 7
    said = terminal.getvalue()
    assert "compiling outer, once" in said
    assert "inner" not in said
    assert said.endswith("\r")
    assert loop(4) == 9
    assert terminal.getvalue() == said


def test_what_others_compile_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert compiled(lambda number: number + 1)(1) == 2
    assert terminal.getvalue() == ""


class Gone(Terminal):
    """A terminal that was closed, or that nobody can write to any more."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.gone = closed

    def isatty(self) -> bool:
        if self.gone:
            raise ValueError("I/O operation on closed file")
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stderr", [None, Gone(closed=True), Gone(closed=False)])
def test_what_is_compiled_is_compiled_though_nobody_can_see_it(
    monkeypatch: pytest.MonkeyPatch, stderr: Terminal | None
) -> None:
    def function(number: int) -> int:
        return number + 1

    function.__module__ = "minidnn.somewhere"
    monkeypatch.setattr(sys, "stderr", stderr)
    assert compiled(function)(1) == 2


@pytest.mark.parametrize("wanted", [None, True])
@pytest.mark.parametrize("stderr", [None, Gone(closed=True)])
def test_a_bar_that_nobody_can_see_is_none(
    monkeypatch: pytest.MonkeyPatch, stderr: Terminal | None, wanted: bool | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with bar("long", 2, wanted, delay=0.0) as done:
        done.update()
