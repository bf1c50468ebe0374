"""The checker: is a schedule right, on every machine and at every speed? It shares no code with lowering or the pool.

Two questions, both over two iterations in a row:

- Issue order is one possible order of events. Carried out in it, does every read see what the graph says it should?
- Is every pair of conflicting accesses to the same bytes ordered by happens-before? Then all other possible orders
  of events give what issue order gives.

An allocation, a write and a free all change bytes; a read does not. Two accesses conflict when at least one changes.
"""

from __future__ import annotations

from minidnn.errors import ScheduleError
from minidnn.graph.tensor import FROM_HOST, Role
from minidnn.schedule.actions import (
    COMPUTE,
    H2D,
    Action,
    Alloc,
    Buffer,
    Compress,
    Copy,
    Free,
    HostRange,
    Launch,
    Offload,
    PartAction,
    Prefetch,
    Release,
    Schedule,
)
from minidnn.schedule.contents import Cells, Content, Place, Versions
from minidnn.schedule.finding import Finding, Findings
from minidnn.schedule.form import check_form
from minidnn.schedule.order import happens_before
from minidnn.schedule.outcomes import in_outcome, outcomes

__all__ = ["Finding", "check", "verify"]

ITERATIONS = 2
"""Conflicts between iterations k and k + 2 follow: an action is ordered behind itself one iteration earlier."""
ON_DEMAND = frozenset({"codec", "cancelled"})
"""Kinds of lanes that the next iteration enters only behind a copy of its own."""
HAZARDS = {
    "slot": "may still use the batch slot", "barrier": "may not be done", "early": "may still use the batch's place",
}  # fmt: skip
SENTENCES = 3


