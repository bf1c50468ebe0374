"""Checkpoints: a resumed run gives the same bits, and whatever goes wrong while saving leaves the last one whole."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidnn import Trainer, checkpoint, nn, optim
from minidnn.data import Data, from_arrays
from minidnn.errors import ArgumentError, CheckpointError, NonFiniteLoss
from minidnn.run.loop import FitResult

BATCH = 4


def network() -> nn.Sequential:
    """Statistics, dropout and momentum: all that a resumed run must find again."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(27, 3), input_shape=(1, 6, 6),
    )  # fmt: skip


def data(samples: int = 22, test: int = 6) -> Data:
    """Random images; the last batch of an epoch is partial."""
    rng = np.random.default_rng(1)
    return from_arrays(
        "noise", (rng.standard_normal((samples, 1, 6, 6)).astype(np.float32), np.arange(samples) % 3), test_samples=test
    )


def trainer(**options: Any) -> Trainer:
    """A trainer on the host."""
    settings = {"device": "host", "seed": 5, **options}
    return Trainer(network(), nn.CrossEntropyLoss(), settings.pop("optimizer", optim.Adam(0.01)), BATCH, **settings)


def state(opened: Trainer) -> dict[str, bytes]:
    """Weights, statistics and optimizer state."""
    return {name: value.tobytes() for name, value in (opened.state_dict() | opened.optimizer_state()).items()}


def finished(folder: Path, **options: Any) -> tuple[dict[str, bytes], list[dict[str, Any]], FitResult]:
    """State, log of the steps and result of a fit."""
    log = folder / "log.jsonl"
    settings = {"log": log, **options}
    with trainer() as opened:
        result = opened.fit(data(), **settings)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return state(opened), [r for r in records if "step" in r], result


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("memory", ["base", "vdnn++:all(m)"])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, stop: int, memory: str) -> None:
    whole, log, _ = finished(tmp_path, epochs=3)
    part = tmp_path / "part.jsonl"
    with trainer(memory=memory) as opened:
        opened.fit(data(), 3, steps=stop, checkpoint=tmp_path / "saved", log=part)
    with trainer(memory=memory) as opened:
        result = opened.fit(data(), 3, resume=tmp_path / "saved", checkpoint=tmp_path / "saved", log=part)
        assert state(opened) == whole
    assert (result.steps, result.epochs) == (12, 3)
    assert [r for r in map(json.loads, part.read_text().splitlines()) if "step" in r] == log


def test_a_run_that_is_asked_to_stop_finishes_the_iteration_and_resumes(tmp_path: Path) -> None:
    whole, _, _ = finished(tmp_path, epochs=3)

    class Interrupting:
        """Data whose seventh batch brings the request to stop, as a signal handler would."""

        def __init__(self, opened: Trainer) -> None:
            self.opened, self.inner, self.reads = opened, data().train, 0
            self.input_shape, self.classes = self.inner.input_shape, self.inner.classes

        def __len__(self) -> int:
            return len(self.inner)

        def read(self, indices: Any, x_out: Any, y_out: Any) -> None:
            self.reads += 1
            self.opened.stop_requested = self.opened.stop_requested or self.reads == 7
            self.inner.read(indices, x_out, y_out)

    with trainer() as opened:
        result = opened.fit(Data("noise", Interrupting(opened), data().test), 3, checkpoint=tmp_path / "saved")
        assert result.interrupted
        assert 0 < result.steps < 12
        assert result.checkpoint is not None
        assert checkpoint.read(result.checkpoint).state["step"] == result.steps == opened.step_count
        assert not opened.stop_requested  # the request is served: the next fit runs
    with trainer() as opened:
        assert not opened.fit(data(), 3, resume=tmp_path / "saved").interrupted
        assert state(opened) == whole


