"""What a policy decides. A `Plan` is a value; lowering turns it into a schedule, and only lowering knows how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minidnn.arguments import choice, shown
from minidnn.codec import PARTS
from minidnn.errors import ScheduleError
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.profile import Algorithm, Profile

ORDERS = ("prefetch-first", "derivative-first")
SYNCS = ("both", "compute", "none")
LIFETIMES = ("last-use", "iteration")


@dataclass(frozen=True)
class Plan:
    """Decisions for one graph.

    `stages`: consecutive ops [start, stop) whose buffers are allocated when the group starts and freed when it ends,
    with one workspace of the largest need. `offload`: activations that leave the device between their last use in
    forward and their first in backward (the network's input is never copied out: it comes again from the host).
    `prefetch`: first op of a stage -> tensors whose copy-in starts there; what no stage prefetches is fetched before
    use. `sync`: what the host waits for at the end of each stage: "both" lanes (vDNN), "compute" (vDNN++: copy-outs
    are freed by release workers), or "none" (streams and events only). `rule`: how algorithms were picked; those of
    "g" are bounded by the room that each stage leaves, once that is known. `lifetime`: buffers end at their
    "last-use", or stay for the "iteration". `early`: the input has a place for good, so that the next batch comes in as
    soon as the present one has been read for the last time. `reserve`: tensors that end at their last use even so, and
    the bytes to take for them. `free_before`: offloaded tensor -> the op before whose allocations its release is
    counted as done. `offsets`: where every stay (`Buffer.key`) lies in the pool, of a policy that places too.
    `scratch`: bytes in front of all tensors that the device's libraries use.
    """

    mode: str
    stages: tuple[tuple[int, int], ...]
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    prefetch: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    order: str = "prefetch-first"
    sync: str = "none"
    rule: str = "p"
    lifetime: str = "last-use"
    early: bool = False
    reserve: Mapping[str, int] = field(default_factory=dict)
    free_before: Mapping[str, int] = field(default_factory=dict)
    compress: tuple[str, ...] = ()
    slots: int = 3
    codecs: int = PARTS
    scratch: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)

    def check(self, graph: Graph, who: str) -> None:
        """Raises ScheduleError, naming who made the plan, for one that is none of this graph."""
        for name, value, kind in (
            ("stages", self.stages, tuple), ("algorithms", self.algorithms, Mapping), ("offload", self.offload, tuple),
            ("prefetch", self.prefetch, Mapping),
        ):  # fmt: skip
            if not isinstance(value, kind):
                raise ScheduleError(f"{who} proposed {name} {shown(value)}; it must be a {kind.__name__}")
        choice(self.order, "order", ORDERS)
        choice(self.sync, "sync", SYNCS)
        choice(self.lifetime, "lifetime", LIFETIMES)
        fetched = [(at, name) for at, names in self.prefetch.items() for name in names]
        for name in (*self.offload, *(name for _, name in fetched)):
            if name not in graph.tensors:
                raise ScheduleError(f"{who} offloads {shown(name)}, which is no tensor of this graph; name one that is")
        starts, end = set(), 0
        for stage in self.stages:
            if not (isinstance(stage, tuple) and len(stage) == 2 and stage[0] == end < stage[1]):
                raise ScheduleError(f"{who} proposed the stage {shown(stage)} behind op {end}; it must begin there")
            starts.add(stage[0])
            end = stage[1]
        if end != len(graph.ops):
            raise ScheduleError(f"{who} proposed stages up to op {end}; they must end at op {len(graph.ops)}")
        for op, way in self.algorithms.items():
            if not isinstance(way, Algorithm):
                raise ScheduleError(f"{who} proposed {shown(way)} for {shown(op)}; it must be an Algorithm")
        for at, name in fetched:
            last = graph.last_forward_use(name)
            if at not in starts or at <= last:
                raise ScheduleError(
                    f"{who} prefetches {name} at op {at}; it must be where a stage begins, behind op {last}, "
                    "the last of forward that uses it"
                )

    def algorithm(self, op: Op) -> Algorithm:
        """The algorithm chosen for an op."""
        return self.algorithms.get(op.name, Algorithm())


def stages_by_op(graph: Graph) -> tuple[tuple[int, int], ...]:
    """One stage per op."""
    return tuple((i, i + 1) for i in range(len(graph.ops)))


def stages_by_layer(graph: Graph) -> tuple[tuple[int, int], ...]:
    """One stage per layer and direction, as in the vDNN papers."""
    starts = [
        i
        for i, op in enumerate(graph.ops)
        if i == 0 or (op.layer, op.forward) != (graph.ops[i - 1].layer, graph.ops[i - 1].forward)
    ]
    return tuple(zip(starts, [*starts[1:], len(graph.ops)], strict=True))


def pick_algorithms(graph: Graph, profile: Profile, rule: str) -> dict[str, Algorithm]:
    """Per op an algorithm by the papers' rules: `m` the one with the least workspace, `p` the fastest, and so `g`, as
    long as nothing is known of the room (see `Plan`)."""
    ways = {op.name: profile.algorithms(graph, op) for op in graph.ops}
    if rule == "m":
        return {name: min(found, key=lambda a: a.workspace) for name, found in ways.items()}
    return {name: found[0] for name, found in ways.items()}
