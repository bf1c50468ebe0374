"""`minidnn train`: what it reports, what it saves, how it stops, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from minidnn.checkpoint import read_weights
from tests.cli import COMMAND, ROOT, json_of, refuse, succeed

DIGITS = ("train", "smallnet", "--data", "digits", "--device", "host", "--batch", "128")


def weights(folder: Path) -> dict[str, bytes]:
    """The newest checkpoint's weights as bytes."""
    newest = max(folder.glob("step-*"))
    return {name: value.tobytes() for name, value in read_weights(newest / "weights.safetensors").items()}


def test_json_reports_accuracy_loss_speed_and_memory() -> None:
    found = json_of(*DIGITS, "--steps", "3")
    assert found["steps"] == 3
    assert 0 <= found["test_accuracy"] <= 1
    assert all(np.isfinite(found[name]) and found[name] > 0 for name in ("test_loss", "train_loss", "images_per_s"))
    assert found["peak_bytes"] > 4 * 30_890
    assert found["pinned_bytes"] == 0
    assert found["batch_slot_bytes"] >= 3 * 128 * 64 * 4


def test_text_reports_the_run_its_epochs_and_the_end() -> None:
    lines = succeed(*DIGITS, "--epochs", "2", "--lr", "0.05").splitlines()
    assert lines[0].startswith("smallnet (30,890 parameters) on digits (1437 images), batch 128, memory base, host")
    assert [line.split()[:2] for line in lines[1:3]] == [["epoch", "1"], ["epoch", "2"]]
    assert lines[3].startswith("24 steps in ")
    assert "test accuracy" in lines[3]


def test_quiet_trains_in_silence(tmp_path: Path) -> None:
    assert succeed(*DIGITS, "--steps", "1", "--quiet", "--checkpoint", str(tmp_path)) == ""
    assert weights(tmp_path)


def test_memory_modes_give_the_same_weights_and_other_peaks(tmp_path: Path) -> None:
    peaks = {}
    for number, mode in enumerate(("base(m)", "vdnn:all(m)", "vdnn++:conv(m)")):
        found = json_of(*DIGITS, "--steps", "3", "--memory", mode, "--checkpoint", str(tmp_path / str(number)))
        peaks[mode] = found["peak_bytes"]
        assert (found["pinned_bytes"] > 0) == mode.startswith("vdnn")
    assert peaks["vdnn:all(m)"] < peaks["base(m)"]
    assert weights(tmp_path / "0") == weights(tmp_path / "1") == weights(tmp_path / "2")


def test_a_model_file_trains_on_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "set.npz", x=rng.random((50, 2, 6, 6), np.float32), y=rng.integers(0, 3, 50))
    (tmp_path / "mine.py").write_text(
        "from minidnn import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    found = json_of("train", f"{tmp_path / 'mine.py'}:net:num_classes=3", "--data", str(tmp_path / "set.npz"),
                    "--batch", "20", "--epochs", "2", "--device", "host")  # fmt: skip
    assert found["steps"] == 6
    assert found["data"] == str(tmp_path / "set.npz")


def test_invented_data_suit_the_network() -> None:
    found = json_of("train", "smallnet:num_classes=7", "--batch", "64", "--steps", "1", "--device", "host")
    assert found["data"] == "synthetic"
    assert found["steps"] == 1


def test_log_has_one_object_per_step_and_epoch(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    succeed(*DIGITS, "--epochs", "1", "--log", str(log))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records[:-1]] == list(range(12))
    assert records[-1]["epoch"] == 1
    assert "test_accuracy" in records[-1]


