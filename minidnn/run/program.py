"""Programs: the schedules that one training session needs, planned when first announced, in one arena.

One for each row count and purpose (training, a first or later micro-batch, evaluation, prediction). The full batch's
programs size the arena; the others use the same mode within it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidnn.device.base import Device, Region
from minidnn.errors import BudgetError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer
from minidnn.plan.mode import Mode, parse_mode
from minidnn.run.choose import Options, choose
from minidnn.run.executor import Executor
from minidnn.schedule.actions import Schedule


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a program is for: `train` or not, with the loss or without, and its part of a batch of micro-batches."""

    train: bool
    loss: bool = True
    accumulate: bool = False
    update: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is the same for all programs of a trainer."""

    net: Sequential
    loss: Loss | None
    optimizer: Optimizer
    target: Target
    mode: Mode
    options: Options
    sample_shape: tuple[int, ...]
    at_end: bool
    max_norm: float | None = None

    def graph(self, purpose: Purpose, rows: int) -> Graph:
        """The graph of a purpose for that many rows."""
        if not purpose.train:
            return build(self.net, self.loss if purpose.loss else None, (rows, *self.sample_shape), self.target)
        update = ("at-end" if purpose.update else "none") if self.at_end else "per-layer"
        return build(
            self.net, self.loss, (rows, *self.sample_shape), self.target, optimizer=self.optimizer, update=update,
            accumulate=purpose.accumulate, max_norm=self.max_norm if update == "at-end" else None,
        )  # fmt: skip


class Programs:
    """Plans, places and compiles; owns the arena and the pinned slab."""

    def __init__(self, device: Device, recipe: Recipe, rows: int, purposes: list[Purpose]) -> None:
        self.device = device
        self.recipe = recipe
        self.persistent: dict[str, int] = {}
        self.schedules: dict[tuple[Purpose, int], Schedule] = {}
        self.executors: dict[tuple[Purpose, int], Executor] = {}
        self.arena: Region | None = None
        self.pinned: Region | None = None
        for purpose in purposes:  # the first purpose trains with all weights: it fixes where they lie
            self.plan(purpose, rows)
        needed = max(s.peak_bytes for s in self.schedules.values())
        slab = max(s.pinned_bytes for s in self.schedules.values())
        self.pinned = device.pinned(slab) if slab else None
        try:
            self.arena = device.arena(needed)
        except BaseException:
            self.close()
            raise

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.nbytes if self.arena else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned slab."""
        return self.pinned.nbytes if self.pinned else 0

    def plan(self, purpose: Purpose, rows: int) -> Schedule:
        """The schedule of a purpose; one that exceeds the arena falls back to algorithms that fit (`g`)."""
        key = (purpose, rows)
        if key not in self.schedules:
            graph = self.recipe.graph(purpose, rows)
            profile = self.device.profile(graph)
            mode = self.recipe.mode if purpose.train else parse_mode(f"keep({self.recipe.mode.rule})")
            options = self.recipe.options
            if self.arena is not None:
                room = self.arena.nbytes if options.budget is None else min(self.arena.nbytes, options.budget)
                options = replace(options, budget=room)
            try:
                schedule = choose(graph, mode, profile, options, persistent=self.persistent or None)
            except BudgetError:
                if not (mode.rule == "p" and (self.arena is not None or not purpose.train)):
                    raise
                schedule = choose(graph, _bounded(mode), profile, options, persistent=self.persistent or None)
            if not self.persistent:
                self.persistent = {b.tensor: b.offset for b in schedule.persistent} | {"": schedule.persistent_bytes}
            self.schedules[key] = schedule
        return self.schedules[key]

    def executor(self, purpose: Purpose, rows: int) -> Executor:
        """The compiled program."""
        key = (purpose, rows)
        if key not in self.executors:
            assert self.arena is not None
            schedule = self.plan(purpose, rows)
            if schedule.pinned_bytes > self.pinned_bytes:  # cannot happen for fewer rows of the same mode
                raise BudgetError(f"{rows} rows need {schedule.pinned_bytes} pinned bytes; {self.pinned_bytes} are taken")
            self.executors[key] = Executor(self.device, schedule, self.arena, self.pinned)
        return self.executors[key]

    def close(self) -> None:
        """Give the arena and the slab back."""
        self.executors.clear()
        for region in (self.arena, self.pinned):
            if region is not None:
                self.device.give_back(region)
        self.arena = self.pinned = None


def _bounded(mode: Mode) -> Mode:
    return parse_mode(mode.text.removesuffix(f"({mode.rule})") + "(g)")
