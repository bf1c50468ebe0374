"""`--compress` and `--density` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import json_of, refuse, succeed

VGG = ("memory", "vgg11", "--batch", "8", "--mode", "vdnn++:all(m)")
TINY = ("smallvgg", "--data", "digits", "--batch", "32", "--device", "host")


def test_memory_says_what_compression_would_save() -> None:
    plain, packed = json_of(*VGG), json_of(*VGG, "--density", "0.3")
    assert plain["compress"] == "off"
    assert (plain["packed_bytes"], plain["density"], plain["ratio"], plain["compressed"]) == (None, None, None, [])
    assert plain["pinned_bytes"] == plain["pinned_raw_bytes"] == packed["pinned_raw_bytes"]
    assert packed["compress"] == "all"
    assert packed["pinned_bytes"] < 0.7 * packed["pinned_raw_bytes"]
    assert packed["density"] == pytest.approx(0.3)
    assert packed["packed_bytes"] == sum(t["packed_bytes"] for t in packed["compressed"])
    assert packed["ratio"] == pytest.approx(sum(t["raw_bytes"] for t in packed["compressed"]) / packed["packed_bytes"])
    assert packed["placed_bytes"] == plain["placed_bytes"]


def test_memory_reads_densities_by_tensor_or_layer(tmp_path: Path) -> None:
    first, second, third, *_ = json_of(*VGG, "--density", "0.3")["compressed"]
    file = tmp_path / "densities.json"
    file.write_text(json.dumps({first["tensor"]: 0.1, second["layer"]: 0.9}))
    found = {t["tensor"]: t for t in json_of(*VGG, "--density", str(file))["compressed"]}
    assert [found[t["tensor"]]["density"] for t in (first, second, third)] == [0.1, 0.9, 0.5]
    auto = json_of(*VGG, "--density", str(file), "--compress", "auto")["compressed"]
    assert second["tensor"] not in [t["tensor"] for t in auto]
    assert first["tensor"] in [t["tensor"] for t in auto]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not a JSON object; write densities by tensor or layer"),
        ("[1]", "is not a JSON object; write densities by tensor or layer"),
        ('{"nothing": 0.5}', "names 'nothing', which is no tensor or layer"),
        ('{"input": 1.5}', "it must be a number in [0, 1]"),
    ],
)  # fmt: skip
def test_bad_density_files_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "densities.json"
    file.write_text(content)
    assert reason in refuse(*VGG, "--density", str(file))


def test_bad_densities_and_compressions_are_refused() -> None:
    assert "--density is -0.1; it must be a number in [0, 1]" in refuse(*VGG, "--density=-0.1")
    assert "give a number from 0 to 1 or a JSON file" in refuse(*VGG, "--density", "half")
    assert "--compress: invalid choice: 'some'" in refuse(*VGG, "--compress", "some")


def test_simulate_predicts_time_and_cores() -> None:
    modes = ("simulate", "vgg11", "--batch", "16", "--gpu", "gtx1080ti", "--modes", "base(p),vdnn++:all(p)")
    base, offloaded = json_of(*modes, "--compress", "all", "--density", "0.4", "--check")["modes"]
    (_, plain) = json_of(*modes)["modes"]
    assert "compressed" not in base
    assert offloaded["pinned_raw_bytes"] == plain["pinned_bytes"] > offloaded["pinned_bytes"]
    assert offloaded["uncompressed_ms"] == pytest.approx(plain["iteration_ms"])
    assert offloaded["iteration_ms"] == pytest.approx(plain["iteration_ms"], rel=0.05)
    assert 0 < offloaded["cpu_share"] < 8
    assert set(offloaded["stall_ms"]) == {"offload", "prefetch", "memory", "codec"}


def test_compare_verifies_gradients_and_shows_densities() -> None:
    arguments = ("compare", *TINY, "--modes", "base,vdnn++:all", "--compress", "all", "--check")
    base, offloaded = json_of(*arguments)["modes"]
    assert base["gradient_sha256"] == offloaded["gradient_sha256"]
    assert offloaded["pinned_bytes"] < offloaded["pinned_raw_bytes"]
    assert offloaded["packed_bytes"] > 0
    assert 0 < offloaded["density"] < 1 < offloaded["ratio"]
    assert offloaded["uncompressed_ms"] > 0
    assert len(offloaded["compressed"]) == 9
    text = succeed(*arguments)
    assert "features.0.y" in text
    assert "uncompressed" in text


def test_train_reports_and_logs_what_auto_chooses(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    found = json_of(
        "train", *TINY, "--memory", "vdnn++:all", "--compress", "auto", "--steps", "3", "--log", str(log)
    )  # fmt: skip
    assert found["pinned_bytes"] < found["pinned_raw_bytes"]
    assert found["cpu_share"] > 0
    choices = [line for line in map(json.loads, log.read_text().splitlines()) if "compressed" in line]
    assert choices == found["choices"]
    assert choices[0]["step"] == 0
    assert {t["tensor"] for t in found["compressed"]} <= set(choices[-1]["compressed"])


def test_what_a_live_pool_cannot_do_without_compression_is_no_number() -> None:
    command = (
        "simulate", "smallnet", "--gpu", "k40", "--modes", "vdnn++:all(m)", "--fit", "high-end", "--placement", "live",
        "--compress", "all", "--budget", "2884096",
    )  # fmt: skip
    (row,) = json_of(*command)["modes"]
    assert row["fits"]
    assert row["iteration_ms"] > 0
    assert row["uncompressed_ms"] is None
    assert "-100.0 %" not in succeed(*command)
