"""Optimizers and learning-rate schedules: values that say which state a weight needs and how the update op is called.

Hyper-parameters that change from step to step (learning rate, Adam's corrections) travel in the step scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi
from typing import Any, ClassVar

from minidnn.errors import ArgumentError

Schedule = Callable[[int], float]
"""Step (0-based) -> factor on the learning rate."""


def _check(argument: str, value: float, low: float, high: float, closed: bool = False) -> None:
    if not isinstance(value, (int, float)) or not (low <= value < high or (closed and value == high)):
        end = "]" if closed else ")"
        raise ArgumentError(f"{argument} is {value!r}; it must be a number in [{low:g}, {high:g}{end}")


@dataclass(frozen=True)
class Optimizer:
    """Base: `function` names the update op, `states` its per-weight buffers (argument names)."""

    lr: float
    weight_decay: float = 0.0
    schedule: Schedule | None = field(default=None, kw_only=True)
    function: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0, float("inf"))
        _check("weight_decay", self.weight_decay, 0, float("inf"))

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state buffers that each weight has."""
        return ()

    def attributes(self) -> dict[str, Any]:
        """Constant attributes of the update op."""
        return {}

    def scalars(self, step: int) -> dict[str, float]:
        """This step's learning rate and corrections."""
        return {"lr": self.lr * (self.schedule(step) if self.schedule else 1.0)}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov and weight decay; PyTorch's formulas."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    function: ClassVar[str] = "sgd_update"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum, 0, 1, closed=True)
        _check("dampening", self.dampening, 0, 1, closed=True)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ArgumentError(
                f"nesterov is True with momentum {self.momentum} and dampening {self.dampening}; "
                "it needs momentum above 0 and dampening 0"
            )

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def attributes(self) -> dict[str, Any]:
        return {
            "momentum_factor": self.momentum, "dampening": self.dampening,
            "nesterov": self.nesterov, "weight_decay": self.weight_decay,
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
        _check("betas[0]", self.betas[0], 0, 1)
        _check("betas[1]", self.betas[1], 0, 1)
        _check("eps", self.eps, 0, float("inf"))

    @property
    def states(self) -> tuple[str, ...]:
        return ("m", "v")

    def attributes(self) -> dict[str, Any]:
        return {
            "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps,
            "weight_decay": self.weight_decay, "decoupled": self.decoupled,
        }  # fmt: skip

    def scalars(self, step: int) -> dict[str, float]:
        corrections = {f"correction{i + 1}": 1.0 - beta ** (step + 1) for i, beta in enumerate(self.betas)}
        return {**super().scalars(step), **corrections}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 1e-2
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class StepLR:
    """The factor falls by `gamma` every `every` steps."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ArgumentError(f"every is {self.every}; it must be 1 step or more")

    def __call__(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True, slots=True)
class CosineLR:
    """Half a cosine from 1 to `floor` over `total` steps."""

    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ArgumentError(f"total is {self.total}; it must be 1 step or more")

    def __call__(self, step: int) -> float:
        return self.floor + (1 - self.floor) * (1 + cos(pi * min(step, self.total) / self.total)) / 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A linear rise over `steps` steps, then another schedule (by the steps since)."""

    steps: int
    then: Schedule | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ArgumentError(f"steps is {self.steps}; it must be 0 or more")

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return (step + 1) / self.steps
        return self.then(step - self.steps) if self.then else 1.0
