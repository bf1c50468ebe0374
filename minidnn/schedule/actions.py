"""The actions of a schedule. Interpreters (checker, simulator, executor, drawer) reason on these fields alone.

Tuple order is the host's issue order: an action starts after every earlier action on the `host` lane. That, the
order within each lane, and tokens are all of happens-before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from minidnn.graph.tensor import Role
from minidnn.units import round_up

if TYPE_CHECKING:
    from minidnn.graph.graph import Graph
    from minidnn.graph.op import Op
    from minidnn.plan.plan import Plan

Token = int
HOST, COMPUTE, MEMORY, D2H, H2D = "host", "compute", "memory", "d2h", "h2d"
UNPLACED = -1
ALIGNMENT = 512
"""CNMeM's rounding of the pool, in bytes."""
PINNED_ALIGNMENT = 512
"""Bytes, of ranges in the pinned slab."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor's stay on the device: offset and bytes in the arena. After a prefetch it is a new instance.

    `offset` is UNPLACED in a schedule whose placement is live: the run-time pool decides.
    """

    tensor: str
    instance: int
    offset: int
    nbytes: int

    @property
    def key(self) -> str:
        """Name of the stay: `features.0.y#1`."""
        return f"{self.tensor}#{self.instance}"

    @property
    def end(self) -> int:
        """First byte behind the buffer."""
        return self.offset + self.nbytes

    def overlaps(self, other: Buffer) -> bool:
        """Whether two placed buffers share a byte."""
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class HostRange:
    """Bytes of host memory: in the pinned slab (`kind` "pinned"), or a field of the iteration's batch slot ("slot")."""

    kind: str
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base: where it runs, what it touches, which tokens it waits for and signals.

    `op` is the index of the graph's op that the action serves; -1 for none.
    """

    lane: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    waits: tuple[Token, ...] = ()
    signal: Token | None = None
    op: int = -1

    @property
    def label(self) -> str:
        """What a timeline or an error calls it."""
        names = dict.fromkeys(b.tensor for b in self.writes + self.reads + self.frees)
        return f"{type(self).__name__.lower()} {' '.join(names)}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc(Action):
    """`buffer` begins. Waits for the releases that still hold bytes of its range."""

    buffer: Buffer

    @property
    def label(self) -> str:
        return f"alloc {self.buffer.tensor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Action):
    """The buffers of `frees` end, on the lane of the action.

    `until`: where the free takes effect later than it is issued (behind a copy-out), the op before whose allocations
    the bytes are counted as free, the number of ops for the end of the iteration; -1: at once.
    """

    until: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Action):
    """One op on the compute lane. `operands` binds its arguments; `rows` is the sub-batch, None for all rows."""

    launch: Op
    algorithm: str
    operands: tuple[tuple[str, Buffer], ...]
    workspace: Buffer | None = None
    rows: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        return self.launch.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Action):
    """A copy between `buffer` on the device and `host`."""

    buffer: Buffer
    host: HostRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Copy):
    """Copy device to host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Copy):
    """Copy host to device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Action):
    """Signal `signal` when everything issued on the lane so far is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Action):
    """The lane waits for its tokens; the host does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait(Action):
    """The host waits for its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync(Action):
    """The host waits for everything issued on lane `of`."""

    of: str

    @property
    def label(self) -> str:
        return f"hostsync {self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Free):
    """On a release worker: wait for the copy-out's token, free the buffer, signal. `until` is its virtual place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitReleases(Action):
    """The host waits for the release tokens that it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAction(Action):
    """On a codec worker: something with part `part` of the bytes of `host`, those from `start` until before `stop`."""

    host: HostRange
    part: int
    start: int
    stop: int

    @property
    def label(self) -> str:
        return f"{type(self).__name__.lower()} {self.host.name}"

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Which part of which tensor."""
        return self.host.name, self.part, self.start, self.stop

    @property
    def slab(self) -> tuple[int, int]:
        """The part's bytes in the pinned slab: from where, until before where."""
        return self.host.offset + self.start, self.host.offset + self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress(PartAction):
    """Pack what was copied out to `host`, once it is there (`waits`); then these pinned bytes are free.

    Optional: where the tensor is wanted back before any of its parts has been begun, and in the same place, its
    `Compress` and `Decompress` do nothing (they are cancelled, all or none).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Decompress(PartAction):
    """Unpack into `host`, from where a `Prefetch` takes it. Waits for whoever uses these bytes before."""


@dataclass(frozen=True)
class Schedule:
    """What an iteration does, in order; where everything lies.

    `persistent` buffers come first in the arena (`persistent_bytes`), the pool behind them (`pool_bytes`).
    `pinned` says where each offloaded tensor lies in the pinned slab (and, as `NAME unpacked`, where it comes back to
    if that is elsewhere). `placement` is "planned" (every buffer has its
    offset) or "live" (a run-time pool with heuristic `fit` gives it one).
    """

    graph: Graph
    plan: Plan
    actions: tuple[Action, ...]
    persistent: tuple[Buffer, ...]
    persistent_bytes: int
    pool_bytes: int
    pinned: Mapping[str, HostRange] = field(default_factory=dict)
    placement: str = "planned"
    fit: str = "best-fit"
    lower_bound_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena that the schedule needs."""
        return self.persistent_bytes + self.pool_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned slab."""
        return max((r.offset + r.nbytes for r in self.pinned.values()), default=0)

    @cached_property
    def offloaded_bytes(self) -> int:
        """Bytes copied out to the pinned slab in one iteration."""
        return sum(a.buffer.nbytes for a in self.actions if isinstance(a, Offload) and a.host.kind == "pinned")

    @cached_property
    def pinned_raw_bytes(self) -> int:
        """Bytes that the pinned slab would have without compression."""
        end = 0
        for action in self.actions:
            if isinstance(action, Offload) and action.host.kind == "pinned":
                end = round_up(end, PINNED_ALIGNMENT) + action.host.nbytes
        return end

    @cached_property
    def early(self) -> bool:
        """Whether the batch has a place for good, so that it may come in before the iteration in front has ended."""
        return any(self.graph.tensors[b.tensor].role is Role.INPUT for b in self.persistent)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in use, host first."""
        found = dict.fromkeys([HOST, *(a.lane for a in self.actions)])
        return tuple(found)
