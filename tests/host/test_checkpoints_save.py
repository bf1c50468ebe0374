"""Saving: when it is done, that a failure leaves the last checkpoint whole, and that NaNs are never saved."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidnn import checkpoint, optim
from minidnn.data import from_arrays
from minidnn.errors import ArgumentError, CheckpointError, NonFiniteLoss
from tests.host.saved import data, finished, state, trainer


def test_checkpoints_come_at_epochs_and_intervals_and_two_are_kept(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with trainer() as opened:
        opened.fit(
            data(), 2, checkpoint=tmp_path, checkpoint_every=3,
            on_epoch=lambda *_: seen.append(sorted(p.name for p in tmp_path.iterdir())),
        )  # fmt: skip
    assert seen == [["step-00000003", "step-00000004"], ["step-00000006", "step-00000008"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_who_may_read_a_checkpoint_is_for_the_umask_to_say(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with trainer() as opened:
            opened.fit(data(), 1, checkpoint=tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "step-00000004").iterdir()}
    assert modes == dict.fromkeys(("weights.safetensors", "optimizer.safetensors", "state.json"), mode)


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
from tests.host.saved import data, trainer
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
from tests.host.saved import data, trainer
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


def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
