"""Programs: the schedules that one training session needs, planned when first announced, in one arena.

One for each row count and purpose (training, a first or later micro-batch, evaluation, prediction). The full batch's
programs size the arena; the others use the same mode within it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from minidnn.codec import PackedMemory, warm_up
from minidnn.device.base import Device, Region
from minidnn.errors import BudgetError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer
from minidnn.plan.mode import Mode
from minidnn.plan.registry import FIXED_SETS, PLANNERS, parse_mode
from minidnn.profile.profile import Profile
from minidnn.run.choose import Options, Score, choose, offered, smallest
from minidnn.run.executor import Executor
from minidnn.run.fewer_rows import for_fewer_rows
from minidnn.run.live import executor_for
from minidnn.run.observe import GradientObserver
from minidnn.run.slot import BatchSlot
from minidnn.run.timing import Timer
from minidnn.schedule.actions import Schedule
from minidnn.units import format_size


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a program is for: `train` or not, with the loss or without, and its part of a batch of micro-batches."""

    train: bool
    loss: bool = True
    accumulate: bool = False
    update: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is the same for all programs of a trainer. `parts`: a batch may come in several micro-batches. `captured`:
    training iterations are issued as CUDA graphs."""

    net: Sequential
    loss: Loss | None
    optimizer: Optimizer
    target: Target
    mode: Mode
    options: Options
    sample_shape: tuple[int, ...]
    parts: bool = False
    max_norm: float | None = None
    captured: bool = False

    @property
    def at_end(self) -> bool:
        """Whether weights are updated at the end of an iteration, because all gradients are needed together."""
        return self.max_norm is not None or self.parts

    @property
    def own_input(self) -> bool:
        """Whether an iteration reads a copy of its batch: where the next one comes early, it need not wait for the
        first layer's gradient then. The modes of the papers have none."""
        return self.target.early_batch and self.mode.family not in FIXED_SETS

    def options_for(self, purpose: Purpose) -> Options:
        """The options of a purpose. A fit heuristic is one of training: `high-end` sorts activations by whether they
        are offloaded, and serves no inference in a pool of any size."""
        return self.options if purpose.train else replace(self.options, fit=None)

    def graph(self, purpose: Purpose, rows: int) -> Graph:
        """The graph of a purpose for that many rows."""
        if not purpose.train:
            return build(self.net, self.loss if purpose.loss else None, (rows, *self.sample_shape), self.target)
        update = ("at-end" if purpose.update else "none") if self.at_end else "per-layer"
        return build(
            self.net, self.loss, (rows, *self.sample_shape), self.target, optimizer=self.optimizer, update=update,
            accumulate=purpose.accumulate, max_norm=self.max_norm if update == "at-end" else None,
            own_input=self.own_input,
        )  # fmt: skip


