"""BatchNorm2d, LocalResponseNorm, Dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidnn.arguments import count, flag, number
from minidnn.errors import ShapeError
from minidnn.graph.tensor import Role
from minidnn.nn.init import Constant
from minidnn.nn.layer import Layer, Parameter, expect_rank

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor


class BatchNorm2d(Layer):
    """Batch normalization over N, H, W per channel; running statistics are updated once per micro-batch."""

    kind = "batch_norm"
    fuses_relu = True

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1,
        affine: bool = True, track_running_stats: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features = count(num_features, "num_features")
        self.eps = number(eps, "eps", 0, bounds="()")
        self.momentum = number(momentum, "momentum", 0, 1, "[]")
        shape = (self.num_features,)
        if flag(affine, "affine"):
            self.parameters["weight"] = Parameter(shape, Constant(1))
            self.parameters["bias"] = Parameter(shape, Constant(0))
        if flag(track_running_stats, "track_running_stats"):
            self.parameters["running_mean"] = Parameter(shape, Constant(0), Role.STATISTIC)
            self.parameters["running_var"] = Parameter(shape, Constant(1), Role.STATISTIC)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        expect_rank(shape, 4, "N, C, H, W")
        if shape[1] != self.num_features:
            raise ShapeError(f"input has shape {list(shape)}; expected {self.num_features} channels, got {shape[1]}")
        return shape

    def _own(self, scope: Scope, name: str) -> Tensor | None:
        parameter = self.parameters.get(name)
        return None if parameter is None else scope.parameter(name, parameter.shape, parameter.role)

    def _statistics(self, scope: Scope) -> tuple[Tensor, Tensor]:
        shape, dtype = (self.num_features,), scope.target.weight_dtype
        return scope.saved("mean", shape, dtype), scope.saved("invstd", shape, dtype)

    def forward(self, scope: Scope) -> Tensor:
        shape = self.infer(scope.shape)
        if scope.training and shape[0] * shape[2] * shape[3] == 1:
            raise ShapeError(
                f"input has shape {list(shape)}; training needs more than one value per channel: "
                "use a batch of 2 or more, or larger images"
            )
        y = scope.activation(shape)
        w, b = self._own(scope, "weight"), self._own(scope, "bias")
        running = [("running_mean", self._own(scope, "running_mean")), ("running_var", self._own(scope, "running_var"))]
        if scope.training or running[0][1] is None:
            mean, invstd = self._statistics(scope)
            scope.emit(
                "forward", "batch_norm_forward", [("x", scope.x), ("w", w), ("b", b), *running],
                [("y", y), ("mean", mean), ("invstd", invstd), *running],
                momentum=self.momentum, eps=self.eps, relu=scope.relu,
            )  # fmt: skip
        else:
            scope.emit(
                "forward", "batch_norm_inference", [("x", scope.x), ("w", w), ("b", b), *running], [("y", y)],
                eps=self.eps, relu=scope.relu,
            )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        mean, invstd = self._statistics(scope)
        affine = "weight" in self.parameters
        if not affine and not scope.needs_dx:
            return None
        shape = (self.num_features,)
        # dX is always written: the op needs it as its place for the result, and the first layer is rarely a batch-norm.
        dx = scope.dx()
        dw = scope.weight_gradient("weight", shape) if affine else None
        db = scope.weight_gradient("bias", shape) if affine else None
        scope.emit(
            "backward_data", "batch_norm_backward",
            [("x", scope.x), ("dy", dy), ("w", self._own(scope, "weight")), ("mean", mean), ("invstd", invstd)],
            [("dx", dx), ("dw", dw), ("db", db)], relu=False,
        )  # fmt: skip
        return dx

    def extra(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class LocalResponseNorm(Layer):
    """Y = X / (k + alpha / size * sum over `size` neighbouring channels of X^2) ^ beta."""

    kind = "lrn"

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.size = count(size, "size")
        # Below these the base of the power can be 0 or negative, and what comes out no number.
        self.alpha, self.beta = number(alpha, "alpha", 0), number(beta, "beta")
        self.k = number(k, "k", 0, bounds="()")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        expect_rank(shape, 4, "N, C, H, W")
        return shape

    def _attributes(self) -> dict[str, float]:
        return {"size": self.size, "alpha": self.alpha, "beta": self.beta, "k": self.k}

    def forward(self, scope: Scope) -> Tensor:
        y = scope.activation(scope.shape)
        scale = scope.saved("scale", scope.shape, scope.target.weight_dtype)
        scope.emit(
            "forward", "local_response_norm_forward", [("x", scope.x)], [("y", y), ("scale", scale)],
            **self._attributes(),
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx = scope.dx()
        scale = scope.saved("scale", scope.shape, scope.target.weight_dtype)
        scope.emit(
            "backward_data", "local_response_norm_backward",
            [("x", scope.x), ("y", scope.y), ("scale", scale), ("dy", dy)], [("dx", dx)], **self._attributes(),
        )  # fmt: skip
        return dx

    def extra(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


class Dropout(Layer):
    """Zeroes each value with probability `p` while training and scales the rest by 1 / (1 - p).

    The bits are Philox(seed, step, micro-step, op, element): backward makes them again, nothing is saved. The op is the
    layer's position in the network, the same on every target.
    """

    kind = "dropout"

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p, self.inplace = number(p, "p", 0, 1), flag(inplace, "inplace")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, scope: Scope) -> Tensor:
        if not scope.training or self.p == 0:
            return scope.x
        y = scope.activation(scope.x.shape, scope.x.layout)
        scope.emit(
            "forward", "dropout_forward", [("x", scope.x), ("scalars", scope.scalars())], [("y", y)],
            p=self.p, op=scope.leaf,
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx = scope.dx()
        scope.emit(
            "backward_data", "dropout_backward", [("dy", dy), ("scalars", scope.scalars())], [("dx", dx)],
            p=self.p, op=scope.leaf,
        )  # fmt: skip
        return dx

    def extra(self) -> str:
        return f"p={self.p}"
