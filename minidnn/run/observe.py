"""Watching an iteration without changing it: the schedule, its offsets and its waits stay what they are.

An observer's copies ride on the compute lane, behind the op whose result they take, into pinned memory of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from minidnn.device.base import Device, Region, view
from minidnn.graph.build import weight_name
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role, Tensor
from minidnn.run.executor import Executor, Step
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import COMPUTE, Action, Buffer, Launch


class GradientObserver:
    """Takes every weight gradient as soon as it is final, before clipping and update.

    `gradients`: those of the last step, by the weight's name, in PyTorch's layout. `sha256`: over all steps so far,
    per step the gradients in the order of the parameters (`order`, names), each as its bytes in PyTorch's layout
    (float32; float64 in fp64).
    """

    def __init__(self, device: Device, order: Sequence[str]) -> None:
        self.device = device
        self.order = tuple(order)
        self.gradients: dict[str, np.ndarray] = {}
        self.steps = 0
        self._hash = hashlib.sha256()
        self._tensors: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        self._end = 0
        self._regions: dict[BatchSlot, Region] = {}

    @property
    def sha256(self) -> str:
        """Hexadecimal digest over all settled steps."""
        return self._hash.hexdigest()

    def attach(self, executor: Executor) -> None:
        """Watch the iterations of an executor; programs that leave gradients unfinished or have none are let alone."""
        graph = executor.schedule.graph
        if graph.update == "none":
            return
        final = _final_writes(graph)
        for name in final:
            if name not in self._starts:
                t = self._tensors[name] = graph.tensors[name]
                self._starts[name], self._end = self._end, self._end + t.nbytes

        def look(action: Action) -> Step | None:
            if not isinstance(action, Launch):
                return None
            done = tuple(b for b in action.writes if final.get(b.tensor) == action.op)
            return partial(self._copy, executor, done) if done else None

        executor.tap(look)

    def prepare(self, slot: BatchSlot) -> None:
        """Have memory for the gradients of the batch in `slot`: several slots can be under way."""
        if slot not in self._regions:
            self._regions[slot] = self.device.pinned(self._end)

    def settle(self, slot: BatchSlot) -> None:
        """The iteration over `slot` is done: read its gradients."""
        memory = self._regions[slot].array
        assert memory is not None
        found = {
            weight_name(name): np.array(view(t, memory[self._starts[name] : self._starts[name] + t.nbytes]), order="C")
            for name, t in self._tensors.items()
        }
        self.gradients = {name: found[name] for name in self.order if name in found}
        for gradient in self.gradients.values():
            self._hash.update(gradient.tobytes())
        self.steps += 1

    def close(self) -> None:
        """Give the memory back; what was read stays."""
        for region in self._regions.values():
            self.device.give_back(region)
        self._regions.clear()

    def _copy(self, executor: Executor, buffers: tuple[Buffer, ...]) -> None:
        assert executor.slot is not None
        region, stream = self._regions[executor.slot], self.device.stream(COMPUTE)
        for b in buffers:
            at, nbytes = self._starts[b.tensor], self._tensors[b.tensor].nbytes
            self.device.copy_out(executor.arena, executor.offset(b), region, at, nbytes, stream)


def _final_writes(graph: Graph) -> dict[str, int]:
    """Weight gradient -> index of the op that writes it last."""
    gradients = {name for name, t in graph.tensors.items() if t.role is Role.WEIGHT_GRADIENT}
    return {name: i for i, op in enumerate(graph.ops) for _, name in op.writes if name in gradients}
