"""Checkpoints: weights and optimizer state in safetensors, the rest in JSON, written so that none is ever half there.

`DIR/step-00000120/` holds `weights.safetensors` (PyTorch's names and layout, loadable anywhere),
`optimizer.safetensors` and `state.json`. A checkpoint is written beside its final name, synced and renamed; the two
newest are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidnn.errors import CheckpointError

KEPT = 2
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on exactly where it was."""

    weights: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]
    state: Mapping[str, Any]


def save(directory: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically. Raises CheckpointError (disk full, no permission); older ones stay."""
    from safetensors.numpy import save_file

    final = directory / f"step-{step:08d}"
    partial = directory / f".step-{step:08d}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*.partial"):  # by a process that was killed
            shutil.rmtree(left)
        partial.mkdir()
        for name, arrays in (("weights", checkpoint.weights), ("optimizer", checkpoint.optimizer)):
            contiguous = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
            save_file(contiguous, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(dict(checkpoint.state), indent=1) + "\n")
        for path in partial.iterdir():
            _sync(path)
        _put(partial, final)
        _sync(directory)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"checkpoint {final} cannot be written: {reason}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for _, old in _existing(directory)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _put(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; one that has it already goes only when this one is in its place."""
    if not final.exists():
        os.replace(partial, final)
        return
    old = partial.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(final, old)
    try:
        os.replace(partial, final)
    except BaseException:
        os.replace(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_newer(directory: Path, step: int) -> None:
    """Raises CheckpointError when a directory holds checkpoints of a later step than the run that will save there: it
    is another run's, whose checkpoints would be lost or taken for this one's."""
    existing = _existing(directory) if directory.is_dir() else []
    if existing and existing[-1][0] > step:
        raise CheckpointError(
            f"checkpoint directory {directory} has step {existing[-1][0]} of another run: resume that, or name another"
        )


def read(path: Path) -> Checkpoint:
    """Read a checkpoint: its own directory, or the newest in a directory of several. Raises CheckpointError."""
    if not (path / "state.json").exists():
        existing = _existing(path) if path.is_dir() else []
        if not existing:
            raise CheckpointError(f"checkpoint {path} does not exist; give a directory that --checkpoint wrote")
        path = existing[-1][1]
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path / 'state.json'} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path / 'state.json'} is no JSON object; it was not written by minidnn")
    return Checkpoint(
        read_weights(path / "weights.safetensors"), read_weights(path / "optimizer.safetensors"), state
    )


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Weights of a safetensors file by name (float32; half precisions are widened). Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy

        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CheckpointError(f"weights {path} do not exist") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"weights {path} are no readable safetensors file: {error}") from None
    wide = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64))
    return {name: a if a.dtype in wide else a.astype(np.float32) for name, a in arrays.items()}


def _existing(directory: Path) -> list[tuple[int, Path]]:
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return sorted(found)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
