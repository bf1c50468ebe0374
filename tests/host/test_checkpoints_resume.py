"""Resuming: a resumed run gives the same bits; a checkpoint that is damaged or of another run is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minidnn import Trainer, checkpoint, nn, optim
from minidnn.data import Data
from minidnn.errors import CheckpointError, DataError
from tests.host.saved import BATCH, data, finished, state, trainer


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
    assert (result.steps, result.new_steps, result.epochs) == (12, 12 - stop, 3)
    assert [r for r in map(json.loads, part.read_text().splitlines()) if "step" in r] == log
    assert epochs(part) == epochs(tmp_path / "log.jsonl"), "the epoch that was cut in two counts all of its batches"


def epochs(log: Path) -> list[dict[str, float]]:
    """What a log says of each epoch, but for its speed."""
    found = [r for r in map(json.loads, log.read_text().splitlines()) if "epoch" in r]
    return [{key: value for key, value in record.items() if key != "images_per_s"} for record in found]


def test_an_epoch_is_saved_before_its_test_images_are_read(tmp_path: Path) -> None:
    class Broken:
        """Test images of which none can be read."""

        input_shape, classes = (1, 6, 6), 3

        def __len__(self) -> int:
            return 4

        def read(self, indices: Any, x_out: Any, y_out: Any) -> None:
            raise DataError("image 0 cannot be read")

    with trainer() as opened:
        with pytest.raises(DataError, match="image 0"):
            opened.fit(Data("noise", data().train, Broken()), 2, checkpoint=tmp_path)
        assert checkpoint.read(tmp_path).state["step"] == opened.step_count == 4


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
            said = r"has a state.json that cannot be read: it is damaged \(.*\); move it elsewhere to resume the one"
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
    with pytest.raises(CheckpointError, match=r"cut has complex numbers in w; give a file|no readable"):
        checkpoint.read_weights(tmp_path / "cut")  # an older safetensors does not know the type at all
    with pytest.raises(CheckpointError, match="Is a directory"):
        checkpoint.read_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s | {"seed": 6}, "has seed 6; this run has 5"),
        (lambda s: s | {"batch_size": 8}, "has batch_size 8; this run has 4"),
        (lambda s: s | {"micro_batch": 2}, "has micro_batch 2; this run has 4"),
        (lambda s: s | {"samples": 100}, "has samples 100; this run has 16"),
        (lambda s: s | {"precision": "bf16"}, "has precision bf16; this run has fp32"),
        (lambda s: s | {"step": "x"}, "does not say where it stopped; move it elsewhere"),
        (lambda s: s | {"epoch": True}, "does not say where it stopped; move it elsewhere"),
        (lambda s: s | {"batch": 4}, "does not say where it stopped; move it elsewhere"),
        (lambda s: s | {"totals": {"loss": 1.0}}, "has no sums of its epoch; move it elsewhere"),
        (lambda s: s | {"totals": 3}, "has no sums of its epoch; move it elsewhere"),
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
    if "move" in sentence:
        sentence = f"{file.parent} {sentence}"  # that one, and not the folder with all of them
    with trainer() as opened, pytest.raises(CheckpointError, match=sentence):
        opened.fit(data(), 2, resume=tmp_path)


def test_checkpoints_of_another_optimizer_or_network_or_none_are_refused(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
        opened.fit(data(), 1, checkpoint=tmp_path)
    with trainer(optimizer=optim.SGD(0.1)) as opened, pytest.raises(CheckpointError, match="in what was saved alone"):
        opened.fit(data(), 4, resume=tmp_path)
    with trainer() as opened:
        with pytest.raises(CheckpointError, match="does not exist"):
            opened.fit(data(), 1, resume=tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="has step 8, later than this run's 0: resume that, move"):
            opened.fit(data(), 1, checkpoint=tmp_path)
        with pytest.raises(CheckpointError, match="has step 8, later than this run's 4: resume that, move"):
            opened.fit(data(), 4, resume=tmp_path / "step-00000004", checkpoint=tmp_path)


WRONG_SUMS = [
    *product(("loss", "weight", "rows", "correct"), ("NaN", "Infinity", "true", "null", '"1"', "[]", "1" + 400 * "0")),
    *((name, "-1") for name in ("weight", "rows", "correct")),
    *((name, "1.5") for name in ("rows", "correct")),
    ("rows", "7"), ("rows", "0"), ("correct", "9"), ("weight", "0"),
]  # fmt: skip
"""What the sums of two batches of 4 cannot be."""


def changed(folder: Path, steps: int, change: Callable[[dict[str, Any]], object]) -> None:
    """A run's checkpoint after some steps, whose state.json somebody has changed."""
    with trainer() as opened:
        opened.fit(data(), 1, steps=steps, checkpoint=folder)
    file = next(folder.glob("step-*/state.json"))
    saved = json.loads(file.read_text())
    change(saved)
    file.write_text(json.dumps(saved))


@pytest.mark.parametrize(("name", "value"), WRONG_SUMS)
def test_sums_that_cannot_be_are_refused(tmp_path: Path, name: str, value: str) -> None:
    changed(tmp_path, 2, lambda saved: saved["totals"].update({name: json.loads(value)}))
    with trainer() as opened, pytest.raises(CheckpointError, match="has no sums of its epoch; move it elsewhere"):
        opened.fit(data(), 2, resume=tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 1}, "has no sums of its epoch"),
        ({"batch": 0}, "has no sums of its epoch"),
        ({"batch": 3}, "does not say where it stopped"),
        ({"epoch": 1}, "does not say where it stopped"),
        ({"step": 1}, "does not say where it stopped"),
        ({"step": -1}, "does not say where it stopped"),
        ({"step": 10**400}, "does not say where it stopped"),
    ],
)
def test_a_place_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, int], sentence: str) -> None:
    changed(tmp_path, 2, lambda saved: saved.update(change))
    with trainer() as opened, pytest.raises(CheckpointError, match=f"{sentence}; move it elsewhere"):
        opened.fit(data(), 2, resume=tmp_path)