def test_resume_goes_on_exactly(tmp_path: Path) -> None:
    rest = ("--optimizer", "adam", "--warmup", "4")
    succeed(*DIGITS, *rest, "--steps", "20", "--checkpoint", str(tmp_path / "whole"))
    succeed(*DIGITS, *rest, "--steps", "7", "--checkpoint", str(tmp_path / "parts"))
    found = json_of(*DIGITS, *rest, "--steps", "20", "--resume", str(tmp_path / "parts"))
    assert found["checkpoint"] == str(tmp_path / "parts" / "step-00000020")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def interrupt(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a long run that gets Ctrl-C in its first steps."""
    log = folder / "log.jsonl"
    command = [*COMMAND, *DIGITS, "--epochs", "10000", "--log", str(log), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            until = time.monotonic() + 60
            while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < until:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, err


def test_ctrl_c_finishes_the_iteration_saves_and_exits_130(tmp_path: Path) -> None:
    code, out, err = interrupt(tmp_path, "--json", "--checkpoint", str(tmp_path / "saved"))
    assert code == 130
    assert err == "minidnn: finishing this iteration; Ctrl-C again stops at once\n"
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["test_accuracy"] is None
    succeed(*DIGITS, "--steps", str(found["steps"]), "--checkpoint", str(tmp_path / "whole"))
    assert weights(tmp_path / "saved") == weights(tmp_path / "whole")


def test_a_run_without_checkpoint_stops_on_ctrl_c_too(tmp_path: Path) -> None:
    code, out, err = interrupt(tmp_path, "--quiet")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_nan_data_stop_the_run_and_leave_the_last_checkpoint(tmp_path: Path) -> None:
    x = np.random.default_rng(1).random((40, 1, 8, 8), np.float32)
    np.savez(tmp_path / "good.npz", x=x, y=np.arange(40) % 10)
    x[::2] = np.nan
    np.savez(tmp_path / "bad.npz", x=x, y=np.arange(40) % 10)
    run = ("train", "smallnet", "--device", "host", "--batch", "8", "--quiet")
    succeed(*run, "--data", str(tmp_path / "good.npz"), "--steps", "2", "--checkpoint", str(tmp_path / "saved"))
    before = weights(tmp_path / "saved")
    says = refuse(*run, "--data", str(tmp_path / "bad.npz"), "--epochs", "2", "--resume", str(tmp_path / "saved"))
    assert "the loss of step 2 is nan" in says
    assert weights(tmp_path / "saved") == before


def test_weights_load_by_name(tmp_path: Path) -> None:
    succeed(*DIGITS, "--epochs", "1", "--lr", "0.05", "--checkpoint", str(tmp_path))
    file = next(tmp_path.glob("step-*")) / "weights.safetensors"
    trained = json_of(*DIGITS, "--steps", "1", "--lr", "0", "--weights", str(file))
    fresh = json_of(*DIGITS, "--steps", "1", "--lr", "0")
    assert trained["train_loss"] < fresh["train_loss"] / 2
    says = refuse("train", "smallnet:width=16", "--data", "digits", "--weights", str(file))
    assert "weight features.0.weight has shape [32, 1, 3, 3]; expected [16, 1, 3, 3]" in says


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smallnet", "--batch", "0"], "--batch: '0' must be a whole number of at least 1"),
        (["smallnet", "--lr", "-1"], "--lr: '-1' must be a number of at least 0"),
        (["smallnet", "--lr", "nan"], "--lr: 'nan' must be a number"),
        (["smallnet", "--clip", "0"], "--clip: '0' must be a number above 0"),
        (["smallnet", "--momentum", "1.5"], "momentum is 1.5"),
        (["smallnet", "--epochs", "1", "--steps", "2"], "--steps: not allowed with argument --epochs"),
        (["smallnet", "--optimizer", "lion"], "--optimizer: invalid choice: 'lion' (choose from"),
        (["smallnet", "--schedule", "linear"], "--schedule is 'linear'; write constant, cosine"),
        (["smallnet", "--schedule", "0:0.1"], "--schedule is '0:0.1'"),
        (["smallnet", "--data", "nowhere"], "data 'nowhere' is no known name and no such file or directory exists"),
        (["vgg16", "--data", "digits"], "data 'digits' are images of 1x8x8, not 3x224x224"),
        (["smallnet:num_classes=4", "--data", "digits"], "data have 10 classes; the network needs as many outputs"),
        (["smallnet", "--memory", "magic"], "memory mode is 'magic'; write one of base, keep, vdnn, vdnn++"),
        (["smallnet", "--memory", "vdnn:some(p)"], "some"),
        (["smallnet", "--budget", "12 parsecs"], "'12 parsecs' is no size; write a number and a unit"),
        (["smallnet", "--budget", "10KiB"], "needs at least"),
        (["smallnet", "--device", "tpu"], "device is 'tpu'; it must be 'auto', 'host', 'cuda' or 'cuda:0'"),
        (["smallnet", "--fit", "tight"], "tight"),
        (["smallnet", "--micro-batch", "65"], "micro_batch is 65"),
        (["smallnet", "--seed", "-1"], "--seed: '-1' must be a whole number from 0 to 2^64 - 1"),
        (["smallnet", "--resume", "/nowhere"], "checkpoint /nowhere does not exist"),
        (["smallnet", "--weights", "/nowhere"], "weights /nowhere does not exist; give a file"),
        (["smallnet", "--log", "/nowhere/log"], "log /nowhere/log cannot be written"),
        (["smallnet", "--steps", "1", "--checkpoint", "/dev/null/x"], "cannot be written"),
    ],
)
def test_a_wrong_run_is_refused_in_one_sentence(arguments: list[str], says: str) -> None:
    assert says in refuse("train", *arguments, "--quiet")


def test_broken_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "idx").mkdir()
    for name, magic in (("train-images-idx3-ubyte", 2051), ("train-labels-idx1-ubyte", 2049)):
        (tmp_path / "idx" / name).write_bytes(magic.to_bytes(4, "big") + (60000).to_bytes(4, "big") + bytes(8))
    assert "train-" in refuse("train", "smallnet", "--input", "1x28x28", "--data", str(tmp_path / "idx"))
    (tmp_path / "weights").write_bytes(b"no safetensors")
    assert "no readable safetensors file" in refuse("train", "smallnet", "--weights", str(tmp_path / "weights"))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    succeed(*DIGITS, "--steps", "1", "--checkpoint", str(tmp_path))
    says = refuse(*DIGITS, "--steps", "2", "--seed", "1", "--resume", str(tmp_path), "--quiet")
    assert "has seed 0; this run has 1" in says
    says = refuse(*DIGITS, "--steps", "2", "--checkpoint", str(tmp_path), "--quiet")
    assert "has step 1, later than this run" in says
