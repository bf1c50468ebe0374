"""Initializers: functions (rng, shape) -> array, and rules that set them for a whole network.

fan_in = C/groups * R * S (or the input features), fan_out = K * R * S / ... as PyTorch counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

import numpy as np

from minidnn.arguments import choice, number
from minidnn.errors import ArgumentError
from minidnn.nn.layer import Initializer, Layer


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight [K,C,R,S] or [O,F]."""
    if len(shape) < 2:
        raise ArgumentError(f"weight has shape {list(shape)}; fan-based initializers need 2 or more dimensions")
    receptive = prod(shape[2:])
    return shape[1] * receptive, shape[0] * receptive


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        number(self.value, "value")

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.value, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        number(self.mean, "mean")
        number(self.std, "std", 0)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values: np.ndarray = self.mean + self.std * rng.standard_normal(shape, dtype=np.float32)
        return values


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform in [-bound, bound)."""

    bound: float

    def __post_init__(self) -> None:
        number(self.bound, "bound", 0)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values: np.ndarray = np.float32(self.bound) * (2 * rng.random(shape, dtype=np.float32) - 1)
        return values


@dataclass(frozen=True, slots=True)
class He:
    """He et al. 2015: variance gain^2 / fan, gain sqrt(2 / (1 + slope^2)); `mode` fan_in or fan_out."""

    mode: str = "fan_in"
    slope: float = 0.0
    uniform: bool = False

    def __post_init__(self) -> None:
        choice(self.mode, "mode", ("fan_in", "fan_out"))
        number(self.slope, "slope")

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        fan = fans(shape)[0 if self.mode == "fan_in" else 1]
        std = sqrt(2 / (1 + self.slope**2) / fan)
        return Uniform(sqrt(3) * std)(rng, shape) if self.uniform else Normal(0, std)(rng, shape)


@dataclass(frozen=True, slots=True)
class Xavier:
    """Glorot and Bengio 2010: variance 2 / (fan_in + fan_out)."""

    uniform: bool = True

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        std = sqrt(2 / sum(fans(shape)))
        return Uniform(sqrt(3) * std)(rng, shape) if self.uniform else Normal(0, std)(rng, shape)


def default_weight() -> Initializer:
    """PyTorch's default for conv and linear weights: He uniform with slope sqrt(5), i.e. bound 1 / sqrt(fan_in)."""
    return He(slope=sqrt(5), uniform=True)


def default_bias(fan_in: int) -> Initializer:
    """PyTorch's default for biases: uniform within 1 / sqrt(fan_in)."""
    return Uniform(1 / sqrt(fan_in)) if fan_in > 0 else Constant(0)


def apply(layers: Layer, weight: dict[str, Initializer], bias: Initializer | None = None) -> None:
    """Set initializers by layer kind (`{"conv": He(), "fc": Normal(0, 0.01)}`) in a layer or a whole network.

    Values that exist already are forgotten and drawn anew.
    """
    for layer in _walk(layers):
        if layer.kind in weight:
            layer.parameters["weight"].init = weight[layer.kind]
            layer.parameters["weight"].reset()
            if bias is not None and "bias" in layer.parameters:
                layer.parameters["bias"].init = bias
                layer.parameters["bias"].reset()


def vgg(network: Layer) -> None:
    """torchvision's rule for VGG: conv He normal by fan_out, linear normal(0, 0.01), biases 0; batch-norm 1 and 0."""
    apply(network, {"conv": He(mode="fan_out"), "fc": Normal(0, 0.01)}, Constant(0))


def he(network: Layer) -> None:
    """He normal by fan_in for every conv and linear weight, biases 0."""
    apply(network, {"conv": He(), "fc": He()}, Constant(0))


def xavier(network: Layer) -> None:
    """Xavier uniform for every conv and linear weight, biases 0."""
    apply(network, {"conv": Xavier(), "fc": Xavier()}, Constant(0))


def constant(network: Layer, value: float) -> None:
    """Every conv and linear weight and bias is `value`."""
    apply(network, {"conv": Constant(value), "fc": Constant(value)}, Constant(value))


def _walk(layer: Layer) -> list[Layer]:
    children = getattr(layer, "children", None)
    return [layer] if children is None else [leaf for child in children() for leaf in _walk(child)]
