"""What README and the documentation show runs as it stands there, and what they point to exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.figures import COMMANDS as DRAWN
from bench.run_all import PAGES as GENERATED
from bench.run_all import STEPS
from bench.sections import MARKED, PARTS, rewritten
from minidnn.cli import COMMANDS, _parser
from tests.cli import COMMAND, ROOT
from tests.cli.pages import ENVIRONMENT, PAGES, blocks, shown_only

TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
README = TEXTS["README.md"]


def cases(language: str) -> list[object]:
    """The fenced blocks of a language on all pages, named by page and number."""
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name, text in TEXTS.items()
        for number, block in enumerate(blocks(text, language), 1)
    ]


@pytest.mark.parametrize("code", cases("python"))
def test_python_examples_run(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", cases("sh"))
def test_commands_run_one_after_another(block: str, tmp_path: Path) -> None:
    for folder in ("out", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "minidnn"
        done = subprocess.run(
            [*COMMAND, *words[1:]], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
        )
        assert (done.returncode, done.stderr) == (0, ""), line


def test_blocks_are_python_commands_or_what_they_print() -> None:
    found = [line for text in TEXTS.values() for line in re.findall(r"^```(.*)$", text, re.MULTILINE) if line]
    assert set(found) <= {"python", "sh", "text"}


@pytest.mark.parametrize("page", TEXTS)
def test_what_takes_long_or_needs_a_gpu_is_at_least_understood(page: str) -> None:
    for line in shown_only(TEXTS[page]):
        program, *words = shlex.split(line, comments=True)
        if program == "minidnn":
            _, rest = _parser(words[0]).parse_known_args(words)
            assert rest == [], line
        elif program == "python":
            script = ROOT / words[0]
            assert script.parent.name == "bench", line
            source = script.read_text(encoding="utf-8")
            assert [w for w in words[1:] if w.startswith("-") and f'"{w}"' not in source] == [], line
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), line
        else:
            assert (program, words[0]) == ("pip", "install"), line


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        path, _, anchor = target.partition("#")
        other = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert other.is_file(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:minidnn|models|kernels|bench|tests|docs)/[\w./-]*)`", TEXTS[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pictures_are_small_and_drawn_as_said() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*"))
    assert [p.name for p in pictures if p.stat().st_size > 200_000] == []
    text = "".join(TEXTS.values())
    assert [p.name for p in pictures if f"images/{p.name}" not in text] == []
    shown = [line for page in TEXTS.values() for block in blocks(page, "sh") for line in block.splitlines()]
    assert [command for command in DRAWN if command not in shown] == []


def test_every_command_is_listed() -> None:
    assert re.findall(r"^\| `minidnn (\w+)", README, re.MULTILINE) == list(COMMANDS)


def test_every_page_is_reached_from_readme() -> None:
    assert [name for name in PAGES if name != "README.md" and f"]({name})" not in README] == []


# -- generated parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_parts_are_what_the_result_files_give(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run: python bench/run_all.py --readme"


def test_every_part_is_on_a_page() -> None:
    marked = [name for path in GENERATED for _, name, _, _ in MARKED.findall(path.read_text(encoding="utf-8"))]
    assert sorted(marked) == sorted(PARTS)


def test_what_has_no_result_file_is_not_mentioned(tmp_path: Path) -> None:
    for path in GENERATED:
        for _, name, old, _ in MARKED.findall(path.read_text(encoding="utf-8")):
            text = f"<!-- results: {name} -->\n{old}<!-- end of {name} -->\n"
            assert rewritten(text, tmp_path) == f"<!-- results: {name} -->\n\n<!-- end of {name} -->\n"


def test_every_bench_is_a_step() -> None:
    programs = {p.stem for p in (ROOT / "bench").glob("*.py") if "__main__" in p.read_text(encoding="utf-8")}
    assert programs - {"run_all"} == {step.script for step in STEPS}
