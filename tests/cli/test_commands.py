"""Help, JSON and silence of every command, and the commands that train nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from minidnn.cli import COMMANDS, main
from minidnn.cli.options import ORDERS, PLACEMENTS, PRECISIONS
from tests.cli import COMMAND, ROOT, json_of, minidnn, refuse, succeed


def test_help_lists_every_command() -> None:
    text = succeed("--help")
    assert all(f"\n    {name} " in text for name in COMMANDS)
    assert "example:\n  minidnn train" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_the_common_options(command: str) -> None:
    text = succeed(command, "--help")
    assert f"example:\n  minidnn {command}" in text
    assert "--json" in text
    assert "--quiet" in text


def test_no_command_prints_the_help_and_fails() -> None:
    done = minidnn()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: minidnn")


def test_version() -> None:
    from minidnn import __version__

    assert succeed("--version") == f"minidnn {__version__}\n"


def test_models_lists_name_input_and_parameters() -> None:
    text = succeed("models")
    assert any(line.split()[:3] == ["vgg16", "3x224x224", "138,357,544"] for line in text.splitlines())
    rows = {row["name"]: row for row in json_of("models")["models"]}
    assert rows["alexnet_tv"]["parameters"] == 61_100_840
    assert rows["smallnet"]["input_shape"] == [1, 8, 8]
    assert rows["vgg"]["options"]["extra"] == 0


def test_summary_of_a_model_with_options() -> None:
    found = json_of("summary", "vgg16:num_classes=10", "--batch", "4", "--input", "3x64x96")
    assert found["layers"][0]["output_shape"] == [4, 64, 64, 96]
    assert found["layers"][-1]["output_shape"] == [4, 10]
    assert found["input_shape"] == [3, 64, 96]
    assert found["total"]["parameters"] == sum(row["parameters"] for row in found["layers"])
    lines = [line.split() for line in succeed("summary", "vgg16").splitlines()]
    assert lines[1][:4] == ["features.0", "Conv2d", "1x64x224x224", "1,792"]


def test_summary_of_a_model_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from minidnn import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))\n")
    assert json_of("summary", f"{file}:net", "--input", "3x4x4")["total"]["parameters"] == 147
    assert "says no input shape; give --input CxHxW" in refuse("summary", f"{file}:net")


def test_info_says_what_there_is_and_what_cuda_lacks() -> None:
    found = json_of("info")
    assert found["host"]["cores"] >= 1
    assert found["host"]["memory_bytes"] > 0
    assert all(0 <= limit["left"] <= limit["value"] for limit in found["host"]["limits"])
    assert found["packages"]["numpy"]
    cuda = found["cuda"]
    assert bool(cuda["devices"]) == (cuda["problem"] is None)
    assert all("install" in sentence for sentence in cuda["missing"])
    assert all(sentence in succeed("info") for sentence in cuda["missing"])


@pytest.mark.parametrize("command", [["models"], ["summary", "smallnet"], ["info"]])
def test_quiet_prints_nothing(command: list[str]) -> None:
    assert succeed(*command, "--quiet") == ""


@pytest.mark.parametrize("command", ["models", "models --json", "--help", "train --help"])
def test_a_reader_that_has_gone_is_no_error(command: str) -> None:
    line = f"{' '.join(COMMAND)} {command} | true; exit ${{PIPESTATUS[0]}}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, env=buffered)
    assert (done.returncode, done.stderr) == (0, "")


def test_choices_on_the_command_line_are_those_of_the_library() -> None:
    from minidnn.graph import graph
    from minidnn.plan import plan
    from minidnn.run import choose

    assert graph.PRECISIONS == PRECISIONS
    assert plan.ORDERS == ORDERS
    assert choose.PLACEMENTS == PLACEMENTS


@pytest.mark.parametrize("figure", [float("inf"), float("nan")])
def test_what_json_cannot_hold_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figure: float
) -> None:
    monkeypatch.setattr("minidnn.cli.models.run", lambda args, console: {"figure": figure})
    assert main(["models", "--json"]) == 2
    said = "minidnn: models found a figure that JSON cannot hold; leave out --json to see it\n"
    assert capsys.readouterr() == ("", said)