def check(schedule: Schedule) -> tuple[Finding, ...]:
    """All that is wrong with a schedule; empty when it is right.

    Rules: `lane`, `token`, `binding` (operands, algorithm, workspace), `ops` (each once), `arena` (offsets, sizes,
    peak), `live` (used, freed or begun at the wrong time), `leak`, `content` (a read sees the wrong bytes), `race` (two
    accesses to a buffer without order), `overlap` (two buffers on the same bytes without order), `pinned`, `slot`,
    `codec` (what is unpacked was not packed so) and `barrier` (the next iteration may start too early). With placement
    "live" the byte rules do not apply. Compressions that may be cancelled are looked at in every outcome.
    """
    findings = Findings(schedule.actions)
    check_form(schedule, findings)
    for cancelled in outcomes(schedule.actions):
        findings.outcome = f", when the compression of {', '.join(sorted(cancelled))} is cancelled" if cancelled else ""
        Walk(schedule, findings, cancelled).run()
    return tuple(findings.found.values())


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError with the first findings, if there are any."""
    found = check(schedule)
    if found:
        rest = f"; and {len(found) - SENTENCES} more" if len(found) > SENTENCES else ""
        raise ScheduleError(f"{schedule.plan.mode}: {'; '.join(f.text for f in found[:SENTENCES])}{rest}")


class Walk:
    """Carries the actions out in issue order on contents instead of bytes."""

    def __init__(self, schedule: Schedule, findings: Findings, cancelled: frozenset[str]) -> None:
        self.schedule, self.graph, self.findings, self.cancelled = schedule, schedule.graph, findings, cancelled
        self.order = happens_before(in_outcome(schedule.actions, cancelled), ITERATIONS)
        self.versions = Versions.of(schedule.graph)
        self.placed = schedule.placement == "planned"
        self.early = {b for b in schedule.persistent if self._role(b.tensor) is Role.INPUT}
        allocs = [a.buffer for a in schedule.actions if isinstance(a, Alloc)] if self.placed else []
        self.arena = Cells([(b.offset, b.end) for b in allocs], "free bytes")
        hosts = [a.host for a in schedule.actions if isinstance(a, Copy)]
        parts = [a.slab for a in schedule.actions if isinstance(a, PartAction)]
        whole = [(r.offset, r.offset + r.nbytes) for r in hosts if r.kind == "pinned"]
        self.slab = Cells([*whole, *parts], "pinned bytes")
        self.packed: dict[tuple[str, int, int, int], tuple[Content | None, int]] = {}  # by tensor and part: what, who
        self.slot: dict[str, Place] = {}
        self.stays: dict[str, Place] = {}  # by Buffer.key; those that ended stay here, for the sentences
        self.iteration = 0
        self.begun: set[str] = set()
        self.made: dict[str, int] = {}  # tensor -> version that was written last in this iteration
        self.launched: dict[int, int] = {}
        self.freed: dict[int, int] = {}  # lane -> the last free that the lane itself carries out
        for buffer in schedule.persistent:
            self.stays[buffer.key] = Place(buffer.key, buffer)

    def run(self) -> None:
        """Both iterations, and what must hold between and after them."""
        count = len(self.schedule.actions)
        for self.iteration in range(ITERATIONS):
            self._begin()
            for i, action in enumerate(self.schedule.actions):
                self._visit(self.iteration * count + i, action)
            self._end()
        self._entry()
        self._barrier(range((ITERATIONS - 1) * count, ITERATIONS * count))

    # -- an iteration ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What outlives the iteration before is version 0 of this one; the batch is a new one, in another slot."""
        self.begun.clear()
        self.made.clear()
        self.launched.clear()
        self.slot.clear()
        for buffer in self.schedule.persistent:
            outlives = self._outlives(buffer.tensor)
            self.stays[buffer.key].content = Content(buffer.tensor, self.iteration, 0) if outlives else None

    def _outlives(self, name: str) -> bool:
        """Whether the value goes on into the next iteration: weights do, this batch's labels and loss do not."""
        tensor = self.graph.tensors.get(name)
        return tensor is not None and self.graph.is_persistent(name) and tensor.role not in (*FROM_HOST, Role.LOSS)

    def _role(self, name: str) -> Role | None:
        tensor = self.graph.tensors.get(name)
        return tensor.role if tensor else None

    def _visit(self, at: int, action: Action) -> None:
        if isinstance(action, Alloc):
            self._alloc(at, action.buffer)
        elif isinstance(action, Launch):
            self._launch(at, action)
        elif isinstance(action, Offload):
            self._copy_out(at, action)
        elif isinstance(action, Prefetch):
            self._copy_in(at, action)
        elif isinstance(action, PartAction):
            if action.host.name not in self.cancelled:
                (self._pack if isinstance(action, Compress) else self._unpack)(at, action)
        elif isinstance(action, Free):
            for buffer in action.frees:
                self._free(at, buffer)

    def _end(self) -> None:
        """Every op ran, every result went back, nothing is left in the pool."""
        graph, add = self.graph, self.findings.add
        for i, op in enumerate(graph.ops):
            if i not in self.launched:
                add("ops", f"op {op.name} is never launched")
        kept = {b.key for b in self.schedule.persistent}
        for key, place in self.stays.items():
            if place.live and key not in kept:
                add("leak", f"{key} is still there at the end of the iteration; {{0}} used it last", place.changed)
            elif key in kept and not place.live:
                add("leak", f"{key} must still be there at the end of the iteration; {{0}} frees it", place.changed)
        for buffer in self.schedule.persistent:
            newest = Content(buffer.tensor, self.iteration, self.versions.last.get(buffer.tensor, 0))
            if (newest.version or self._outlives(buffer.tensor)) and self.stays[buffer.key].content != newest:
                add("content", f"{buffer.key} does not hold its newest value at the end of the iteration")
        for (name, *_), (_, at) in self.packed.items():
            add("leak", f"{{0}} packs {name}, and nothing unpacks it", at)
        self.packed.clear()
        results = [n for n, t in graph.tensors.items() if t.role is Role.LOSS] or [graph.output]
        for name in results:
            if name not in self.slot or self.slot[name].content is None:
                add("slot", f"{name} is not copied back to the batch slot")

    def _barrier(self, last: range) -> None:
        """The next iteration (of any schedule in this arena) must find everything done, on whichever lane it starts.
        Where batches come early it enters the copy-ins' lane when this one's batch has been read; `_entry` sees to
        that it does no harm there."""
        effects: dict[tuple[str, int], int] = {}  # (rule, lane) -> the last action that touches memory
        for at in last:
            action = self.schedule.actions[at % len(self.schedule.actions)]
            part = isinstance(action, PartAction) and action.host.name not in self.cancelled
            if part or isinstance(action, (Copy, Launch, Free)):
                effects["barrier", self.order.lanes[at]] = at
                if isinstance(action, Copy) and action.host.kind == "slot":
                    effects["slot", self.order.lanes[at]] = at
                if self.early.intersection((*action.reads, *action.writes)):
                    effects["early", self.order.lanes[at]] = at
        for (rule, _), at in effects.items():
            for lane in self.order.ends:
                apart = lane.partition("-")[0] in ON_DEMAND or (rule == "early") != (lane == H2D and bool(self.early))
                if not apart and not self.order.before_end(at, lane):
                    text = f"{{0}} {HAZARDS[rule]} when the next iteration enters {lane}"
                    self.findings.add("slot" if rule == "slot" else "barrier", text, at)

    def _entry(self) -> None:
        """Only an early batch comes in before the iteration in front has ended, which is when the first action on
        compute may start."""
        actions = self.schedule.actions
        first = next((at for at, action in enumerate(actions) if action.lane == COMPUTE), len(actions))
        for at, action in enumerate(actions if self.early else ()):
            if action.lane != H2D or not isinstance(action, (Alloc, Copy, Free)):
                continue
            ordered = first < at and self.order.before(first, at)
            if not ordered and not (isinstance(action, Prefetch) and action.buffer in self.early):
                self.findings.add("barrier", "{0} may be too early: the iteration in front may still compute", at)

    # -- actions ---------------------------------------------------------------------------------------------------

    def _alloc(self, at: int, buffer: Buffer) -> None:
        before = self.stays.get(buffer.key)
        if before and before.live:
            self.findings.add("live", f"{{0}} begins {buffer.key}, which is there already", at)
            return
        if buffer.key in self.begun:
            self.findings.add("live", f"{{0}} begins {buffer.key} a second time; each stay has its own number", at)
        tensor = self.graph.tensors.get(buffer.tensor)
        if tensor and buffer.nbytes < tensor.nbytes:
            self.findings.add("arena", f"{{0}} takes {buffer.nbytes} bytes; the tensor has {tensor.nbytes}", at)
        self.begun.add(buffer.key)
        place = self.stays[buffer.key] = Place(buffer.key, buffer, changed=at)
        if self.placed:
            self._occupy(place, at)
        else:
            for freed in self.freed.values():  # a run-time pool gives out what was freed in issue order
                if not self.order.before(freed, at):
                    text = f"{{0}} may put {buffer.key} on bytes that {{1}} has not freed yet: no wait between them"
                    self.findings.add("overlap", text, at, freed)

    def _occupy(self, place: Place, at: int) -> None:
        """No other buffer lives on these bytes, and the end of the last one comes first. (Older ones ended before.)"""
        assert place.buffer is not None
        for old in dict.fromkeys(self.arena.at(place.buffer.offset, place.buffer.end)):
            if old.buffer is None:
                continue
            if old.live:
                text = f"{{0}} puts {place.name} on bytes of {old.name}, which is still there"
                self.findings.add("overlap", text, at)
            elif not self.order.before(old.changed, at):
                text = f"{{0}} may put {place.name} on bytes of {old.name} before {{1}} has freed it"
                self.findings.add("overlap", f"{text}: no wait between them", at, old.changed)
        self.arena.fill(place)

    def _free(self, at: int, buffer: Buffer) -> None:
        place = self._at(at, buffer)
        if place is None:
            return
        if buffer in self.schedule.persistent:
            self.findings.add("live", f"{{0}} frees {buffer.key}, which outlives the iteration", at)
            return
        self._change(at, place, "free")
        place.live, place.content = False, None
        if not isinstance(self.schedule.actions[at % len(self.schedule.actions)], Release):
            self.freed[self.order.lanes[at]] = at

    def _launch(self, at: int, action: Launch) -> None:
        if not 0 <= action.op < len(self.graph.ops):
            return
        if action.op in self.launched:
            self.findings.add("ops", "{0} launches an op that {1} has launched", at, self.launched[action.op])
        self.launched[action.op] = at
        for buffer in action.reads:
            place = self._at(at, buffer)
            version = self.versions.read[action.op].get(buffer.tensor)
            if place and version is not None:
                self._read(at, place)
                self._expect(at, place, Content(buffer.tensor, self.iteration, version))
        for buffer in action.writes:
            place = self._at(at, buffer)
            if place is None:
                continue
            self._change(at, place, "write")
            version = self.versions.made[action.op].get(buffer.tensor)
            place.content = None if version is None else Content(buffer.tensor, self.iteration, version)
            if version is not None and self.made.get(buffer.tensor, 0) != version - 1:
                self.findings.add("ops", f"{{0}} writes {buffer.tensor} out of the graph's order", at)
            if version is not None:
                self.made[buffer.tensor] = version

    def _copy_out(self, at: int, action: Offload) -> None:
        buffer, target = action.buffer, action.host
        source = self._at(at, buffer)
        self._fits(at, buffer, target)
        if source is None:
            return
        self._read(at, source)
        content = source.content
        if content is None:
            self.findings.add("content", f"{{0}} copies out {source.name} before anything has written it", at)
        if target.kind == "slot":
            self._expect(at, source, Content(target.name, self.iteration, self.versions.last.get(target.name, 0)))
        for place in self._host_places(target):
            self._change(at, place, "write")
            place.content = content and Content(content.tensor, content.iteration, content.version, target)

    def _copy_in(self, at: int, action: Prefetch) -> None:
        buffer, source = action.buffer, action.host
        target = self._at(at, buffer)
        self._fits(at, buffer, source)
        if target is None:
            return
        places = self._host_places(source)
        for place in places:
            self._read(at, place)
        contents = {place.content for place in places}
        held = contents.pop() if len(contents) == 1 else None
        field = self.graph.on_host.get(buffer.tensor)
        if (field is not None) != (source.kind == "slot") or (field is not None and source.name != field):
            self.findings.add("slot", f"{{0}} takes {buffer.tensor} from {source.name} in {source.kind} memory", at)
        elif field is not None:
            held = Content(buffer.tensor, self.iteration, self.versions.last.get(buffer.tensor, 0))
        elif held is None or (held.tensor, held.iteration, held.copied_to) != (buffer.tensor, self.iteration, source):
            self.findings.add("pinned", f"{{0}} brings in bytes that are not this iteration's {buffer.tensor}", at)
        self._change(at, target, "write")
        target.content = held and Content(held.tensor, held.iteration, held.version)

    def _pack(self, at: int, action: PartAction) -> None:
        """Every byte of the part must hold what the tensor's copy-out brought."""
        start, end = action.slab
        self._inside(at, action, start, end)
        places = self.slab.at(start, end)
        for place in places:
            self._read(at, place)
        contents = {place.content for place in places}
        held = contents.pop() if len(contents) == 1 else None
        if held is None or (held.tensor, held.iteration, held.copied_to) != (
            action.host.name, self.iteration, action.host
        ):  # fmt: skip
            self.findings.add("codec", f"{{0}} packs bytes that are not this iteration's {action.host.name}", at)
        if action.key in self.packed:
            self.findings.add("codec", f"{{0}} packs a part of {action.host.name} for a second time", at)
        self.packed[action.key] = held, at

    def _unpack(self, at: int, action: PartAction) -> None:
        """What was packed of the same part comes back, once."""
        start, end = action.slab
        self._inside(at, action, start, end)
        held, packer = self.packed.pop(action.key, (None, -1))
        if packer < 0:
            self.findings.add("codec", f"{{0}} unpacks a part of {action.host.name} that is not packed", at)
        self._after(at, packer, "{0} may unpack before {1} is done")
        for place in self.slab.at(start, end):
            self._change(at, place, "write")
            place.content = held and Content(held.tensor, held.iteration, held.version, action.host)

    def _inside(self, at: int, action: PartAction, start: int, end: int) -> None:
        host, slab = action.host, self.schedule.pinned_bytes
        if host.kind != "pinned" or not 0 <= host.offset <= start < end <= host.offset + host.nbytes <= slab:
            self.findings.add("pinned", f"{{0}} is about bytes {start} to {end} of {host.kind} memory", at)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _at(self, at: int, buffer: Buffer) -> Place | None:
        """The place of a buffer that an action touches; None (and a finding) where it is not there."""
        place = self.stays.get(buffer.key)
        if place is None:
            self.findings.add("live", f"{{0}} touches {buffer.key}, which nothing has allocated", at)
        elif not place.live:
            self.findings.add("live", f"{{0}} touches {buffer.key} after {{1}} has freed it", at, place.changed)
        elif place.buffer != buffer:
            self.findings.add("live", f"{{0}} takes {buffer.key} to be where it is not", at)
        else:
            return place
        return None

    def _fits(self, at: int, buffer: Buffer, host: HostRange) -> None:
        """A copy moves the whole tensor, inside both its ends."""
        tensor = self.graph.tensors.get(buffer.tensor)
        most = buffer.nbytes if host.kind == "pinned" else tensor.nbytes if tensor else 0
        if tensor is None or not tensor.nbytes <= host.nbytes <= most:
            self.findings.add("pinned", f"{{0}} copies {host.nbytes} bytes; {buffer.key} has {buffer.nbytes}", at)
        if host.kind not in ("pinned", "slot"):
            self.findings.add("pinned", f"{{0}} names host memory of kind {host.kind!r}", at)
        elif host.kind == "pinned" and not 0 <= host.offset <= host.offset + host.nbytes <= self.schedule.pinned_bytes:
            self.findings.add("pinned", f"{{0}} leaves the pinned slab of {self.schedule.pinned_bytes} bytes", at)

    def _host_places(self, host: HostRange) -> list[Place]:
        """The place of a slot's field, or the cells of a range of the pinned slab."""
        if host.kind != "pinned":
            return [self.slot.setdefault(host.name, Place(f"{host.name} in the batch slot"))]
        return self.slab.at(host.offset, host.offset + host.nbytes)

    def _read(self, at: int, place: Place) -> None:
        self._after(at, place.changed, f"{{0}} may read {place.name} before {{1}} is done with it")
        place.readers[self.order.lanes[at]] = at

    def _change(self, at: int, place: Place, verb: str) -> None:
        """Everyone who used the bytes before is done. Earlier readers are behind later ones, or behind a change."""
        for reader in place.readers.values():
            self._after(at, reader, f"{{0}} may {verb} {place.name} while {{1}} still reads it")
        self._after(at, place.changed, f"{{0}} may {verb} {place.name} before {{1}} is done with it")
        place.readers.clear()
        place.changed = at

    def _after(self, at: int, other: int, hazard: str) -> None:
        if other >= 0 and not self.order.before(other, at):
            self.findings.add("race", f"{hazard}: no wait between them", at, other)

    def _expect(self, at: int, place: Place, content: Content) -> None:
        if place.content != content:
            held = place.content
            what = "nothing yet" if held is None else f"version {held.version} of {held.tensor}"
            if held and held.iteration != self.iteration:
                what += " from the iteration before"
            self.findings.add(
                "content", f"{{0}} reads {place.name}, which holds {what}; the graph says version {content.version}", at
            )
