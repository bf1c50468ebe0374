"""The trainer: a network, a loss, an optimizer and a memory mode on a device. A step: fill a slot, run the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from warnings import warn

import numpy as np

from minidnn.arguments import flag
from minidnn.data.loader import Slot
from minidnn.device.base import Device
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, NonFiniteLoss, add_note
from minidnn.graph.graph import Target
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer
from minidnn.plan.compress import report
from minidnn.plan.registry import parse_mode
from minidnn.profile.profile import Algorithm
from minidnn.run.adaptive import Adaptive
from minidnn.run.arguments import check_numbers, check_parts, checked_images, checked_labels, shape_for
from minidnn.run.choose import Options
from minidnn.run.executor import Executor
from minidnn.run.observe import GradientObserver
from minidnn.run.program import Programs, Purpose, Recipe
from minidnn.run.slot import BatchSlot, Pending, slot_fields
from minidnn.run.turn import Turn
from minidnn.run.weights import DeviceWeights
from minidnn.schedule.actions import COMPUTE, Schedule
from minidnn.units import parse_size

if TYPE_CHECKING:
    from minidnn.data.dataset import Data, Dataset
    from minidnn.run.loop import FitResult

SLOTS = 3


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one batch gave: mean loss, correct predictions (classification), rows. `step` counts updates from 0."""

    step: int
    loss: float
    correct: int
    rows: int

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return self.correct / self.rows


class FeedSlot(Slot):
    """A batch slot as the loader sees it: its input and labels."""

    def __init__(self, batch: BatchSlot) -> None:
        super().__init__(batch.array("input"), batch.array("labels"))
        self.batch = batch


