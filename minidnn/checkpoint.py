"""Checkpoints: weights and optimizer state in safetensors, the rest in JSON, written so that none is ever half there.

`DIR/step-00000120/` holds `weights.safetensors` (PyTorch's names and layout, loadable anywhere),
`optimizer.safetensors` and `state.json`. A checkpoint is written beside its final name, synced and renamed; the two
newest are kept. What is being written, or on its way out, has a hidden name: `.step-00000120.partial` or `.old`. A run
has its directory to itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidnn.arguments import shown
from minidnn.errors import CheckpointError

KEPT = 2
VERSION = 1
_NAME = re.compile(r"step-(\d{1,18})|\.step-(\d{1,18})\.old")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on exactly where it was."""

    weights: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]
    state: Mapping[str, Any]


@contextmanager
def taken(directory: Path) -> Iterator[None]:
    """Have a directory, made where it is missing, for one run's checkpoints alone.

    Raises CheckpointError where it cannot be written, or while another run has it.
    """
    made: list[Path] = []
    try:
        made += [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        reason = "it is a file or a link" if isinstance(error, FileExistsError) else error.strerror
        _remove(made)
        raise CheckpointError(f"checkpoint directory {directory} cannot be written: {reason}; name another") from None
    try:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise CheckpointError(f"checkpoint directory {directory} cannot be written: no permission; name another")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"checkpoint directory {directory} is in use by another run; name another, or wait for its end"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
        _remove(made)


def _remove(made: list[Path]) -> None:
    """Where nothing was saved, leave nothing behind: of the folders that were made those that are empty."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


def save(directory: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically. Raises CheckpointError (disk full, no permission); older ones stay."""
    from safetensors.numpy import save_file

    final = directory / f"step-{step:08d}"
    partial = directory / f".step-{step:08d}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*.partial"):  # by a process that was killed
            shutil.rmtree(left)
        newest = _newest(directory)
        if newest is not None and newest.name.startswith("."):
            os.replace(newest, newest.with_name(newest.name[1:].removesuffix(".old")))
        partial.mkdir()
        state = {"version": VERSION, **checkpoint.state}
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        mode = stat.S_IMODE((partial / "state.json").stat().st_mode)  # by the umask
        for name, arrays in (("weights", checkpoint.weights), ("optimizer", checkpoint.optimizer)):
            contiguous = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
            path = partial / f"{name}.safetensors"
            save_file(contiguous, path)
            if stat.S_IMODE(path.stat().st_mode) != mode:  # safetensors may let its owner alone read what it writes
                path.chmod(mode)
        for path in partial.iterdir():
            _sync(path)
        _put(partial, final)
        _sync(directory)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"checkpoint {final} cannot be written: {reason}; name another directory") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in _existing(directory)[:-KEPT]:
        with suppress(OSError):
            os.replace(old, _hidden(old))  # first: a checkpoint with a name is whole
    for left in directory.glob(".step-*.old"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def _put(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; one that has it already goes only when this one is in its place."""
    old = _hidden(final)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(partial, final)
    except BaseException:
        if old.exists():
            os.replace(old, final)
        raise


def _hidden(path: Path) -> Path:
    """The name of a checkpoint that is on its way out."""
    return path.with_name(f".{path.name}.old")


def refuse_newer(directory: Path, step: int) -> None:
    """Raises CheckpointError when a directory holds checkpoints of a later step than the run that will save there:
    another run's, or this one's from before it went back; they would be lost, or taken for what is saved now."""
    newest = _newest(directory) if directory.is_dir() else None
    if newest is not None and _step(newest) > step:
        raise CheckpointError(
            f"checkpoint directory {directory} has step {_step(newest)}, later than this run's {step}: resume that, "
            "move it elsewhere, or name another directory"
        )


def read(path: Path) -> Checkpoint:
    """Read a checkpoint: its own directory, or the newest in a directory of several. Raises CheckpointError."""
    path = find(path)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is damaged ({error})"
        raise CheckpointError(
            f"checkpoint {path} has a state.json that cannot be read: {reason}; move it elsewhere to "
            "resume the one before it"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(
            f"checkpoint {path / 'state.json'} is no JSON object; give a directory that --checkpoint wrote"
        )
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has version {shown(state.get('version'))}; "
            f"this minidnn reads version {VERSION}: give a "
            "directory that its --checkpoint wrote"
        )
    try:
        return Checkpoint(
            _read_arrays(path / "weights.safetensors"), _read_arrays(path / "optimizer.safetensors"), state
        )
    except ValueError as error:
        raise CheckpointError(f"checkpoint {error}; move {path} elsewhere to resume the one before it") from None


def find(path: Path) -> Path:
    """A checkpoint's own directory: `path`, or the newest in it. Raises CheckpointError where there is none."""
    try:
        found = path if (path / "state.json").exists() else _newest(path) if path.is_dir() else None
    except OSError as error:  # no permission, or a name that no file system takes
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error.strerror}; give a directory that --checkpoint wrote"
        ) from None
    if found is None:
        what = "is a file" if path.is_file() else "has no checkpoint in it" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}; give a directory that --checkpoint wrote")
    return found


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Weights of a safetensors file by name (float32; half precisions are widened). Raises CheckpointError."""
    try:
        return _read_arrays(path)
    except ValueError as error:
        raise CheckpointError(f"weights {error}; give a file that safetensors wrote") from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `read_weights` returns. Raises ValueError, which says what is wrong with the file."""
    from safetensors import safe_open

    try:
        import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy

        path.open("rb").close()  # of a file without permission, safetensors says that there is none
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # of a damaged file, whatever its reader trips over first
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path} is no readable safetensors file ({reason})") from None
    for name, array in arrays.items():
        if array.dtype.kind == "c":
            raise ValueError(f"{path} has complex numbers in {name}")
    wide = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64))
    return {name: a if a.dtype in wide else a.astype(np.float32) for name, a in arrays.items()}


def _existing(directory: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((path for path in directory.glob("step-*") if _step(path) >= 0), key=_step)


def _newest(directory: Path) -> Path | None:
    """The newest checkpoint. A process that was killed while it replaced one of the same step may have left it under
    its hidden name alone; that it is whole is certain of the newest only."""
    hidden = [path for path in directory.glob(".step-*.old") if _step(path) >= 0]
    return max([*_existing(directory), *hidden], key=_step, default=None)  # of equals the first: the one with a name


def _step(path: Path) -> int:
    """The step of a checkpoint by its name; -1 of what is none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match and path.is_dir() else -1


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
