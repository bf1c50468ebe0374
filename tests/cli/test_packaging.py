"""What `pip install` puts on a user's disk, and the command where nothing is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel, built from a copy of the project so that nothing stays behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    project = folder / "project"
    project.mkdir()
    for name in ("minidnn", "models", "kernels"):
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(project)], check=True, cwd=folder)
    return zipfile.Path(next(folder.glob("*.whl")))


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.Path) -> None:
    packed = set(wheel.root.namelist())
    package = ROOT / "minidnn"
    files = [path for folder in (package, package / "models", package / "kernels") for path in folder.rglob("*")]
    expected = {
        path.relative_to(ROOT).as_posix() for path in files if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - packed == set()
    assert {"minidnn/models/vgg.py", "minidnn/data/digits.npz", "minidnn/py.typed"} <= packed


def test_wheel_is_one_package_with_one_command(wheel: zipfile.Path) -> None:
    tops = {entry.name for entry in wheel.iterdir()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"minidnn"}
    info = next(entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    assert "minidnn = minidnn.cli:entry" in (info / "entry_points.txt").read_text()
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()


def test_outside_of_the_checkout_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minidnn", "summary", "vgg11", "--json"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "vgg11"