class Programs:
    """Plans, places and compiles; owns the arena, the pinned slab and the memory for packed tensors."""

    def __init__(
        self, device: Device, recipe: Recipe, rows: int, purposes: list[Purpose], packed_limit: int | None = None
    ) -> None:
        self.device = device
        self.recipe = recipe
        self.rows = rows
        self.persistent: dict[str, int] = {}
        self.schedules: dict[tuple[Purpose, int], Schedule] = {}
        self.executors: dict[tuple[Purpose, int], Executor] = {}
        self.observers: list[GradientObserver] = []
        self.arena: Region | None = None
        self.pinned: Region | None = None
        self.packed = PackedMemory(packed_limit)
        self.latest: Executor | None = None
        self._codec_s = 0.0
        if recipe.options.compress != "off":
            warm_up()  # compiles, or loads, what the first step would otherwise wait for
        if recipe.options.algorithms or isinstance(recipe.options.compress, tuple):
            recipe.options.check_names(recipe.graph(purposes[0], rows))
        try:
            for purpose in purposes:  # the first purpose trains with all weights: it fixes where they lie
                self.plan(purpose, rows)
        except BudgetError as error:
            if error.needed is None:
                raise
            raise self._refusal(purposes, rows) from None
        needed = max(s.peak_bytes for s in self.schedules.values())
        self.take_slab(max(s.pinned_bytes for s in self.schedules.values()))
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
        """The schedule of a purpose. One for fewer rows than the arena was made for is that of all rows in small, or,
        where there is none, whatever the mode, smaller workspaces (`g`) or offline placement make fit."""
        key = (purpose, rows)
        if key not in self.schedules:
            graph = self.recipe.graph(purpose, rows)
            profile = self.device.profile(graph)
            schedule = self._in_small(purpose, graph, profile) or self._chosen(purpose, graph, profile)
            if not self.persistent:
                self.persistent = _places(schedule)
            self.schedules[key] = schedule
        return self.schedules[key]

    def _in_small(self, purpose: Purpose, graph: Graph, profile: Profile) -> Schedule | None:
        whole = self.schedules.get((purpose, self.rows))
        if whole is None or self.arena is None:
            return None
        algorithms = offered(self.recipe.options.algorithms, graph, profile)
        return for_fewer_rows(whole, graph, profile, algorithms=algorithms, persistent=self.persistent)

    def _chosen(self, purpose: Purpose, graph: Graph, profile: Profile) -> Schedule:
        modes = self._modes(purpose, self.recipe.mode, later=self.arena is not None)
        options = self.recipe.options_for(purpose)
        if graph.batch != self.rows:
            options = replace(options, algorithms=offered(options.algorithms, graph, profile))
        ways = [(mode, options) for mode in modes]
        if self.arena is not None:
            room = self.arena.nbytes if options.budget is None else min(self.arena.nbytes, options.budget)
            placed = replace(options, fit=None, placement="planned")
            ways = [
                (mode, replace(o, budget=room, pinned=self.pinned_bytes)) for o in (options, placed) for mode in modes
            ]
        # Of several candidates (dyn) the fastest is found by running them, before anything else has memory.
        with Timer(self.device, profile) as timer:
            score = timer if purpose.train and self.arena is None else None
            return _first_fitting(graph, ways, profile, self.persistent or None, score)

    def executor(self, purpose: Purpose, rows: int) -> Executor:
        """The compiled program."""
        key = (purpose, rows)
        if key not in self.executors:
            assert self.arena is not None
            schedule = self.plan(purpose, rows)
            executor = executor_for(
                self.device, schedule, self.arena, self.pinned, self.recipe.captured and purpose.train, self.packed
            )
            for observer in self.observers if purpose.train else ():
                observer.attach(executor)
            self.executors[key] = executor
        return self.executors[key]

    def run(self, executor: Executor, slot: BatchSlot) -> None:
        """Issue an iteration. Those of one discipline meet at the barriers that their schedules have. Where the host
        waits in the one and streams alone in the other, or batches come early in one of them, no barrier knows of the
        other's lanes: the host waits for all of them."""
        before, self.latest = self.latest, executor
        if before is not None and _discipline(before) != _discipline(executor):
            before.finish()
        executor.run(slot)

    @property
    def training_executors(self) -> list[Executor]:
        """The compiled programs that train."""
        return [executor for (purpose, _), executor in self.executors.items() if purpose.train]

    @property
    def codec_s(self) -> float:
        """Seconds of processor time that codec workers have taken."""
        return self._codec_s + sum(executor.packer.cpu_s for executor in self.executors.values())

    def forget_executors(self) -> None:
        """Compile anew what is used from now on. What was issued must be done."""
        self._codec_s = self.codec_s
        self.executors.clear()
        self.latest = None

    def take_slab(self, nbytes: int) -> None:
        """Have a pinned slab of that size instead of the present one. Raises OutOfPinnedMemory, and keeps that one's
        size, where the machine refuses."""
        old = self.pinned_bytes
        if nbytes == old:
            return
        if self.pinned is not None:
            self.device.give_back(self.pinned)
            self.pinned = None
        try:
            self.pinned = self.device.pinned(nbytes) if nbytes else None
        except BaseException:
            self.pinned = self.device.pinned(old) if old else None
            raise

    def observe(self, observer: GradientObserver) -> None:
        """Let an observer watch all training programs, those to come included."""
        self.observers.append(observer)
        for (purpose, _), executor in self.executors.items():
            if purpose.train:
                observer.attach(executor)

    def forget(self, observer: GradientObserver) -> None:
        """The observer watches no longer; its memory is given back."""
        self.finish()
        self.observers.remove(observer)
        for executor in self.executors.values():
            executor.untap()
            for other in self.observers:
                other.attach(executor)
        observer.close()

    def finish(self) -> None:
        """Wait for everything that was issued."""
        for executor in self.executors.values():
            executor.finish()

    def close(self) -> None:
        """Give all memory back."""
        self.executors.clear()
        for observer in self.observers:
            observer.close()
        for region in (self.arena, self.pinned):
            if region is not None:
                self.device.give_back(region)
        self.arena = self.pinned = None

    # -- budgets ---------------------------------------------------------------------------------------------------

    def _modes(self, purpose: Purpose, mode: Mode, later: bool) -> list[Mode]:
        """The modes that a purpose may use, best first: inference keeps what it needs, and what must do with an arena
        that others sized may take smaller workspaces."""
        own = mode if purpose.train else parse_mode(f"keep({mode.rule})")
        return [own, _bounded(own)] if own.rule == "p" and (later or not purpose.train) else [own]

    def _smallest(self, mode: Mode, purposes: list[Purpose], rows: int) -> int:
        """Bytes of the smallest arena in which all these programs of a mode run."""
        recipe = replace(self.recipe, mode=mode)
        places: dict[str, int] | None = None
        needed = 0
        for purpose in purposes:
            graph = recipe.graph(purpose, rows)
            profile = self.device.profile(graph)
            found = [
                smallest(graph, m, profile, recipe.options_for(purpose), places)
                for m in self._modes(purpose, mode, later=False)
            ]
            least = min(found, key=lambda schedule: schedule.peak_bytes)
            places = places or _places(least)
            needed = max(needed, least.peak_bytes)
        return needed

    def _refusal(self, purposes: list[Purpose], rows: int) -> BudgetError:
        """What to say of a budget that is too small: the smallest that works, and the modes that would fit."""
        mode, budget = self.recipe.mode, self.recipe.options.budget
        assert budget is not None
        needed = self._smallest(mode, purposes, rows)
        others = {}
        for name in ALTERNATIVES:
            with suppress(BudgetError):  # a fit heuristic need not serve every mode
                others[name] = self._smallest(parse_mode(name), purposes, rows)
        fitting = [name for name, nbytes in others.items() if nbytes <= budget]
        least = min(others, key=lambda name: others[name], default="")
        if fitting:
            advice = f"modes that fit: {', '.join(fitting)}"
        elif least and others[least] < needed:
            size = f"{others[least]} bytes ({format_size(others[least])})"
            advice = f"base, keep and vdnn++ do not fit, {least} needs the least of them, {size}"
        else:
            advice = "base, keep and vdnn++ do not fit either"
        if not fitting and mode.family not in PLANNERS and self.recipe.options.placement == "planned":
            advice += "; best may, it plans for the budget"  # to find out takes longer than all of the others
        return BudgetError(
            f"memory mode {mode} at batch {rows} needs at least {needed} bytes ({format_size(needed)}); the budget is "
            f"{budget} bytes ({format_size(budget)}); {advice}",
            needed,
        )