class Trainer:
    """Trains `net` in a memory mode. A context manager; at its end the network has the newest weights. For one thread
    at a time, and not for what runs inside an iteration, such as a schedule: it refuses both.

    `batch` is the largest number of rows, `memory` a mode such as `"vdnn++:conv(p)"`, `budget` bytes of device memory
    (int or `"4GiB"`; None: what the mode needs), `device` `"auto"`, `"host"`, `"cuda"`, `"cuda:1"` or an open Device,
    `precision` fp32, tf32, bf16 (host also fp64), `target` "paper" or "native" (None: the device's).
    `micro_batch` rows at a time are computed, gradients summed, one update made. `max_norm` clips gradients.
    `algorithms` fixes those of some ops by name, whatever the mode's rule says. `graph` issues each training iteration
    as one CUDA graph (modes in which the host does nothing: base, keep, planners). `compress` "off", "all", "auto" (or
    offloaded tensors by name) packs what was copied out, into at most `packed_limit` bytes of pageable memory.

    Raises ShapeError naming a layer, BudgetError with the smallest budget that works, OutOfDeviceMemory and
    OutOfPinnedMemory before the first step.
    """

    def __init__(
        self, net: Sequential, loss: Loss, optimizer: Optimizer, batch: int, *, memory: str = "base",
        budget: int | str | None = None, device: str | Device = "auto", precision: str = "fp32",
        target: str | None = None, order: str = "prefetch-first", fit: str | None = None, placement: str = "planned",
        micro_batch: int | None = None, max_norm: float | None = None, seed: int = 0,
        input_shape: tuple[int, ...] | None = None, deterministic: bool = False,
        algorithms: Mapping[str, Algorithm] | None = None, graph: bool = False, compress: str | tuple[str, ...] = "off",
        packed_limit: int | str | None = None,
    ) -> None:  # fmt: skip
        check_parts(net, loss, optimizer, device)
        check_numbers(batch, micro_batch, max_norm, seed)
        deterministic, graph = flag(deterministic, "deterministic"), flag(graph, "graph")
        self.sample_shape = shape_for(net, input_shape)
        self.net, self.loss, self.optimizer = net, loss, optimizer
        self.batch, self.micro_batch, self.seed = int(batch), int(micro_batch or batch), int(seed)
        self.step_count = self.epoch_count = 0
        self.stop_requested = False
        self._failed = self._closed = self._changed = False
        self.turn = Turn()
        self._slots: list[FeedSlot] = []
        self._owns_device = isinstance(device, str)
        mode = parse_mode(memory)
        options = Options(
            order, fit, placement, None if budget is None else parse_size(budget, "budget"),
            algorithms={} if algorithms is None else algorithms, compress=compress,
        )  # fmt: skip
        limit = None if packed_limit is None else parse_size(packed_limit, "packed_limit")
        Target(target or "paper", precision)  # refuses other names before a device is opened
        self.device = (
            open_device(device, precision=precision, deterministic=deterministic) if isinstance(device, str) else device
        )
        try:
            if graph and not self.device.captures:
                raise ArgumentError(f"graph is True; device {self.device.name} has no CUDA graphs: use device='cuda'")
            self.target = self.device.target_for(precision, target)
            parts = self.micro_batch < batch
            recipe = Recipe(
                net, loss, optimizer, self.target, mode, options, self.sample_shape, parts, max_norm, graph
            )
            self.programs = Programs(self.device, recipe, self.micro_batch, self._first_purposes(), limit)
            self._open()
            self.adaptive = Adaptive(self.programs, self.schedule) if compress == "auto" else None
        except BaseException:
            self._failed = True
            self.close()
            raise

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _first_purposes(self) -> list[Purpose]:
        if self.micro_batch == self.batch:
            return [Purpose(train=True), Purpose(train=False)]
        return [
            Purpose(train=True, accumulate=True), Purpose(train=True, update=False),
            Purpose(train=True, accumulate=True, update=False), Purpose(train=True), Purpose(train=False),
        ]  # fmt: skip

    def _open(self) -> None:
        self.net.initialize(self.seed)  # after planning: what does not fit costs no drawing of weights
        graph = self.programs.schedules[(Purpose(train=False), self.micro_batch)].graph  # its output is predict's
        parts = -(-self.batch // self.micro_batch)
        self._output_shape = self.net.infer((self.batch, *self.sample_shape))
        labels = self.loss.label_shape(self._output_shape)
        fields = slot_fields(graph, labels, self.loss.label_dtype, self.batch, parts)
        for _ in range(SLOTS):
            self._slots.append(FeedSlot(BatchSlot(self.device, fields)))
        for train in (True, False):
            self.announce(self.batch, train)
        assert self.programs.arena is not None
        self.weights = DeviceWeights(self.device, self.programs.arena, self.schedule, self.net, self.loss)
        self.weights.reset()
        self.push()
        for layer in self.net.weighted():
            layer.owner = self

    def close(self) -> None:
        """Bring the network's weights up to date (not after a failure inside an iteration) and give all memory back."""
        if self._closed:
            return
        with self.turn.taken():
            try:
                self.pull()
            finally:
                self._closed = True
                for layer in self.net.weighted():
                    if layer.owner is self:
                        layer.owner = None
                if hasattr(self, "device"):
                    self.device.abandon()
                for slot in self._slots:
                    slot.batch.close()
                if hasattr(self, "programs"):
                    self.programs.close()
                if self._owns_device and hasattr(self, "device"):
                    self.device.close()

    def __del__(self) -> None:
        if hasattr(self, "programs") and not self._closed:
            # Not more than that: this may be any thread, in the middle of what another trainer does on the device.
            warn("a trainer was dropped that was not closed; use it in a with statement", ResourceWarning, stacklevel=2)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.turn.end()
        self.close()

    # -- what it takes ---------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The training schedule of the full (micro-)batch."""
        return self.programs.schedules[(self._first_purposes()[0], self.micro_batch)]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device arena."""
        return self.programs.peak_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned slab, without the batch slots."""
        return self.programs.pinned_bytes

    def compression(self, seconds: float | None = None, codec_s: float = 0.0) -> dict[str, Any]:
        """What compression does, for JSON: bytes of the slab without it and of packed tensors (the most at once),
        density, ratio and the same per tensor of the last iteration. `cpu_share` is in cores: of a time of `seconds`
        since the codec workers had taken `codec_s` (`programs.codec_s`)."""
        share = None if seconds is None else (self.programs.codec_s - codec_s) / seconds
        packed = self.programs.packed.peak if self.schedule.plan.compress else None
        found = self.executor(self.batch).packer.packed
        return {
            "pinned_raw_bytes": self.schedule.pinned_raw_bytes, "packed_bytes": packed,
            "cpu_share": share if self.schedule.plan.compress else None,
            **report(self.schedule.graph, {n: (p.raw_bytes, p.packed_bytes, p.density) for n, p in found.items()}),
        }  # fmt: skip

    @property
    def batch_slot_bytes(self) -> int:
        """Bytes of the batch slots (pinned on CUDA)."""
        return sum(slot.batch.region.nbytes for slot in self._slots)

    # -- weights ---------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Upload the network's weights; optimizer state stays."""
        with self.turn.taken(inside=True):
            if self._closed:
                raise ArgumentError("trainer is closed; open a new one")
            self.programs.finish()
            self.weights.push(self.seed)
            self._changed = False

    def pull(self) -> None:
        """Bring the network's weights up to date. After a failure inside an iteration they stay what they were.

        Raises NonFiniteLoss when a weight is NaN or infinite: that is such a failure.
        """
        with self.turn.taken(inside=True):
            if self._changed and not self._failed:
                self.programs.finish()
                try:
                    self.weights.pull(self.step_count)
                except NonFiniteLoss:
                    self._failed = True
                    raise
                self._changed = False

    def state_dict(self) -> dict[str, np.ndarray]:
        """The network's newest weights."""
        return self.net.state_dict()

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Copies of the optimizer's buffers: `features.0.weight@momentum` -> array in PyTorch's layout."""
        with self.turn.taken(inside=True):
            self.check_usable()
            self.programs.finish()
            return self.weights.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take the buffers that `optimizer_state` gave. Raises CheckpointError when they are of something else."""
        with self.turn.taken(inside=True):
            self.check_usable()
            self.programs.finish()
            self.weights.load_optimizer_state(state)

    def observe_gradients(self) -> GradientObserver:
        """From the next step on, see every weight gradient; the schedule stays the same. The trainer closes it."""
        self.check_usable()
        observer = GradientObserver(self.device, [name for name, _ in self.net.named_parameters()])
        self.programs.observe(observer)
        return observer

    # -- one batch -------------------------------------------------------------------------------------------------

    def step(self, x: np.ndarray, y: np.ndarray) -> StepResult:
        """One training iteration on x [rows,C,H,W] and y [rows] (MSE: the output's shape), rows <= batch.

        Raises NonFiniteLoss naming the step when the loss is NaN or infinite.
        """
        with self.turn.taken():
            self.check_usable()
            slot = self._slots[0]
            return self.settle(self.issue(slot.batch, self._fill(slot.batch, x, y)))

    def announce(self, rows: int, train: bool) -> None:
        """Plan and compile what batches of that many rows need. Raises BudgetError when it does not fit."""
        self.check_usable()
        for purpose, _, count in self._parts(rows, train):
            self.programs.executor(purpose, count)

    def executor(self, rows: int) -> Executor:
        """The compiled training program of a batch of so many rows (of its first micro-batch)."""
        self.check_usable()
        purpose, _, count = self._parts(rows, True)[0]
        return self.programs.executor(purpose, count)

    def _parts(self, rows: int, train: bool) -> list[tuple[Purpose, int, int]]:
        """(purpose, first row, rows) of each micro-batch."""
        return [
            (
                Purpose(train, accumulate=train and start > 0, update=not train or start + self.micro_batch >= rows),
                start,
                min(self.micro_batch, rows - start),
            )
            for start in range(0, rows, self.micro_batch)
        ]

    def issue(self, slot: BatchSlot, rows: int, train: bool = True) -> Pending:
        """Issue the iteration(s) over the first `rows` rows of a slot; device work may go on after the return."""
        with self.turn.taken(inside=True):
            self.check_usable()
            if self.adaptive and train:
                with self._failing(train, self.step_count):
                    self.adaptive.before(self.step_count)
            labels = slot.array("labels")[:rows]
            scalars = {
                "inverse_weight": self.loss.inverse_weight(labels, (rows, *self._output_shape[1:])),
                "step": float(self.step_count),
                "seed_low": float(self.seed & 0xFFFFFFFF), "seed_high": float(self.seed >> 32),
                **self.optimizer.scalars(self.step_count),
            }  # fmt: skip
            parts = [(self.programs.executor(p, count), start) for p, start, count in self._parts(rows, train)]
            for observer in self.programs.observers if train else ():
                observer.prepare(slot)
            self._changed = self._changed or train
            with self._failing(train, self.step_count):
                for part, (executor, start) in enumerate(parts):
                    slot.select(part, start, {**scalars, "micro_step": float(part)})
                    self.programs.run(executor, slot)
                done = self.device.record(self.device.stream(COMPUTE))
            pending = Pending(slot, rows, len(parts), self.step_count, train, done)
            self.step_count += train
            return pending

    def settle(self, pending: Pending) -> StepResult:
        """Wait for an issued batch and read its results."""
        with self._failing(pending.train, pending.step):
            self.device.host_wait(pending.done)
        for observer in self.programs.observers if pending.train else ():
            observer.settle(pending.slot)
        loss, correct = pending.slot.array("loss")[: pending.parts].astype(np.float64).sum(axis=0)
        if not np.isfinite(loss):
            self._failed = self._failed or pending.train
            when = f"step {pending.step}" if pending.train else f"the evaluation after {pending.step} steps"
            raise NonFiniteLoss(f"the loss of {when} is {loss}; lower the learning rate or check the data for NaN")
        return StepResult(pending.step, float(loss), int(correct), pending.rows)

    @contextmanager
    def _failing(self, train: bool, step: int) -> Iterator[None]:
        """What goes wrong in a training iteration leaves weights between two steps: they are not used any more."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or train
            self.device.abandon()
            add_note(error, f"in step {step}" if train else f"in an evaluation after {step} steps")
            raise

    @property
    def failed(self) -> bool:
        """Whether an iteration failed in it: it takes no other."""
        return self._failed

    def check_usable(self) -> None:
        """Raises ArgumentError when the trainer is closed or an iteration failed in it."""
        if self._closed:
            raise ArgumentError("trainer is closed; open a new one")
        if self._failed:
            raise ArgumentError("trainer stopped in an iteration that failed; close it and open a new one")

    def _fill(self, slot: BatchSlot, x: np.ndarray, y: np.ndarray) -> int:
        rows = self._fill_images(slot, x)
        places = slot.array("labels")[:rows]
        classes = self._output_shape[1] if places.dtype == np.int64 else None
        places[...] = checked_labels(y, places.shape, classes)
        return rows

    def _fill_images(self, slot: BatchSlot, x: np.ndarray) -> int:
        x = checked_images(x, self.sample_shape, self.batch)
        rows = len(x)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and the loss with it
            slot.array("input")[:rows] = x
        return rows

    # -- whole data sets -------------------------------------------------------------------------------------------

    def fit(self, data: Data | Dataset, epochs: int = 1, **options: Any) -> FitResult:
        """Train for some epochs; `minidnn.run.loop.fit` has the options (steps, log, checkpoint, resume, progress)."""
        from minidnn.run.loop import fit

        return fit(self, data, epochs, **options)

    def evaluate(self, data: Data | Dataset) -> dict[str, float]:
        """Mean loss and accuracy over the test set, with running statistics and without dropout."""
        from minidnn.run.loop import evaluate

        return evaluate(self, data)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Logits for x [rows,C,H,W], any number of rows; [rows, classes], float32 (in fp64 float64)."""
        x = checked_images(x, self.sample_shape)
        outputs = []
        with self.turn.taken():
            self.check_usable()
            slot = self._slots[0].batch
            for start in range(0, len(x), self.micro_batch):
                rows = self._fill_images(slot, x[start : start + self.micro_batch])
                executor = self.programs.executor(Purpose(train=False, loss=False), rows)
                slot.select(0, 0, {})
                with self._failing(False, self.step_count):
                    self.programs.run(executor, slot)
                    self.device.host_wait(self.device.record(self.device.stream(COMPUTE)))
                output = slot.array(executor.schedule.graph.output)[:rows].reshape(rows, *self._output_shape[1:])
                outputs.append(output.astype(np.float64 if self.target.precision == "fp64" else np.float32))
        return np.concatenate(outputs)
