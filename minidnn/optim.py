"""Optimizers and learning-rate schedules: values that say which state a weight needs and how the update op is called.

Hyper-parameters that change from step to step (learning rate, Adam's corrections) travel in the step scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, inf, pi
from typing import Any, ClassVar

from minidnn.arguments import count, flag, number, shown
from minidnn.errors import ArgumentError

Schedule = Callable[[int], float]
"""Step (0-based) -> factor on the learning rate."""


@dataclass(frozen=True)
class Optimizer:
    """Base: `function` names the update op, `states` its per-weight buffers (argument names)."""

    lr: float
    weight_decay: float = 0.0
    schedule: Schedule | None = field(default=None, kw_only=True)
    function: ClassVar[str] = ""

    def __post_init__(self) -> None:
        number(self.lr, "lr", 0)
        number(self.weight_decay, "weight_decay", 0)
        _check_schedule("schedule", self.schedule)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state buffers that each weight has."""
        return ()

    def attributes(self) -> dict[str, Any]:
        """Constant attributes of the update op."""
        return {}

    def scalars(self, step: int) -> dict[str, float]:
        """This step's learning rate and corrections. Raises ArgumentError where the schedule gives no factor."""
        factor = 1.0 if self.schedule is None else number(self.schedule(step), f"schedule({step})", 0)
        return {"lr": float(self.lr) * factor}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov and weight decay; PyTorch's formulas."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    function: ClassVar[str] = "sgd_update"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self.momentum, "momentum", 0, 1, "[]")
        number(self.dampening, "dampening", 0, 1, "[]")
        if flag(self.nesterov, "nesterov") and (self.momentum == 0 or self.dampening != 0):
            raise ArgumentError(
                f"nesterov is True with momentum {self.momentum} and dampening {self.dampening}; "
                "it needs momentum above 0 and dampening 0"
            )

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def attributes(self) -> dict[str, Any]:
        return {
            "momentum_factor": float(self.momentum), "dampening": float(self.dampening),
            "nesterov": bool(self.nesterov), "weight_decay": float(self.weight_decay),
        }  # fmt: skip


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) as PyTorch computes it; `weight_decay` is an L2 term."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    function: ClassVar[str] = "adam_update"
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ArgumentError(f"betas is {shown(self.betas)}; it must be a pair of numbers in [0, 1)")
        for i, beta in enumerate(self.betas):
            number(beta, f"betas[{i}]", 0, 1)
        number(self.eps, "eps", 0)

    @property
    def states(self) -> tuple[str, ...]:
        return ("m", "v")

    def attributes(self) -> dict[str, Any]:
        return {
            "beta1": float(self.betas[0]), "beta2": float(self.betas[1]), "eps": float(self.eps),
            "weight_decay": float(self.weight_decay), "decoupled": self.decoupled,
        }  # fmt: skip

    def scalars(self, step: int) -> dict[str, float]:
        corrections = {f"correction{i + 1}": 1.0 - float(beta) ** (step + 1) for i, beta in enumerate(self.betas)}
        return {**super().scalars(step), **corrections}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 1e-2
    decoupled: ClassVar[bool] = True


def _check_schedule(argument: str, schedule: object) -> None:
    if schedule is not None and not callable(schedule):
        raise ArgumentError(f"{argument} is {shown(schedule)}; it must be a function of the step, as CosineLR(100) is")


@dataclass(frozen=True, slots=True)
class StepLR:
    """The factor falls by `gamma` every `every` steps."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        count(self.every, "every")
        number(self.gamma, "gamma", 0)

    def __call__(self, step: int) -> float:
        try:
            return float(self.gamma ** (step // self.every))
        except OverflowError:
            return inf


@dataclass(frozen=True, slots=True)
class CosineLR:
    """Half a cosine from 1 to `floor` over `total` steps."""

    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        count(self.total, "total")
        number(self.floor, "floor", 0)

    def __call__(self, step: int) -> float:
        return self.floor + (1 - self.floor) * (1 + cos(pi * min(step, self.total) / self.total)) / 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A linear rise over `steps` steps, then another schedule (by the steps since)."""

    steps: int
    then: Schedule | None = None

    def __post_init__(self) -> None:
        count(self.steps, "steps", 0)
        _check_schedule("then", self.then)

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return (step + 1) / self.steps
        return 1.0 if self.then is None else self.then(step - self.steps)
