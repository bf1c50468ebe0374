"""bench/compress.py on the host: its rows, which are those of `minidnn compare`, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compress import main

SMALL = ["--device", "host", "--networks", "smallvgg:8", "--precisions", "fp32", "--mode", "vdnn++:all(m)",
         "--steps", "2"]  # fmt: skip


def test_a_row_has_both_ways_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert "gradients bit-equal" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "compress-host.json").read_text())["rows"].values()
    assert row["pinned_bytes"] < row["pinned_raw_bytes"]
    assert min(row["iteration_ms"], row["uncompressed_ms"], row["cpu_share"]) > 0
    assert (row["matches_base"], row["network"], row["device"]) == (True, "smallvgg:8", "host")
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_what_compare_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="mode"):
        main([*SMALL, "--mode", "unheard", "--out", str(tmp_path)])
    assert not list(tmp_path.glob("*.json"))
