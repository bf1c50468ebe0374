"""What planners know of an iteration: which bytes live when, what may leave meanwhile, how long ops and copies take.

The planners of Beaumont et al. ("Optimal GPU-CPU Offloading Strategies", Euro-Par 2020) and of the works that they
compare with decide which activations leave. Everything here is counted per op of the graph, one stage each, so that it
holds for any graph and not only for the paper's chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.memory.trace import GRANULARITY
from minidnn.plan.chain import Chain
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan, stages_by_op
from minidnn.profile.profile import Algorithm, Link, Profile
from minidnn.units import round_up

if TYPE_CHECKING:
    from minidnn.plan.moments import Clock

MOVABLE = frozenset({Role.ACTIVATION, Role.INPUT, Role.MASK})
NEGLIGIBLE = 256
"""A tensor smaller than the largest by this factor is not worth a copy; only the tightest plan moves it."""


@dataclass(frozen=True, slots=True)
class Movable:
    """A tensor that backward reads again after a while. Ops by index.

    `nbytes` are those of the pool (rounded), `out_bytes` and `in_bytes` those of its copies: the network's input is
    never copied out, the host still has it. Made by op `made` (-1: the host has it), last read in forward by
    `left`, needed again by op `needed`.
    """

    name: str
    nbytes: int
    out_bytes: int
    in_bytes: int
    made: int
    left: int
    needed: int


@dataclass(frozen=True)
class Outline:
    """One iteration with nothing offloaded, every buffer freed at its last use, one stage per op.

    `resident[i]` is what the pool holds while op i runs, workspaces left out. `ways[i]` are its algorithms, fastest
    first; all have times. `load_ms` is what the batch takes to come in, `return_ms` what the loss takes to go back.
    """

    graph: Graph
    link: Link
    resident: tuple[int, ...]
    movable: tuple[Movable, ...]
    ways: tuple[tuple[Algorithm, ...], ...]
    load_ms: float
    granularity: int = GRANULARITY
    return_ms: float = 0.0

    @classmethod
    def of(cls, graph: Graph, profile: Profile, granularity: int = GRANULARITY) -> Outline:
        """Read it off a graph; the profile has times and a link. Sizes are rounded up to `granularity`."""
        assert profile.link is not None
        first = [t for t in graph.tensors.values() if t.role in (Role.SCALARS, Role.INPUT)]
        load = sum(profile.link.ms(t.nbytes, False) for t in first)
        ways = tuple(tuple(profile.algorithms(graph, op)) for op in graph.ops)
        sizes = resident(graph, granularity)
        back = profile.link.ms(sum(t.nbytes for t in graph.tensors.values() if t.role is Role.LOSS), True)
        return cls(graph, profile.link, sizes, tuple(_movable(graph)), ways, load, granularity, back)

    @cached_property
    def clock(self) -> Clock:
        """The same as columns, for compiled loops."""
        from minidnn.plan.moments import Clock

        return Clock(self)

    def with_link(self, share: float) -> Outline:
        """The same where copies run at that share of the link's rates."""
        link = replace(self.link, d2h=share * self.link.d2h, h2d=share * self.link.h2d)
        return self if share == 1 else replace(self, link=link)

    @cached_property
    def worthwhile(self) -> tuple[Movable, ...]:
        """The movable tensors that are large enough to bother, in the order in which they are made."""
        least = max((m.nbytes for m in self.movable), default=0) // NEGLIGIBLE
        return tuple(m for m in self.movable if m.nbytes >= least)

    @property
    def floor_ms(self) -> float:
        """What no arrangement can be faster than."""
        return self.load_ms + sum(a.ms or 0.0 for a in self.fastest) + self.return_ms

    def without(self, offload: Iterable[Movable]) -> list[int]:
        """What is left of `resident` when these tensors are away as long as they can be."""
        change = [0] * (len(self.resident) + 1)
        for m in offload:
            change[m.left + 1] -= m.nbytes
            change[m.needed] += m.nbytes
        return [r + c for r, c in zip(self.resident, accumulate(change), strict=False)]

    def within(self, level: int, held: Iterable[int] | None = None) -> tuple[Algorithm, ...]:
        """Per op the fastest algorithm whose workspace fits beside what is held (`resident`) below `level`; where none
        does, the one with the least workspace."""
        room = level - np.array(self.resident if held is None else [*held], np.int64)
        fits = self._workspaces <= room[:, None]
        chosen = np.where(fits.any(axis=1), fits.argmax(axis=1), self._workspaces.argmin(axis=1))
        return tuple(ways[k] for ways, k in zip(self.ways, chosen.tolist(), strict=True))

    @cached_property
    def _workspaces(self) -> NDArray[np.int64]:
        """Rounded, of every op's algorithms: [ops, most]; where an op has fewer its first stands again."""
        most = max(map(len, self.ways))
        rows = [[round_up(a.workspace, self.granularity) for a in ways] for ways in self.ways]
        return np.array([row + row[:1] * (most - len(row)) for row in rows], np.int64)

    @cached_property
    def fastest(self) -> tuple[Algorithm, ...]:
        return tuple(ways[0] for ways in self.ways)

    @cached_property
    def smallest(self) -> tuple[Algorithm, ...]:
        return tuple(min(ways, key=lambda a: a.workspace) for ways in self.ways)

    def peak(self, algorithms: Iterable[Algorithm], held: Iterable[int] | None = None) -> int:
        """Most bytes of the pool over all ops (the paper's M_peak, less what is persistent)."""
        return max(
            nbytes + round_up(a.workspace, self.granularity)
            for nbytes, a in zip(self.resident if held is None else held, algorithms, strict=True)
        )

    def levels(self, most: int) -> tuple[int, ...]:
        """Peaks that some choice of algorithms has, at most so many, the smallest and the largest among them."""
        found = {self.peak(self.smallest)}
        for ways, nbytes in zip(self.ways, self.resident, strict=True):
            found |= {nbytes + round_up(a.workspace, self.granularity) for a in ways}
        floor, top = self.peak(self.smallest), self.peak(self.fastest)
        steps = sorted(level for level in found if floor <= level <= top)
        if len(steps) <= most:
            return tuple(steps)
        return tuple(steps[round(k * (len(steps) - 1) / (most - 1))] for k in range(most))

    def named(self, algorithms: Iterable[Algorithm]) -> Mapping[str, Algorithm]:
        """As a plan has them."""
        return {op.name: a for op, a in zip(self.graph.ops, algorithms, strict=True)}