def _discipline(executor: Executor) -> tuple[bool, bool]:
    """How an iteration waits: on the host or not, and whether its batch may come before the one in front has ended."""
    return executor.schedule.plan.sync == "none", executor.schedule.early


ALTERNATIVES = ("base", "keep", "vdnn++:conv", "vdnn++:all", "base(m)", "keep(m)", "vdnn++:conv(m)", "vdnn++:all(m)")
"""Modes that a refusal compares, the fastest first."""


def _first_fitting(
    graph: Graph, ways: list[tuple[Mode, Options]], profile: Profile, persistent: dict[str, int] | None,
    score: Score | None,
) -> Schedule:  # fmt: skip
    """The schedule by the first of these ways that fits. Raises the last one's BudgetError where none does."""
    for mode, options in ways[:-1]:
        with suppress(BudgetError):
            return choose(graph, mode, profile, options, score=score, persistent=persistent)
    mode, options = ways[-1]
    return choose(graph, mode, profile, options, score=score, persistent=persistent)


def _places(schedule: Schedule) -> dict[str, int]:
    """Offsets of what outlives an iteration, and under "" the end of that region."""
    return {b.tensor: b.offset for b in schedule.persistent} | {"": schedule.persistent_bytes}


def _bounded(mode: Mode) -> Mode:
    return parse_mode(mode.text.removesuffix(f"({mode.rule})") + "(g)")
