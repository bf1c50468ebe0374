"""Compression in lowering: who has which bytes of the pinned slab when, and what the codec workers do (vDNN++, III-C).

A compressed tensor is copied out into a slot, packed from there into pageable memory, one part per codec worker, and
the slot goes to a later tensor: `Plan.slots` of them are in use at a time. Before its prefetch it is unpacked into a
range of its own, begun one prefetch ahead, so that copies rarely wait for a codec. The last tensors of forward keep
their slots, because nobody comes after them, and come back in place: only those can be cancelled, and only in them
does it make no difference to anyone else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from minidnn.codec import split
from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import ITEM_BYTES
from minidnn.memory.pinned import plan_pinned
from minidnn.memory.place import Interval
from minidnn.plan.compress import compressible, word_bytes
from minidnn.plan.plan import Plan
from minidnn.schedule.actions import (
    HOST,
    PINNED_ALIGNMENT,
    Action,
    Compress,
    Decompress,
    HostRange,
    HostSync,
    HostWait,
    Offload,
    Prefetch,
    Token,
    Wait,
)  # fmt: skip
from minidnn.schedule.tape import Tape


@dataclass(frozen=True)
class Slab:
    """The pinned slab: where each tensor is copied out to (`slots`), where each compressed one is unpacked to
    (`targets`: in the slot where that is still its own), and the order in which tensors come back."""

    slots: Mapping[str, HostRange]
    targets: Mapping[str, HostRange]
    order: tuple[str, ...]


def plan_slab(graph: Graph, plan: Plan, draft: Sequence[Action]) -> Slab | None:
    """Place everything that is in the slab, by the actions of the iteration without compression; None where nothing
    is compressed.

    A slot ends when its tensor has come back or, of a compressed tensor, when `plan.slots` more have been copied out.
    A target begins with the prefetch before its own. Raises ArgumentError for what cannot be compressed.
    """
    if not plan.compress:
        return None
    wrong = [name for name in plan.compress if name not in compressible(graph, plan)]
    if wrong:
        raise ArgumentError(f"compress names {wrong[0]}; it must name offloaded tensors that are not 1 byte wide")
    out = {a.host.name: at for at, a in enumerate(draft) if isinstance(a, Offload) and a.host.kind == "pinned"}
    back = {a.host.name: at for at, a in enumerate(draft) if isinstance(a, Prefetch) and a.host.kind == "pinned"}
    packed = [name for name in out if name in plan.compress]
    successors = {name: next_ for name, next_ in zip(out, list(out)[plan.slots :], strict=False) if name in packed}
    ahead = dict(zip(list(back)[1:], back.values(), strict=False))
    backward = next((at for at, a in enumerate(draft) if a.op >= graph.forward_ops), len(draft))
    stays = []
    for name, start in out.items():
        nbytes, arrived = graph.tensors[name].nbytes, _arrival(draft, back[name])
        if name in successors:
            stays.append(Interval(name, nbytes, start, out[successors[name]]))
            begin = max(ahead.get(name, min(backward, back[name])), out[successors[name]])
            stays.append(Interval(_target(name), nbytes, begin, arrived))
        else:
            stays.append(Interval(name, nbytes, start, arrived))
    ranges = plan_pinned(stays, PINNED_ALIGNMENT).ranges
    slots = {name: HostRange("pinned", name, *ranges[name]) for name in out}
    targets = {name: HostRange("pinned", name, *ranges.get(_target(name), ranges[name])) for name in packed}
    return Slab(slots, targets, tuple(back))


def _target(name: str) -> str:
    return f"{name} unpacked"


def _arrival(draft: Sequence[Action], prefetch: int) -> int:
    """Where somebody waits for the copy-in of action `prefetch`, so that its source is certainly read."""
    lane = draft[prefetch].lane
    token = next((a.signal for a in draft[prefetch:] if a.lane == lane and a.signal is not None), None)
    for at in range(prefetch + 1, len(draft)):
        action = draft[at]
        if token in action.waits and isinstance(action, (HostWait, Wait)):
            return at
        if isinstance(action, HostSync) and action.of == lane:
            return at
    return len(draft)


@dataclass
class Codecs:
    """The codec workers, the slab and who still uses its bytes, at one point of a walk."""

    tape: Tape
    graph: Graph
    plan: Plan
    slab: Slab
    used: dict[str, HostRange]
    busy: list[tuple[HostRange, tuple[Token, ...]]] = field(default_factory=list)  # bytes, and what frees them
    packing: dict[str, tuple[Token, ...]] = field(default_factory=dict)
    unpacking: dict[str, tuple[Token, ...]] = field(default_factory=dict)

    def waits_for_slot(self, name: str) -> bool:
        """Whether the copy-out of a tensor must wait until its slot has been emptied."""
        return name in self.slab.slots and bool(self._users(self.slab.slots[name]))

    def slot(self, name: str) -> HostRange:
        """Where to copy a tensor out to. The host waits until nobody uses these bytes any more."""
        place = self.used[name] = self.slab.slots[name]
        waits = self._users(place)
        if waits:
            self.tape.add(HostWait(lane=HOST, waits=waits, op=self.tape.stage))  # else the copy overwrites it
            self.passed(waits)
        return place

    def pack(self, name: str, copied: Token) -> None:
        """The tensor's copy-out is done at `copied`: pack it then, if it is one to be compressed."""
        if name in self.slab.targets:
            tokens = tuple(self._part(Compress, self.slab.slots[name], k, bounds, (copied,))
                           for k, bounds in self._parts(name))  # fmt: skip
            self.packing[name] = tokens
            self.busy.append((self.slab.slots[name], tokens))

    def begin_backward(self) -> None:
        """Unpack what comes back first."""
        self._unpack(self.slab.order[0])

    def source(self, name: str) -> HostRange:
        """Where a tensor is copied in from. The host waits until it is unpacked."""
        if name not in self.slab.targets:
            return self.slab.slots[name]
        self._unpack(name)
        self.tape.add(HostWait(lane=HOST, waits=self.unpacking[name], op=self.tape.stage))  # else stale bytes come in
        self.passed(self.packing[name])  # packed before it was unpacked, or never
        return self.slab.targets[name]

    def copied_in(self, name: str, token: Token) -> None:
        """The tensor's copy-in is issued; it is done at `token`. Meanwhile the one that comes next is unpacked."""
        place = self.slab.targets.get(name, self.slab.slots[name])
        self.busy.append((place, (token,)))
        following = self.slab.order[self.slab.order.index(name) + 1 :]
        if following:
            self._unpack(following[0])

    def passed(self, tokens: Collection[Token]) -> None:
        """The host has waited for these: nobody after it need wait again."""
        self.busy = [(place, needed) for place, needed in self.busy if not set(needed) <= set(tokens)]

    def _unpack(self, name: str) -> None:
        if name not in self.packing or name in self.unpacking:
            return
        target, packing = self.slab.targets[name], self.packing[name]
        in_place = target == self.slab.slots[name]
        self.used[name if in_place else _target(name)] = target
        # Else it overwrites what is still read there. In place, each of its own parts is in nobody's way but its own;
        # anywhere else it may lie across its slot, shifted.
        waits = tuple(token for token in self._users(target) if not (in_place and token in packing))
        self.unpacking[name] = tuple(
            self._part(Decompress, target, k, bounds, tuple(dict.fromkeys((*waits, packed))))
            for (k, bounds), packed in zip(self._parts(name), packing, strict=True)
        )

    def _parts(self, name: str) -> list[tuple[int, tuple[int, int]]]:
        """(worker, bytes of its part) of a tensor; small tensors do not have a part for every worker."""
        tensor = self.graph.tensors[name]
        word = word_bytes(ITEM_BYTES[tensor.dtype])
        places = split(tensor.nbytes // word, self.plan.codecs)
        return [(k, (p.start * word, p.stop * word)) for k, p in enumerate(places) if p.stop > p.start]

    def _part(
        self, kind: type[Compress | Decompress], host: HostRange, k: int, bounds: tuple[int, int],
        waits: tuple[Token, ...],
    ) -> Token:  # fmt: skip
        token = self.tape.token()
        self.tape.add(
            kind(
                lane=f"codec-{k}", host=host, part=k, start=bounds[0], stop=bounds[1], waits=waits, signal=token,
                op=self.tape.stage,
            )
        )  # fmt: skip
        return token

    def _users(self, place: HostRange) -> tuple[Token, ...]:
        """What to wait for before these bytes may be written."""
        found = [tokens for other, tokens in self.busy if _share(place, other)]
        return tuple(dict.fromkeys(token for tokens in found for token in tokens))


def _share(a: HostRange, b: HostRange) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