@dataclass(frozen=True)
class Arrangement:
    """An offload set with its moments. Ops by index: `free_before` as in `Plan`, `fetch` the op before which a copy-in
    is issued. `ms` is what the iteration takes if the host is never late and every moment can be kept. `offsets`, once
    there are some, place every stay in the pool."""

    outline: Outline
    offload: tuple[Movable, ...]
    algorithms: tuple[Algorithm, ...]
    free_before: Mapping[str, int]
    fetch: Mapping[str, int]
    ms: float
    offsets: Mapping[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[object, ...]:
        """What leaves, and the algorithms: two arrangements that agree in these differ in moments only."""
        return tuple(m.name for m in self.offload), tuple(a.name for a in self.algorithms)

    @property
    def by_need(self) -> list[Movable]:
        """The order in which the tensors come back."""
        return sorted(self.offload, key=need)

    def plan(self, request: Request) -> Plan:
        """The plan."""
        prefetch: dict[int, tuple[str, ...]] = {}
        for m in self.by_need:
            stage = self.fetch[m.name]
            if stage < m.needed:
                prefetch[stage] = (*prefetch.get(stage, ()), m.name)
        return Plan(
            str(request.mode), stages_by_op(request.graph), self.outline.named(self.algorithms),
            tuple(m.name for m in self.offload), prefetch, request.order, free_before=self.free_before,
            offsets=self.offsets,
        )  # fmt: skip


def need(m: Movable) -> tuple[int, int]:
    """Sort key: the order in which backward needs tensors, later made ones first."""
    return m.needed, -m.made


def outline_of(request: Request) -> Outline:
    """The outline of what a policy was asked for."""
    return Outline.of(request.graph, request.profile)


def layers_of(
    outline: Outline, algorithms: Sequence[Algorithm], pool: int
) -> tuple[Chain, tuple[tuple[Movable, ...], ...]]:  # fmt: skip
    """The graph as the paper's chain in a pool of so many bytes, and the tensors that make up each x_i, i = 0..L.

    x_{i+1} is what layer i makes and backward reads again after a while, and what else an op of its needs is in ex_f
    and ex_b, gradients included (so y is zero). The link takes as long both ways together as the two rates do.
    """
    count = len(outline.graph.layers)
    groups: list[list[Movable]] = [[] for _ in range(count + 1)]
    for m in outline.worthwhile:
        groups[0 if m.made < 0 else outline.graph.ops[m.made].layer + 1].append(m)
    x = [float(sum(m.nbytes for m in group)) for group in groups]
    held = list(accumulate(x))
    u_f, u_b, ex_f, ex_b = [0.0] * count, [0.0] * count, [-inf] * count, [-inf] * count
    for op, a, nbytes in zip(outline.graph.ops, algorithms, outline.resident, strict=True):
        u, ex = (u_f, ex_f) if op.forward else (u_b, ex_b)
        u[op.layer] += a.ms or 0.0
        need = nbytes + round_up(a.workspace, outline.granularity) - held[op.layer + 1]
        ex[op.layer] = max(ex[op.layer], need)
    rate = 2e-3 / (1 / outline.link.d2h + 1 / outline.link.h2d)
    none = -float(sum(x))  # a layer without ops in a phase needs nothing there
    chain = Chain(
        tuple(x), (0.0,) * (count + 1), tuple(u_f), tuple(u_b), tuple(max(e, none) for e in ex_f),
        tuple(max(e, none) for e in ex_b), rate, float(pool),
    )  # fmt: skip
    return chain, tuple(tuple(group) for group in groups[:-1])


def lifetime(graph: Graph, name: str) -> tuple[int, int]:
    """First and last op that must find the tensor in the pool; what inference returns stays to the end."""
    uses = graph.uses[name]
    first = 0 if graph.first_write[name] < 0 else graph.first_write[name]
    if not graph.training and name == graph.output:
        return first, len(graph.ops) - 1
    return first, uses[-1] if uses else first


def resident(graph: Graph, granularity: int = GRANULARITY) -> tuple[int, ...]:
    """Bytes of the pool while each op runs, with nothing offloaded, workspaces left out."""
    change = [0] * (len(graph.ops) + 1)
    for name, t in graph.tensors.items():
        if not graph.is_persistent(name):
            first, last = lifetime(graph, name)
            change[first] += round_up(t.nbytes, granularity)
            change[last + 1] -= round_up(t.nbytes, granularity)
    return tuple(accumulate(change[:-1]))


def _movable(graph: Graph) -> list[Movable]:
    found = []
    for name, tensor in graph.tensors.items():
        if tensor.role not in MOVABLE or graph.is_persistent(name):
            continue
        left, needed = graph.last_forward_use(name), graph.first_backward_use(name)
        if left < 0 or needed <= left + 1:
            continue
        made, out = -1, 0
        if name not in graph.on_host:
            made = max(i for i in graph.uses[name] if i <= left and name in (t for _, t in graph.ops[i].writes))
            out = tensor.nbytes
        found.append(Movable(name, round_up(tensor.nbytes, GRANULARITY), out, tensor.nbytes, made, left, needed))
    return sorted(found, key=lambda m: (m.made, m.left, m.name))
