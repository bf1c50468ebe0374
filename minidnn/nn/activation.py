"""Activations and Softmax. A ReLU behind a conv, linear or batch-norm layer is fused into it and owns no op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidnn.arguments import flag, is_count, number, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.nn.layer import Layer

if TYPE_CHECKING:
    from minidnn.graph.emit import Scope
    from minidnn.graph.tensor import Tensor


class Activation(Layer):
    """An elementwise function with its own op. `saves_input`: backward needs X, else Y."""

    kind = "activation"
    function = ""
    saves_input = False
    negative_slope = 0.0

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        # Accepted as in PyTorch; what is in place is the memory manager's decision.
        self.inplace = flag(inplace, "inplace")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, scope: Scope) -> Tensor:
        y = scope.activation(scope.x.shape, scope.x.layout)
        scope.emit(
            "forward", "activation_forward", [("x", scope.x)], [("y", y)],
            function=self.function, negative_slope=self.negative_slope,
        )  # fmt: skip
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx = scope.dx()
        saved = scope.x if self.saves_input else scope.y
        scope.emit(
            "backward_data", "activation_backward", [("saved", saved), ("dy", dy)], [("dx", dx)],
            function=self.function, negative_slope=self.negative_slope,
        )  # fmt: skip
        return dx


class ReLU(Activation):
    """max(x, 0)."""

    function = "relu"


class LeakyReLU(Activation):
    """x where x > 0, else negative_slope * x."""

    function = "leaky_relu"
    saves_input = True

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.negative_slope = number(negative_slope, "negative_slope")

    def extra(self) -> str:
        return f"negative_slope={self.negative_slope}"


class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    function = "sigmoid"

    def __init__(self) -> None:
        super().__init__()


class Tanh(Activation):
    """tanh(x)."""

    function = "tanh"

    def __init__(self) -> None:
        super().__init__()


class Softmax(Layer):
    """exp(x) / sum exp(x) over axis 1. Losses take logits: CrossEntropyLoss has its own softmax."""

    kind = "activation"

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if not is_count(dim) or dim != 1:
            raise ArgumentError(f"dim is {shown(dim)}; it must be 1, the axis of the classes")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, scope: Scope) -> Tensor:
        flat = len(scope.shape) == 2 and len(scope.x.shape) > 2
        if flat and scope.x.shape[1] != scope.shape[1]:  # Flatten is a view: in memory axis 1 are still the channels
            raise ShapeError(
                f"input is flattened from {list(scope.x.shape)}, whose axis 1 is not its {scope.shape[1]} classes; "
                "use a Linear layer in between"
            )
        y = scope.activation(scope.x.shape, scope.x.layout)
        scope.emit("forward", "softmax_forward", [("x", scope.x)], [("y", y)])
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        if not scope.needs_dx:
            return None
        dx = scope.dx()
        scope.emit("backward_data", "softmax_backward", [("y", scope.y), ("dy", dy)], [("dx", dx)])
        return dx
