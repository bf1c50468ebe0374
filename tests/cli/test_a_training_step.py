"""docs/a-training-step.md is what happens: its example enters these files, in this order, and calls these functions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.cli import ROOT
from tests.cli.pages import ENVIRONMENT, blocks

PAGE = (ROOT / "docs" / "a-training-step.md").read_text(encoding="utf-8")
FILE = re.compile(r"`(minidnn/[\w/]+\.py)`")
ITEM = re.compile(r"^\d+\. (.*(?:\n   .*)*)", re.MULTILINE)
COMPILED = ("minidnn/ops/host_loops.py", "minidnn/compiled.py")
"""Not every version of Python shows a profiler the calls of compiled functions, and they are compiled only once."""
TRACER = """
import importlib, json, os, pkgutil, sys, threading
import minidnn
for module in pkgutil.walk_packages(minidnn.__path__, "minidnn."):  # importing calls functions too: it comes first
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of CUDA
            pass
root = os.path.dirname(os.path.abspath(minidnn.__file__))
entered = {}
stopped = []
def watch(frame, event, argument):
    code = frame.f_code
    if event == "return" and code.co_name == "step" and code.co_filename.endswith("trainer.py"):
        stopped.append(True)
    if event == "call" and not stopped and code.co_filename.startswith(root):
        file = "minidnn" + code.co_filename[len(root):].replace(os.sep, "/")
        entered.setdefault(file, []).append(code.co_name)
code = compile(sys.argv[1], "example", "exec")
threading.setprofile(watch)
sys.setprofile(watch)
exec(code)
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(entered))
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """File -> names of the functions that ran in it, both in order of the first call."""
    (example,) = blocks(PAGE, "python")
    done = subprocess.run(
        [sys.executable, "-c", TRACER, example], capture_output=True, text=True, env=ENVIRONMENT,
        cwd=tmp_path_factory.mktemp("step"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found: Mapping[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_file_is_named_once_and_exists() -> None:
    files = FILE.findall(PAGE)
    assert sorted(files) == sorted(set(files))
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_list_is_the_order_in_which_a_step_first_enters_the_files(entered: Mapping[str, list[str]]) -> None:
    listed = [FILE.findall(item)[0] for item in ITEM.findall(PAGE)]
    order = [file for file in entered if file not in COMPILED]
    assert listed == order, f"new: {set(order) - set(listed)}, gone: {set(listed) - set(order)}; the order is {order}"


def test_functions_named_with_a_file_run_in_it(entered: Mapping[str, list[str]]) -> None:
    wrong = []
    for item in ITEM.findall(PAGE):
        file, *others = FILE.findall(item)
        assert not others
        wrong += [f"{name} in {file}" for name in re.findall(r"`(\w+)\(\)`", item) if name not in entered[file]]
    assert wrong == []
    free = re.findall(r"`(\w+)\(\)`", ITEM.sub("", PAGE).partition("## The step")[2])
    called = {name for names in entered.values() for name in names}
    assert [name for name in free if name not in called] == []


def test_items_are_numbered_from_one() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