def test_a_checkpoint_of_an_older_version_has_no_sums_and_neither_have_those_of_its_epoch(tmp_path: Path) -> None:
    whole, _, _ = finished(tmp_path, epochs=2)
    changed(tmp_path / "saved", 1, lambda saved: saved.pop("totals"))
    for stop in (2, 3, 6, 8):
        with trainer() as opened:
            opened.fit(data(), 2, steps=stop, resume=tmp_path / "saved", checkpoint=tmp_path / "saved")
            ended = state(opened)
    assert ended == whole


WRONG = {"nan": np.nan, "infinite": -np.inf, "too large": 1e300}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("file", "name"), [("optimizer", "optimizer state 6.bias@m"), ("weights", "weight 6.bias")])
def test_arrays_without_finite_numbers_are_named_and_nothing_is_changed(
    tmp_path: Path, file: str, name: str, value: float
) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
    path = tmp_path / "step-00000004" / f"{file}.safetensors"
    arrays = dict(load_file(path))
    arrays[name.split()[-1]] = np.array([0, value, 0])
    save_file(arrays, path)
    with trainer() as opened:
        before = state(opened)
        said = rf"step-00000004/{file}\.safetensors: {name} has values that are no finite float32; use"
        with pytest.raises(CheckpointError, match=said):
            opened.fit(data(), 2, resume=tmp_path)
        assert (state(opened), opened.step_count) == (before, 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        *((np.array([0, wrong, 0]), "has values that are no finite float32; use") for wrong in WRONG.values()),
        (["a", "b", "c"], "must be an array of real numbers"),
        (np.ones(3, complex), "must be an array of real numbers"),
        (None, "must be an array of real numbers"),
        ([[1], [2, 3]], "must be an array of real numbers"),
        (np.ones((3, 1)), r"has shape \[3, 1\]; expected \[3\]"),
    ],
)
def test_optimizer_state_that_is_no_array_of_its_tensor_is_refused(value: object, sentence: str) -> None:
    with trainer() as opened:
        before = state(opened)
        wrong: dict[Any, Any] = {**opened.optimizer_state(), "6.bias@v": value}
        wrong["0.weight@m"] = wrong["0.weight@m"] + 1  # comes before it, and is not taken either
        with pytest.raises(CheckpointError, match=f"optimizer state 6.bias@v {sentence}"):
            opened.load_optimizer_state(wrong)
        with pytest.raises(CheckpointError, match="optimizer state does not fit"):
            opened.load_optimizer_state(wrong | {5: 5, None: 0})
        assert state(opened) == before


def test_a_refused_resume_changes_nothing(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
    with trainer(optimizer=optim.SGD(0.1)) as opened:
        before = state(opened)
        with pytest.raises(CheckpointError, match="optimizer state does not fit"):
            opened.fit(data(), 2, resume=tmp_path)
        assert (state(opened), opened.step_count) == (before, 0)
    other = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), input_shape=(1, 6, 6))
    with Trainer(other, nn.CrossEntropyLoss(), optim.Adam(0.01), BATCH, device="host", seed=5) as opened:
        before = state(opened)
        with pytest.raises(CheckpointError, match="weights do not fit the network"):
            opened.fit(data(), 2, resume=tmp_path)
        assert (state(opened), opened.step_count) == (before, 0)


@pytest.mark.parametrize("name", ["weights", "optimizer"])
def test_in_place_of_a_damaged_checkpoint_the_one_before_it_is_resumed(tmp_path: Path, name: str) -> None:
    with trainer() as opened:
        for _ in range(2):
            opened.fit(data(), 1, checkpoint=tmp_path / "saved")
    newest = tmp_path / "saved" / "step-00000008"
    (newest / f"{name}.safetensors").write_bytes(b"\0" * 30)
    with trainer() as opened:
        said = rf"step-00000008/{name}.safetensors is no readable .*; move .*/step-00000008 elsewhere to"
        with pytest.raises(CheckpointError, match=said):
            opened.fit(data(), 4, resume=tmp_path / "saved")
    newest.rename(tmp_path / "elsewhere")
    with trainer() as opened:
        opened.fit(data(), 2, resume=tmp_path / "saved", checkpoint=tmp_path / "saved")
        assert opened.step_count == 8


def test_a_checkpoint_without_its_state_is_named(tmp_path: Path) -> None:
    with trainer() as opened:
        opened.fit(data(), 1, checkpoint=tmp_path)
    (tmp_path / "step-00000004" / "state.json").unlink()
    with trainer() as opened, pytest.raises(CheckpointError, match=r"00000004 has a state\.json that cannot be"):
        opened.fit(data(), 2, resume=tmp_path)


@pytest.mark.parametrize("reason", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_what_the_machine_says_of_a_file_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: OSError
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise reason

    for name in ("open", "exists", "stat"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(CheckpointError, match=f"no readable safetensors file .{reason.strerror}.; give a file"):
        checkpoint.read_weights(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=f"cannot be read: {reason.strerror}; give a directory"):
        checkpoint.read(tmp_path / "saved")
