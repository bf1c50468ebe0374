"""Whole data sets: epochs of training with log, checkpoints and progress; evaluation.

One batch is in flight while the next is issued and the one after is loaded: three slots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Any

from minidnn import checkpoint as checkpoints
from minidnn.arguments import count, flag, is_count, sample_shape, shown
from minidnn.data.dataset import Data, Dataset
from minidnn.data.loader import Loader, batch_count
from minidnn.errors import ArgumentError, CheckpointError, MiniDnnError
from minidnn.nn.loss import CrossEntropyLoss
from minidnn.progress import bar
from minidnn.run.log import Log

if TYPE_CHECKING:
    from minidnn.run.slot import Pending
    from minidnn.run.trainer import FeedSlot, StepResult, Trainer


@dataclass
class Totals:
    """Running sums over batches; means are weighted by the batches' sample weights."""

    loss: float = 0.0
    weight: float = 0.0
    correct: int = 0
    rows: int = 0

    def add(self, result: StepResult, weight: float) -> None:
        """Take a batch in."""
        self.loss += result.loss * weight
        self.weight += weight
        self.correct += result.correct
        self.rows += result.rows

    @classmethod
    def saved(cls, sums: Any, rows: int) -> Totals | None:
        """Those that were saved, of so many rows; None where they cannot be."""
        found: dict[str, Any] = {f.name: sums.get(f.name) for f in fields(cls)} if isinstance(sums, dict) else {}
        if not found or not all(type(n) in (int, float) and abs(n) <= float_info.max for n in found.values()):
            return None
        whole = type(found["rows"]) is type(found["correct"]) is int
        counted = found["rows"] == rows and 0 <= found["correct"] <= rows
        weighed = found["weight"] > 0 if rows else found["weight"] == found["loss"] == 0
        return cls(**found) if whole and counted and weighed else None

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}_loss` and `{prefix}_accuracy`."""
        return {f"{prefix}_loss": self.loss / self.weight, f"{prefix}_accuracy": self.correct / self.rows}


@dataclass
class FitResult:
    """How a run ended: the last epoch's metrics, and whether it was stopped early by request. `steps` and `epochs`
    count from the run's beginning, `new_steps`, `seconds` and `images` from where it was resumed."""

    steps: int = 0
    new_steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    images: int = 0
    interrupted: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None

    @property
    def images_per_s(self) -> float:
        """Training throughput, evaluation excluded."""
        return self.images / self.seconds if self.seconds else 0.0


def fit(
    trainer: Trainer, data: Data | Dataset, epochs: int = 1, *, steps: int | None = None, shuffle: bool = True,
    log: str | Path | None = None, checkpoint: str | Path | None = None, checkpoint_every: int | None = None,
    resume: str | Path | None = None, evaluate_epochs: bool = True, progress: bool = False,
    on_begin: Callable[[], None] | None = None, on_epoch: Callable[[int, dict[str, float]], None] | None = None,
) -> FitResult:  # fmt: skip
    """Train for `epochs` passes, or until `steps` updates are done, whichever is first.

    `log` appends one JSON object a step and epoch. `checkpoint` is a directory: written at the end of each epoch, every
    `checkpoint_every` steps, and when `trainer.stop_requested` ends the run after an iteration. `resume` goes on from
    such a directory, bit-exactly, data order included; `epochs` and `steps` then count from that run's beginning.
    `on_begin` is called when nothing is left that could be refused, `on_epoch` with each epoch's number and metrics.
    A non-finite loss or weight raises NonFiniteLoss and is never saved.
    """
    for name, value in (("epochs", epochs), ("steps", steps), ("checkpoint_every", checkpoint_every)):
        if not is_count(value) and (value is not None or name == "epochs"):
            raise ArgumentError(f"{name} is {shown(value)}; it must be an int of 1 or more")
    shuffle, progress = flag(shuffle, "shuffle"), flag(progress, "progress")
    evaluate_epochs = flag(evaluate_epochs, "evaluate_epochs")
    if on_begin is not None and not callable(on_begin):
        raise ArgumentError(f"on_begin is {shown(on_begin)}; it must be a function without arguments")
    if on_epoch is not None and not callable(on_epoch):
        raise ArgumentError(f"on_epoch is {shown(on_epoch)}; it must be a function of an epoch and its metrics")
    directory = _path("checkpoint", checkpoint)
    if checkpoint_every is not None and directory is None:
        raise ArgumentError(f"checkpoint_every is {checkpoint_every}, but checkpoint is None; name a directory")
    run = _Run(trainer, _as_data(data), epochs, steps, shuffle, directory, checkpoint_every)
    with checkpoints.taken(directory) if directory is not None else nullcontext():
        with trainer.turn.taken():
            run.begin(_path("resume", resume))
        place = _path("log", log)
        stream = None if place is None else Log(place)
        try:
            if on_begin is not None:
                on_begin()
            return run.train(stream, evaluate_epochs, progress, on_epoch)
        finally:
            if stream is not None:
                stream.close()


def evaluate(trainer: Trainer, data: Data | Dataset) -> dict[str, float]:
    """Mean loss and accuracy over the test set (of `Data`; a `Dataset` as it is): `test_loss`, `test_accuracy`."""
    dataset = (data.test or data.train) if isinstance(data, Data) else _dataset(data)
    totals = Totals()
    with trainer.turn.taken():
        trainer.check_usable()
        _check_data(trainer, dataset)
        _announce(trainer, dataset, train=False)
        with Loader(dataset, trainer.batch, trainer._slots, shuffle=False) as batches:
            for slot, rows in batches:
                try:
                    result = trainer.settle(trainer.issue(slot.batch, rows, train=False))
                    totals.add(result, _weight(trainer, slot, rows))
                finally:
                    slot.release()
    return totals.metrics("test")


@dataclass
class _Run:
    trainer: Trainer
    data: Data
    epochs: int
    steps: int | None
    shuffle: bool
    checkpoint: Path | None
    checkpoint_every: int | None
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    totals: Totals = field(default_factory=Totals)  # of them
    choices: int = 0  # of compression, that the log has
    result: FitResult = field(default_factory=FitResult)

    def begin(self, resume: Path | None) -> None:
        """Refuse now what would fail later, and turn to where the run goes on."""
        trainer = self.trainer
        trainer.check_usable()
        for dataset, train in ((self.data.train, True), (self.data.test, False)):
            if dataset is not None:
                _check_data(trainer, dataset)
                _announce(trainer, dataset, train)
        if resume is not None:
            self.resume(resume)
        else:
            self.epoch = trainer.epoch_count
            self.epochs += trainer.epoch_count
            self.steps = None if self.steps is None else self.steps + trainer.step_count
        if self.checkpoint is not None:
            checkpoints.refuse_newer(self.checkpoint, trainer.step_count)

    def train(
        self, log: Log | None, evaluate_epochs: bool, progress: bool,
        on_epoch: Callable[[int, dict[str, float]], None] | None,
    ) -> FitResult:  # fmt: skip
        """The epochs."""
        trainer, begun = self.trainer, self.trainer.step_count
        while self.epoch < self.epochs and not self._enough and not trainer.stop_requested:
            with trainer.turn.taken():
                self._epoch(log, progress)
            if self.batch < self._batches:
                self.result.metrics = self.totals.metrics("train") if self.totals.rows else {}
                break  # stopped, or enough steps: the epoch is not complete
            metrics = self.totals.metrics("train")
            self.epoch, self.batch, self.totals = self.epoch + 1, 0, Totals()
            trainer.pull()  # whatever happens in the next epoch, this one's weights are safe
            if self.checkpoint is not None:
                self.save()  # first: test images or a log that fail, or a reader that has gone, must not cost the epoch
            if evaluate_epochs and self.data.test is not None:
                metrics |= evaluate(trainer, self.data)
            self.result.metrics = metrics
            _write(log, {"epoch": self.epoch, **metrics, "images_per_s": self.result.images_per_s})
            if on_epoch:
                on_epoch(self.epoch, metrics)
        self.result.interrupted, trainer.stop_requested = trainer.stop_requested, False
        if self.checkpoint is not None and self.batch:
            self.save()
        trainer.epoch_count = self.epoch + (1 if self.batch else 0)
        self.result.steps, self.result.epochs = trainer.step_count, self.epoch
        self.result.new_steps = trainer.step_count - begun
        return self.result

    @property
    def _batches(self) -> int:
        return batch_count(len(self.data.train), self.trainer.batch)

    @property
    def _enough(self) -> bool:
        return self.steps is not None and self.trainer.step_count >= self.steps

    def _epoch(self, log: Log | None, wanted: bool) -> None:
        """Train until the epoch ends, enough steps are done, or a stop is requested."""
        trainer, totals = self.trainer, self.totals
        loader = Loader(
            self.data.train, trainer.batch, trainer._slots, shuffle=self.shuffle, seed=trainer.seed,
            epoch=self.epoch, start_batch=self.batch,
        )  # fmt: skip
        pending: list[tuple[Pending, FeedSlot]] = []
        began = time.perf_counter()
        done = bar(f"epoch {self.epoch + 1}", len(loader), wanted)

        def settle() -> None:
            issued, slot = pending.pop(0)
            try:
                result = trainer.settle(issued)
                totals.add(result, _weight(trainer, slot, result.rows))
            finally:
                slot.release()
            self.result.images += result.rows
            record = {"step": result.step, "loss": result.loss, "accuracy": result.accuracy, "rows": result.rows}
            _write(log, record)
            done.set_postfix(loss=f"{result.loss:.4f}", refresh=False)
            done.update()

        try:
            with loader as batches:
                for slot, rows in batches:
                    try:
                        issued = trainer.issue(slot.batch, rows)
                    except BaseException:
                        slot.release()
                        raise
                    pending.append((issued, slot))
                    self._write_choices(log)
                    self.batch += 1
                    if len(pending) > 1:
                        settle()
                    if trainer.stop_requested or self._enough:
                        break
                    due = self.checkpoint_every and trainer.step_count % self.checkpoint_every == 0
                    if self.checkpoint is not None and due and self.batch < self._batches:
                        while pending:
                            settle()
                        self.save()
                while pending:
                    settle()
        except BaseException:
            for issued, slot in pending:
                if not trainer.failed:  # else nobody fills slots any more; the device may still read this one
                    with suppress(MiniDnnError):
                        trainer.settle(issued)
                slot.release()
            raise
        finally:
            done.close()
            self.result.seconds += time.perf_counter() - began

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        trainer = self.trainer
        state = {
            "step": trainer.step_count, "epoch": self.epoch, "batch": self.batch, **self._same,
        }  # fmt: skip
        if self.totals.rows == self.batch * trainer.batch:  # else it went on from one of an older version
            state["totals"] = asdict(self.totals)
        content = checkpoints.Checkpoint(trainer.state_dict(), trainer.optimizer_state(), state)
        assert self.checkpoint is not None
        self.result.checkpoint = checkpoints.save(self.checkpoint, trainer.step_count, content)

    @property
    def _same(self) -> dict[str, Any]:
        """What must be as it was for a resumed run to give the same bits."""
        trainer = self.trainer
        return {
            "seed": trainer.seed, "batch_size": trainer.batch, "micro_batch": trainer.micro_batch,
            "shuffle": self.shuffle, "precision": trainer.target.precision, "samples": len(self.data.train),
        }  # fmt: skip

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        trainer, found = self.trainer, checkpoints.read(path)
        path = checkpoints.find(path)  # that it is in, where `path` has several
        for key, own in self._same.items():
            if found.state.get(key) != own:
                raise CheckpointError(
                    f"checkpoint {path} has {key} {found.state.get(key)}; this run has {own}: use the same to resume"
                )
        counts = [int(n) for key in ("step", "epoch", "batch") if is_count(n := found.state.get(key), 0)]
        # Each epoch had a step or more, and each batch of this one was a step.
        if len(counts) < 3 or counts[2] >= self._batches or counts[1] + counts[2] > counts[0]:
            raise CheckpointError(
                f"checkpoint {path} does not say where it stopped; move it elsewhere to resume the one before it"
            )
        totals: Totals | None = Totals()  # those of older versions have none
        if "totals" in found.state:
            totals = Totals.saved(found.state["totals"], counts[2] * trainer.batch)  # only the last batch is partial
        if totals is None:
            raise CheckpointError(
                f"checkpoint {path} has no sums of its epoch; move it elsewhere to resume the one before it"
            )
        with _naming(path / "weights.safetensors"):
            weights = trainer.net.matching(found.weights)  # both are refused before either is taken
        with _naming(path / "optimizer.safetensors"):
            trainer.load_optimizer_state(found.optimizer)
        trainer.net.load_state_dict(weights)
        trainer.step_count, self.epoch, self.batch = counts
        self.totals = totals

    def _write_choices(self, log: Log | None) -> None:
        """What `auto` has compressed from here on, where that has changed."""
        choices = self.trainer.adaptive.choices if self.trainer.adaptive else []
        for choice in choices[self.choices :]:
            _write(log, choice.as_dict())
        self.choices = len(choices)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A checkpoint's file in front of what is wrong with its arrays."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _write(log: Log | None, record: dict[str, Any]) -> None:
    if log is not None:
        log.write(record)


def _path(argument: str, value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise ArgumentError(f"{argument} is {shown(value)}; it must be a path")
    return Path(value)


def _as_data(data: Data | Dataset) -> Data:
    return data if isinstance(data, Data) else Data("data", _dataset(data))


def _dataset(data: Dataset) -> Dataset:
    if not all(hasattr(data, name) for name in ("read", "input_shape", "classes", "__len__")):
        raise ArgumentError(f"data is {shown(data)}; give what open_data or from_arrays return, or a Dataset")
    return data


def _announce(trainer: Trainer, dataset: Dataset, train: bool) -> None:
    """Plan the last batch of a data set, where that is partial, so that it cannot break a budget."""
    if len(dataset) % trainer.batch:
        trainer.announce(len(dataset) % trainer.batch, train)


def _check_data(trainer: Trainer, dataset: Dataset) -> None:
    shape = sample_shape(dataset.input_shape, "data's input_shape")
    if shape != trainer.sample_shape:
        raise ArgumentError(
            f"data have images of {list(shape)}; "
            f"expected {list(trainer.sample_shape)}, which the network was set up for"
        )
    if not isinstance(trainer.loss, CrossEntropyLoss):
        raise ArgumentError("loss is not CrossEntropyLoss; data sets have class labels: use it, or trainer.step")
    classes = trainer._output_shape[1]
    if dataset.classes is not None and count(dataset.classes, "data's classes") > classes:
        raise ArgumentError(
            f"data have {dataset.classes} classes; "
            f"the network needs as many outputs, and has {classes}"
        )


def _weight(trainer: Trainer, slot: FeedSlot, rows: int) -> float:
    return 1.0 / trainer.loss.inverse_weight(slot.batch.array("labels")[:rows], (rows, *trainer._output_shape[1:]))
