"""Ops of the graph. An `Op` says exactly what it reads and writes, so that everything else can be freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCALARS = ("lr", "inverse_weight", "step", "micro_step", "seed_low", "seed_high", "correction1", "correction2")
"""The step scalars, float64, in the order in which they lie in the device's `scalars` buffer (16 entries, rest 0)."""
SCALARS_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Op:
    """One computation: `function` of the ops contract applied to tensors.

    `reads` and `writes` bind argument names to tensor names; an argument written `w[]` collects a list. A tensor
    in both is updated in place. `layer` indexes `Graph.layers` and is a label that only layer-wise policies use.
    """

    name: str
    kind: str
    function: str
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    layer: int = -1
    flops: int = 0
    forward: bool = True

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that the op touches, each once, reads first."""
        return tuple(dict.fromkeys([t for _, t in self.reads] + [t for _, t in self.writes]))

    @property
    def bindings(self) -> tuple[tuple[str, str], ...]:
        """(argument, tensor) pairs, each once: what a device binds to memory before it calls the function."""
        return tuple(dict.fromkeys(self.reads + self.writes))
