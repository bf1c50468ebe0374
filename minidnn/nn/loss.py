"""Losses. A loss is the last layer of the graph; it writes `loss` = (value, number of correct predictions)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from minidnn.arguments import number, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.graph.tensor import Role
from minidnn.nn.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor


class Loss(Layer):
    """Base of losses. `inverse_weight` turns a sum over samples into PyTorch's default reduction, the mean."""

    label_dtype = "int64"

    def label_shape(self, logits: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the labels for logits of this shape."""
        raise NotImplementedError

    def inverse_weight(self, labels: np.ndarray, logits: tuple[int, ...]) -> float:
        """1 / (sum of the samples' weights) over the whole batch; `logits` is the whole batch's shape."""
        raise NotImplementedError

    def _loss(self, scope: Scope) -> Tensor:
        return scope.writer.tensor("loss", (2,), scope.target.weight_dtype, Role.LOSS)

    def _labels(self, scope: Scope) -> Tensor:
        return scope.writer.tensor("labels", self.label_shape(scope.shape), self.label_dtype, Role.LABEL)


class CrossEntropyLoss(Loss):
    """-log softmax(logits)[label], mean over the batch; logits [N,K], labels int64 [N] in 0..K-1.

    `weight` [K] weighs classes, `label_smoothing` in [0, 1] mixes in the uniform distribution (PyTorch's meaning).
    The softmax happens in place on the logits, as the papers' softmax layer does, unless the layer in front reads its
    output again in backward (a ReLU, a Sigmoid, a pool of the papers' graph).
    """

    kind = "softmax"

    def __init__(self, weight: Sequence[float] | np.ndarray | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = number(label_smoothing, "label_smoothing", 0, 1, "[]")
        self.weight = None if weight is None else self._weights(weight)

    @staticmethod
    def _weights(weight: object) -> np.ndarray:
        try:
            given = np.asarray(weight)
            found = np.empty(0) if given.dtype.kind == "c" else given.astype(np.float32)
        except (TypeError, ValueError, OverflowError):
            found = np.empty(0)
        if found.ndim != 1 or not len(found) or not ((found >= 0) & np.isfinite(found)).all():
            raise ArgumentError(f"weight is {shown(weight)}; it must be a number of 0 or more for each class")
        return found

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 2:
            raise ShapeError(
                f"logits have shape {list(shape)}; expected [N, classes]: "
                "end the network in Flatten and Linear"
            )
        if self.weight is not None and len(self.weight) != shape[1]:
            raise ShapeError(
                f"logits have {shape[1]} classes; "
                f"weight must have as many numbers, not {len(self.weight)}"
            )
        return shape

    def label_shape(self, logits: tuple[int, ...]) -> tuple[int, ...]:
        return logits[:1]

    def inverse_weight(self, labels: np.ndarray, logits: tuple[int, ...]) -> float:
        total = len(labels) if self.weight is None else float(self.weight.astype(np.float64)[labels].sum())
        if not total:
            raise ArgumentError(
                f"weight gives all {len(labels)} labels of a batch the weight 0, and a mean over them is none; "
                "give one of their classes a weight above 0"
            )
        return 1.0 / total

    def _class_weight(self, scope: Scope) -> Tensor | None:
        if self.weight is None:
            return None
        return scope.writer.tensor("class_weight", self.weight.shape, scope.target.weight_dtype, Role.STATISTIC)

    def _probabilities(self, scope: Scope) -> Tensor:
        x = scope.x
        if scope.writer.in_place:
            return x
        return scope.writer.tensor(f"{scope.path}.y", x.shape, x.dtype, Role.ACTIVATION, x.layout)

    def forward(self, scope: Scope) -> Tensor:
        y = self._probabilities(scope)
        scope.emit(
            "loss", "cross_entropy_forward",
            [("x", scope.x), ("labels", self._labels(scope)), ("scalars", scope.scalars()),
             ("class_weight", self._class_weight(scope))],
            [("y", y), ("loss", self._loss(scope))], label_smoothing=self.label_smoothing,
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        dx = scope.dx()
        scope.emit(
            "backward_data", "cross_entropy_backward",
            [("y", self._probabilities(scope)), ("labels", self._labels(scope)), ("scalars", scope.scalars()),
             ("class_weight", self._class_weight(scope))],
            [("dx", dx)], label_smoothing=self.label_smoothing,
        )  # fmt: skip
        return dx


class MSELoss(Loss):
    """Mean of (prediction - target)^2 over all elements; the target has the prediction's shape, float32."""

    kind = "mse"
    label_dtype = "float32"

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def label_shape(self, logits: tuple[int, ...]) -> tuple[int, ...]:
        return logits

    def inverse_weight(self, labels: np.ndarray, logits: tuple[int, ...]) -> float:
        return 1.0 / prod(logits)

    def _target(self, scope: Scope) -> Tensor:
        """The labels in the layout of the predictions."""
        labels, x = self._labels(scope), scope.x
        if x.layout == labels.layout or len(labels.shape) < 4:
            return labels
        return scope.writer.tensor(f"{scope.path}.target", labels.shape, labels.dtype, Role.MASK, x.layout)

    def forward(self, scope: Scope) -> Tensor:
        labels, target = self._labels(scope), self._target(scope)
        if target is not labels:
            scope.emit("layout", "layout", [("x", labels)], [("y", target)])
        scope.emit(
            "loss", "mse_forward",
            [("x", scope.x), ("target", target), ("scalars", scope.scalars())],
            [("loss", self._loss(scope))],
        )  # fmt: skip
        return scope.x

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        dx = scope.dx()
        scope.emit(
            "backward_data", "mse_backward",
            [("x", scope.x), ("target", self._target(scope)), ("scalars", scope.scalars())], [("dx", dx)],
        )  # fmt: skip
        return dx
