"""Which tensors a stage needs, makes, sends away and ends: what lowering asks of graph and plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import FROM_HOST, Role
from minidnn.plan.plan import Plan


class Needs:
    """Answers for one graph and plan. `persistent` names the tensors that have a fixed place for good."""

    def __init__(self, graph: Graph, plan: Plan, persistent: frozenset[str]) -> None:
        self.graph = graph
        self.plan = plan
        self.persistent = persistent

    @cached_property
    def intermediates(self) -> tuple[str, ...]:
        """Tensors that come and go within an iteration."""
        return tuple(n for n in self.graph.tensors if n not in self.persistent)

    @cached_property
    def external(self) -> tuple[str, ...]:
        """What comes from the batch slot: scalars, input, labels."""
        return tuple(n for role in FROM_HOST for n, t in self.graph.tensors.items() if t.role is role)

    @cached_property
    def early(self) -> tuple[str, ...]:
        """The input, where it has a place for good: then the next batch may come in while this iteration computes."""
        return tuple(n for n in self.external if n in self.persistent and self.graph.tensors[n].role is Role.INPUT)

    def reads_batch_last(self, start: int, stop: int) -> bool:
        """Whether the last op that reads an early batch is among these."""
        return any(start <= self.graph.uses[n][-1] < stop for n in self.early if self.graph.uses[n])

    @cached_property
    def results(self) -> tuple[str, ...]:
        """What returns to the slot: the loss; of inference without one, the output."""
        loss = tuple(n for n, t in self.graph.tensors.items() if t.role is Role.LOSS)
        return loss if self.graph.training or loss else (self.graph.output,)

    def made(self, start: int, stop: int) -> list[str]:
        """Intermediates that ops start..stop-1 are the first to write, in order."""
        return [n for i in range(start, stop) for n in self._first_written.get(i, ())]

    def touched(self, start: int, stop: int) -> list[str]:
        """Intermediates that these ops read or write, each once."""
        names = dict.fromkeys(n for op in self.graph.ops[start:stop] for n in op.tensors)
        return [n for n in names if n not in self.persistent]

    def leaving(self, start: int, stop: int) -> list[str]:
        """Offloaded tensors whose last use in forward is among these ops, and which backward reads."""
        return [n for n, at in self._exits.items() if start <= at < stop]

    def completed(self, start: int, stop: int) -> list[str]:
        """Offloaded tensors whose last write in forward is among these ops."""
        if start >= self.graph.forward_ops:
            return []
        return [n for n in self.plan.offload if start <= self._last_forward_write.get(n, -1) < stop]

    def ending(self, start: int, stop: int) -> list[str]:
        """Intermediates that nobody touches after these ops and that do not stay for the iteration."""
        ended = [n for i in range(start, stop) for n in self._last_use.get(i, ())]
        return [n for n in ended if n in self.plan.reserve] if self.plan.lifetime == "iteration" else ended

    @cached_property
    def _first_written(self) -> Mapping[int, tuple[str, ...]]:
        at: dict[int, list[str]] = {}
        for name in self.intermediates:
            at.setdefault(self.graph.first_write[name], []).append(name)
        return {i: tuple(names) for i, names in at.items()}

    @cached_property
    def _last_use(self) -> Mapping[int, tuple[str, ...]]:
        at: dict[int, list[str]] = {}
        for name in self.intermediates:
            if self.graph.uses[name] and name not in self.results:
                at.setdefault(self.graph.uses[name][-1], []).append(name)
        return {i: tuple(names) for i, names in at.items()}

    @cached_property
    def _exits(self) -> Mapping[str, int]:
        # What has a place for good never leaves, as the input whose next one comes early in another plan of this arena.
        leave = (n for n in self.plan.offload if n not in self.persistent and self.graph.first_backward_use(n) >= 0)
        return {n: self.graph.last_forward_use(n) for n in leave}

    @cached_property
    def _last_forward_write(self) -> Mapping[str, int]:
        return {n: i for i, op in enumerate(self.graph.ops[: self.graph.forward_ops]) for _, n in op.writes}
