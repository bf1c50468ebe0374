"""The graph of one iteration, and the target that it was built for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from minidnn.arguments import choice
from minidnn.graph.op import Op
from minidnn.graph.tensor import FROM_HOST, PERSISTENT_ROLES, Role, Tensor

_ACTIVATION_DTYPE = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp64": "float64"}
PRECISIONS = tuple(_ACTIVATION_DTYPE)


@dataclass(frozen=True, slots=True)
class Target:
    """What a graph is built for: precision, memory layout, fusions, and with them what each op saves.

    `paper` is the vDNN papers' graph: NCHW, pooling saves X and Y, the fused ReLU's backward is an op of its own.
    `native` is what CUDA runs: max-pooling saves an int8 window index, and the backward of a fused ReLU happens
    inside the op that makes its gradient.
    """

    name: str = "paper"
    precision: str = "fp32"
    layout: str = "NCHW"

    def __post_init__(self) -> None:
        choice(self.name, "target", ("paper", "native"))
        choice(self.precision, "precision", PRECISIONS)
        choice(self.layout, "layout", ("NCHW", "NHWC"))

    @classmethod
    def on_cuda(cls, name: str, precision: str, tensor_cores: bool = True) -> Target:
        """The target in the layout that suits CUDA: tensor cores, of cards that have them for the precision, want
        channels innermost; strict fp32 is fastest, and the papers' graph is defined, in NCHW."""
        inner = name == "native" and precision in ("tf32", "bf16") and tensor_cores
        return cls(name, precision, "NHWC" if inner else "NCHW")

    @property
    def fuses_backward(self) -> bool:
        """Whether a ReLU's backward is fused into the op that writes its gradient, and pooling saves an index."""
        return self.name == "native"

    @property
    def early_batch(self) -> bool:
        """Whether the next batch may come in while an iteration computes; the papers' iteration begins with it."""
        return self.name == "native"

    @property
    def activation_dtype(self) -> str:
        """dtype of activations and their gradients."""
        return _ACTIVATION_DTYPE[self.precision]

    @property
    def weight_dtype(self) -> str:
        """dtype of weights, their gradients, statistics and optimizer state."""
        return "float64" if self.precision == "fp64" else "float32"


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """A layer that owns ops: its place in the paper's numbering, its input X and its output Y."""

    index: int
    name: str
    kind: str
    x: str
    y: str


@dataclass(frozen=True)
class Graph:
    """Ops in execution order and the tensors between them.

    `output` names the network's result (logits). `update` is `"per-layer"`, `"at-end"` or `"none"` (a micro-batch that
    only adds up gradients, or inference).
    """

    batch: int
    target: Target
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    layers: tuple[LayerInfo, ...]
    output: str
    training: bool = True
    update: str = "per-layer"

    @cached_property
    def first_write(self) -> Mapping[str, int]:
        """Tensor name -> index of the first op that writes it; -1 for what comes from outside (input, weights)."""
        first: dict[str, int] = dict.fromkeys(self.tensors, -1)
        for i, op in enumerate(self.ops):
            for _, name in op.writes:
                if first[name] < 0 and not self.is_persistent(name):
                    first[name] = i
        return first

    @cached_property
    def uses(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> indices of the ops that touch it, in order."""
        uses: dict[str, list[int]] = {name: [] for name in self.tensors}
        for i, op in enumerate(self.ops):
            for name in op.tensors:
                uses[name].append(i)
        return {name: tuple(at) for name, at in uses.items()}

    @cached_property
    def on_host(self) -> Mapping[str, str]:
        """Tensors whose bytes the host has during the whole iteration -> the field of the batch slot that has them:
        what comes from there, and a copy of the input that is nothing but that."""
        found = {name: name for name, tensor in self.tensors.items() if tensor.role in FROM_HOST}
        for op in self.ops:
            if op.kind == "cast":
                (_, x), (_, y) = op.reads[0], op.writes[0]
                writers = [i for i in self.uses[y] if y in (name for _, name in self.ops[i].writes)]
                if x in found and len(writers) == 1 and self.tensors[y].lies_like(self.tensors[x]):
                    found[y] = found[x]
        return found

    def is_persistent(self, name: str) -> bool:
        """Whether the tensor outlives the iteration: weights, statistics, optimizer state, scalars; and weight
        gradients when the update comes at the end of the iteration (or later)."""
        role = self.tensors[name].role
        return role in PERSISTENT_ROLES or (role is Role.WEIGHT_GRADIENT and self.update != "per-layer")

    @cached_property
    def forward_ops(self) -> int:
        """Number of ops in the forward pass (the loss included); backward starts at this index."""
        return sum(1 for op in self.ops if op.forward)

    def last_forward_use(self, name: str) -> int:
        """Index of the last forward op that touches the tensor, -1 if none does."""
        return max((i for i in self.uses[name] if i < self.forward_ops), default=-1)

    def first_backward_use(self, name: str) -> int:
        """Index of the first backward op that touches the tensor, -1 if none does."""
        return min((i for i in self.uses[name] if i >= self.forward_ops), default=-1)

    def parameters(self) -> tuple[Tensor, ...]:
        """The network's weights and statistics, in graph order (bf16 copies and optimizer state excluded)."""
        return tuple(t for t in self.tensors.values() if t.role in (Role.WEIGHT, Role.STATISTIC) and "@" not in t.name)
