"""`minidnn profile`, over a device without a GPU: what the file holds, and that simulation takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minidnn.cli import main
from minidnn.device.cuda import CudaDevice
from minidnn.profile.profile import Profile
from tests.cuda.fake import LINK, fake_cuda
from tests.cuda.support import why_no_emulator


@pytest.fixture
def opened() -> Iterator[None]:
    """The command opens the faked device."""
    reason = why_no_emulator()
    if reason:
        pytest.skip(reason)

    def open_fake(name: str, **options: Any) -> CudaDevice:
        return device

    with fake_cuda() as (device, _), patch("minidnn.cli.profile.open_device", open_fake):
        yield


def test_a_profile_has_every_op_and_the_link(opened: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    arguments = ["smallvgg", "--batch", "4", "--precision", "tf32"]
    assert main(["profile", *arguments, "-o", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    profile = Profile.load(file)
    assert profile.source.startswith("measured on Fake GPU, cuDNN 0.0.0, 20")
    assert (profile.link, profile.measured) == (LINK, True)
    assert profile.target is not None
    assert (profile.target.name, profile.target.layout) == ("native", "NHWC")
    assert profile.scratch_bytes == 32 * 2**20
    assert all(a.ms is not None for ways in profile.entries.values() for a in ways)
    assert said["entries"] == len(profile.entries)
    assert set(said["ms_by_kind"]) >= {"forward", "backward_data", "backward_filter", "update", "loss"}

    assert main(["simulate", *arguments, "--profile", str(file), "--modes", "base,vdnn++:all(m)", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["target"], told["profile"]) == ("native", profile.source)
    assert [row["fits"] for row in told["modes"]] == [True, True]
    assert all(row["peak_bytes"] > profile.scratch_bytes for row in told["modes"])

    assert main(["simulate", "smallvgg", "--batch", "4", "--profile", str(file)]) == 2
    assert "was measured at tf32: add --precision tf32" in capsys.readouterr().err


def test_what_cannot_be_profiled_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "smallvgg", "--device", "host", "-o", str(tmp_path / "p.json")]) == 2
    assert "--device is 'host'; it must be a CUDA device" in capsys.readouterr().err
    assert main(["profile", "smallvgg", "-o", str(tmp_path / "no" / "p.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
