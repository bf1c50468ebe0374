"""The same network in PyTorch, and the comparison of whole training runs with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from minidnn import Trainer, nn
from minidnn.optim import Optimizer

TOLERANCES = {"fp32": 1e-5, "fp64": 1e-10}
"""max|a-b| / max|b| per tensor, over whole networks."""


def to_torch(net: nn.Sequential) -> Any:
    """A torch.nn.Sequential with the same children under the same names; its weights are drawn anew."""
    module = torch.nn.Sequential()
    for name, child in net._children.items():
        module.add_module(name, to_torch(child) if isinstance(child, nn.Sequential) else _layer(child))
    return module


def _layer(layer: nn.Layer) -> Any:
    if isinstance(layer, nn.Conv2d):
        (top, bottom), (left, right) = layer.padding
        same = (top, left) != (bottom, right)
        return torch.nn.Conv2d(
            layer.in_channels, layer.out_channels, layer.kernel, layer.stride, "same" if same else (top, left),
            layer.dilation, layer.groups, "bias" in layer.parameters,
        )  # fmt: skip
    if isinstance(layer, nn.Linear):
        return torch.nn.Linear(layer.in_features, layer.out_features, "bias" in layer.parameters)
    if isinstance(layer, nn.BatchNorm2d):
        return torch.nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
    if isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d)):
        pads = (layer.padding[0][0], layer.padding[1][0])
        if isinstance(layer, nn.MaxPool2d):
            return torch.nn.MaxPool2d(layer.kernel, layer.stride, pads, layer.dilation, ceil_mode=layer.ceil_mode)
        return torch.nn.AvgPool2d(layer.kernel, layer.stride, pads, layer.ceil_mode, layer.count_include_pad)
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return torch.nn.AdaptiveAvgPool2d(layer.output_size)
    if isinstance(layer, nn.LocalResponseNorm):
        return torch.nn.LocalResponseNorm(layer.size, layer.alpha, layer.beta, layer.k)
    if isinstance(layer, nn.LeakyReLU):
        return torch.nn.LeakyReLU(layer.negative_slope)
    plain = {
        nn.ReLU: torch.nn.ReLU, nn.Sigmoid: torch.nn.Sigmoid, nn.Tanh: torch.nn.Tanh, nn.Flatten: torch.nn.Flatten,
        nn.Dropout: torch.nn.Dropout,
    }  # fmt: skip
    return torch.nn.Softmax(1) if isinstance(layer, nn.Softmax) else plain[type(layer)]()


def difference(found: Any, wanted: Any, scale: Any = None) -> float:
    """max|found - wanted| / max|scale| (of `wanted` where no scale is given); infinite where a NaN is on one side."""
    a, b = _array(found), _array(wanted)
    assert a.shape == b.shape
    gap = float(np.abs(a - b).max() / max(np.abs(b if scale is None else _array(scale)).max(), 1e-30))
    return gap if np.isfinite(gap) else float("inf")


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor, dtype=np.float64)


@dataclass
class Reference:
    """PyTorch's run of a network: built when it begins, so that both start from the same weights."""

    net: nn.Sequential
    loss: Any
    precision: str = "fp32"
    max_norm: float | None = None
    parts: list[slice] = field(default_factory=lambda: [slice(None)])

    def __post_init__(self) -> None:
        self.dtype = torch.float64 if self.precision == "fp64" else torch.float32
        self.module = to_torch(self.net).to(self.dtype)
        self.loss = self.loss.to(self.dtype)
        state = {name: torch.from_numpy(value).to(self.dtype) for name, value in self.net.state_dict().items()}
        missing, unknown = self.module.load_state_dict(state, strict=False)
        assert not unknown
        assert all(name.endswith("num_batches_tracked") for name in missing)
        leaves = list(self.net.leaves())
        self.null = {
            f"{path}.bias"
            for (path, _), (_, behind) in pairwise(leaves)
            if isinstance(behind, nn.BatchNorm2d)
        }

    def logits(self, x: np.ndarray) -> Any:
        """Evaluation."""
        self.module.eval()
        with torch.no_grad():
            return self.module(torch.from_numpy(x).to(self.dtype))

    def step(self, x: np.ndarray, y: np.ndarray, optimizer: Any) -> tuple[float, dict[str, Any]]:
        """One step; its loss, and the gradients before clipping. `parts` are accumulated, each with its share."""
        self.module.train()
        optimizer.zero_grad()
        total = 0.0
        for part in self.parts:
            inputs, labels = torch.from_numpy(x[part]).to(self.dtype), torch.from_numpy(y[part])
            labels = labels if labels.dtype == torch.int64 else labels.to(self.dtype)
            loss = self.loss(self.module(inputs), labels) * (len(inputs) / len(x))
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.module.named_parameters()}
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        optimizer.step()
        return total, gradients

    def compare(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Tensors by the parameters' names agree."""
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            # The exact gradient of a bias in front of a batch-norm is 0: its weight's is the measure of rounding.
            scale = wanted[name.replace("bias", "weight")] if name in self.null else value
            gap = difference(found[name], value, scale)
            assert gap < TOLERANCES[self.precision], f"{name}: {gap:.1e}"


def compare_runs(
    net: nn.Sequential, loss: nn.Loss, optimizer: Optimizer, reference: Reference, torch_optimizer: Any,
    batches: list[tuple[np.ndarray, np.ndarray]], **options: Any,
) -> None:  # fmt: skip
    """Train both on the same batches: logits, losses, every gradient of every step and the last weights agree."""
    tolerance = TOLERANCES[reference.precision]
    sample = batches[0][0]
    with Trainer(
        net, loss, optimizer, len(sample), device="host", precision=reference.precision,
        input_shape=sample.shape[1:], max_norm=reference.max_norm, **options,
    ) as trainer:  # fmt: skip
        observer = trainer.observe_gradients()
        assert difference(trainer.predict(sample), reference.logits(sample)) < tolerance
        for x, y in batches:
            wanted, gradients = reference.step(x, y, torch_optimizer)
            assert abs(trainer.step(x, y).loss - wanted) < tolerance * max(1, abs(wanted))
            reference.compare(observer.gradients, gradients)
        weights = reference.module.state_dict()
        reference.compare(
            trainer.state_dict(), {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
        )
        assert difference(trainer.predict(sample), reference.logits(sample)) < tolerance * 10


def random_batches(
    count: int, rows: int, shape: tuple[int, ...], classes: int, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Normal images and labels."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((rows, *shape)).astype(np.float32), rng.integers(0, classes, rows)) for _ in range(count)
    ]