def test_checkpoints_come_at_epochs_and_intervals_and_two_are_kept(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with trainer() as opened:
        opened.fit(
            data(), 2, checkpoint=tmp_path, checkpoint_every=3,
            on_epoch=lambda *_: seen.append(sorted(p.name for p in tmp_path.iterdir())),
        )  # fmt: skip
    assert seen == [["step-00000003", "step-00000004"], ["step-00000006", "step-00000008"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "pathlib.Path.write_text", "pathlib.Path.mkdir"])
def test_a_full_disk_at_any_point_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        saved = state(opened)
        with monkeypatch.context() as patch:
            patch.setattr(call, full_disk)
            with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device"):
                opened.fit(data(), 1, checkpoint=tmp_path)
        weights = opened.state_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
    assert all((opened.net.state_dict()[name] == value).all() for name, value in weights.items())
    with trainer() as opened:
        opened.fit(data(), 1, resume=tmp_path)
        assert state(opened) == saved


def test_a_checkpoint_that_replaces_its_own_step_survives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = checkpoint.Checkpoint({"w": np.ones(3, np.float32)}, {}, {"step": 1})
    checkpoint.save(tmp_path, 1, content)
    replace, calls = os.replace, iter(range(10))

    def second_fails(source: Path, target: Path) -> None:
        if next(calls) == 1:
            full_disk()
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path, 1, checkpoint.Checkpoint({"w": np.zeros(3, np.float32)}, {}, {"step": 1}))
    assert (checkpoint.read(tmp_path).weights["w"] == 1).all()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(tmp_path, 1, checkpoint.Checkpoint({"w": np.zeros(3, np.float32)}, {}, {"step": 1}))
    assert (checkpoint.read(tmp_path).weights["w"] == 0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@contextmanager
def tiny_files() -> Iterator[None]:
    """The system writes no file beyond 500 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_the_system_really_refuses_to_write_is_said_so(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        with tiny_files(), pytest.raises(CheckpointError, match=r"cannot be written: .*File too large"):
            opened.fit(data(), 1, checkpoint=tmp_path)
    assert checkpoint.read(tmp_path).state["step"] == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with trainer() as opened, pytest.raises(CheckpointError, match=r"file/saved cannot be written: Not a directory"):
        opened.fit(data(), 1, checkpoint=tmp_path / "file" / "saved")


def test_a_process_killed_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    program = f"""
import os, signal, safetensors.numpy
from pathlib import Path
from tests.host.test_checkpoints import data, trainer
save, count = safetensors.numpy.save_file, iter(range(100))
def dying(arrays, path):
    save(arrays, path)
    if next(count) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
safetensors.numpy.save_file = dying
trainer().fit(data(), 3, checkpoint=Path({str(tmp_path)!r}))
"""
    root = Path(__file__).parents[2]
    died = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, cwd=root)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-00000008.partial", "step-00000004"]
    whole, _, _ = finished(tmp_path, epochs=2, log=tmp_path / "log.jsonl")
    with trainer() as opened:
        opened.fit(data(), 2, resume=tmp_path, checkpoint=tmp_path)
        assert state(opened) == whole
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize("dies_before", [1, 2])
def test_a_process_killed_while_replacing_a_checkpoint_leaves_one_whole(tmp_path: Path, dies_before: int) -> None:
    """The only checkpoint is written again, at the same step: the process dies with it under its hidden name alone, or
    with both there."""
    program = f"""
import os, shutil, signal, sys
from pathlib import Path
from tests.host.test_checkpoints import data, trainer
where = Path({str(tmp_path)!r})
trainer().fit(data(), 1, checkpoint=where)
replace, count = os.replace, iter(range(100))
def dying(source, target):
    if next(count) == {dies_before}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = dying
shutil.rmtree = lambda path, **_: os.kill(os.getpid(), signal.SIGKILL) if Path(path).exists() else None
again = trainer()
again.fit(data(), 1, steps=4, resume=where)
from minidnn import checkpoint
checkpoint.save(where, 4, checkpoint.read(where))
"""
    root = Path(__file__).parents[2]
    died = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, cwd=root)
    assert died.returncode == -signal.SIGKILL, died.stderr
    names = {".step-00000004.old", "step-00000004" if dies_before == 2 else ".step-00000004.partial"}
    assert {p.name for p in tmp_path.iterdir()} == names
    whole, _, _ = finished(tmp_path, epochs=2, log=tmp_path / "log.jsonl")
    with trainer() as opened:
        opened.fit(data(), 2, resume=tmp_path, checkpoint=tmp_path)
        assert state(opened) == whole
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step-00000004", "step-00000008"]


def test_an_old_checkpoint_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, **kwargs: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    content = checkpoint.Checkpoint({"w": np.ones(3, np.float32)}, {}, {})
    for step in (1, 2):
        checkpoint.save(tmp_path, step, content)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 3, content)
    names = [".step-00000001.old", "step-00000002", "step-00000003"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    checkpoint.save(tmp_path, 4, content)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    busy = "is in use by another run; name another, or wait for its end"

    def second(epoch: int, metrics: dict[str, float]) -> None:
        with trainer() as other, pytest.raises(CheckpointError, match=busy):
            other.fit(data(), 1, checkpoint=tmp_path)

    with trainer() as opened:
        opened.fit(data(), 2, checkpoint=tmp_path, on_epoch=second)
        opened.fit(data(), 1, checkpoint=tmp_path)  # free again
    assert checkpoint.read(tmp_path).state["step"] == 12


def test_what_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with trainer() as opened:
        with pytest.raises(CheckpointError, match="file cannot be written: it is a file"):
            opened.fit(data(), 1, checkpoint=tmp_path / "file")
        with pytest.raises(CheckpointError, match="cannot be written: File name too long"):
            opened.fit(data(), 1, checkpoint=tmp_path / ("x" * 300))
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(CheckpointError, match="new cannot be written: no permission; name another"):
            opened.fit(data(), 1, checkpoint=tmp_path / "new")
        for wrong in ("", 5, b"x"):
            with pytest.raises(ArgumentError, match=r"checkpoint is .*; it must be a path"):
                opened.fit(data(), 1, checkpoint=wrong)
        with pytest.raises(ArgumentError, match="checkpoint_every is 2, but checkpoint is None; name a directory"):
            opened.fit(data(), 1, checkpoint_every=2)
        assert opened.step_count == 0
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_epoch_is_saved_before_it_is_told(tmp_path: Path) -> None:
    def gone(epoch: int, metrics: dict[str, float]) -> None:
        raise BrokenPipeError

    with trainer() as opened, pytest.raises(BrokenPipeError):
        opened.fit(data(), 1, checkpoint=tmp_path, on_epoch=gone)
    assert checkpoint.read(tmp_path).state["step"] == 4


def test_training_leaves_no_thread_behind() -> None:
    with trainer() as opened:
        opened.fit(data(), 1)
        opened.fit(data(), 1, progress=True)
    assert not [thread.name for thread in threading.enumerate() if "tqdm" in thread.name or "loader" in thread.name]


def test_a_damaged_state_or_weight_file_is_named(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        whole = (tmp_path / "step-00000004" / "weights.safetensors").read_bytes()
        for text in ("", "{", "[" * 100_000, "\udcff"):
            (tmp_path / "step-00000004" / "state.json").write_text(text, errors="surrogateescape")
            said = r"state.json cannot be read: it is damaged \(.*\); resume an older one"
            with pytest.raises(CheckpointError, match=said):
                opened.fit(data(), 1, resume=tmp_path)
    rng = np.random.default_rng(3)
    for keep in (0, 7, 8, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match="no readable safetensors file"):
            checkpoint.read_weights(tmp_path / "cut")
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(0, 400)] = rng.integers(0, 256)
        (tmp_path / "cut").write_bytes(damaged)
        with suppress(CheckpointError):  # some bytes are of names and numbers
            checkpoint.read_weights(tmp_path / "cut")
    header = json.dumps({"w": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "cut").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=r"cut have complex numbers in w; they must be real|no readable"):
        checkpoint.read_weights(tmp_path / "cut")  # an older safetensors does not know the type at all
    with pytest.raises(CheckpointError, match="Is a directory"):
        checkpoint.read_weights(tmp_path)


def test_a_loss_that_is_nan_is_never_saved(tmp_path: Path) -> None:
    images = np.ones((8, 1, 6, 6), np.float32)
    images[6] = np.nan
    poisoned = from_arrays("poisoned", (images, np.zeros(8, np.int64)), test_samples=0, classes=3)
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        with pytest.raises(NonFiniteLoss, match=r"the loss of step 5 is nan"):
            opened.fit(poisoned, 2, checkpoint=tmp_path, checkpoint_every=1, shuffle=False)
    last = checkpoint.read(tmp_path)
    assert last.state["step"] == 5
    assert all((opened.net.state_dict()[name] == value).all() for name, value in last.weights.items())
    for path in tmp_path.iterdir():
        assert all(np.isfinite(value).all() for value in checkpoint.read(path).weights.values())


def test_weights_that_are_nan_after_a_finite_loss_are_never_saved(tmp_path: Path) -> None:
    with trainer(optimizer=optim.SGD(1e39)) as opened:
        start = opened.state_dict()
        with pytest.raises(NonFiniteLoss, match=r"has NaN or infinite values after 1 steps"):
            opened.fit(data(3, 0), 1, checkpoint=tmp_path)
        assert all((opened.state_dict()[name] == value).all() for name, value in start.items())
    assert not list(tmp_path.iterdir())
    assert all((opened.net.state_dict()[name] == value).all() for name, value in start.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s | {"seed": 6}, "has seed 6; this run has 5"),
        (lambda s: s | {"batch_size": 8}, "has batch_size 8; this run has 4"),
        (lambda s: s | {"micro_batch": 2}, "has micro_batch 2; this run has 4"),
        (lambda s: s | {"samples": 100}, "has samples 100; this run has 16"),
        (lambda s: s | {"precision": "bf16"}, "has precision bf16; this run has fp32"),
        (lambda s: s | {"step": "x"}, "does not say where it stopped; resume an older one"),
        (lambda s: s | {"epoch": True}, "does not say where it stopped; resume an older one"),
        (lambda s: s | {"batch": 4}, "does not say where it stopped; resume an older one"),
        (lambda s: s | {"version": 2}, "has version 2; this minidnn reads version 1"),
        (lambda s: [s], "is no JSON object"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
    file = tmp_path / "step-00000004" / "state.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with trainer() as opened, pytest.raises(CheckpointError, match=sentence):
        opened.fit(data(), 2, resume=tmp_path)


def test_checkpoints_of_another_optimizer_or_network_or_none_are_refused(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        opened.fit(data(), 1, checkpoint=tmp_path)
    with trainer(optimizer=optim.SGD(0.1)) as opened, pytest.raises(CheckpointError, match="use the optimizer"):
        opened.fit(data(), 4, resume=tmp_path)
    with trainer() as opened:
        with pytest.raises(CheckpointError, match="does not exist"):
            opened.fit(data(), 1, resume=tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="has step 8 of another run"):
            opened.fit(data(), 1, checkpoint=tmp_path)
        with pytest.raises(CheckpointError, match="has step 8 of another run"):
            opened.fit(data(), 4, resume=tmp_path / "step-00000004", checkpoint=tmp_path)
    (tmp_path / "step-00000008" / "weights.safetensors").write_bytes(b"\x00" * 30)
    with trainer() as opened, pytest.raises(CheckpointError, match="no readable safetensors"):
        opened.fit(data(), 4, resume=tmp_path)


@pytest.mark.parametrize("reason", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_what_the_machine_says_of_a_file_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: OSError
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise reason

    for name in ("open", "exists", "stat"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(CheckpointError, match=f"no readable safetensors file .{reason.strerror}.; write it again"):
        checkpoint.read_weights(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=f"cannot be read: {reason.strerror}; give a directory"):
        checkpoint.read(tmp_path / "saved")
