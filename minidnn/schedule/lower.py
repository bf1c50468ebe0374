"""Plan -> Schedule: the only place that knows about streams, events, releases and their order.

The walk runs twice: first without offsets, for the lifetimes that placement needs, then with them, when an allocation
also learns which unfinished releases it must wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from minidnn.graph.graph import Graph
from minidnn.memory.place import EFFORT, lower_bound, place
from minidnn.memory.sizing import smallest_pool
from minidnn.plan.plan import Plan
from minidnn.schedule.actions import (
    ALIGNMENT,
    COMPUTE,
    D2H,
    H2D,
    HOST,
    MEMORY,
    UNPLACED,
    Action,
    Alloc,
    AwaitReleases,
    Buffer,
    Free,
    HostRange,
    HostSync,
    HostWait,
    Launch,
    Offload,
    Prefetch,
    Release,
    Schedule,
    Token,
    Wait,
)  # fmt: skip
from minidnn.schedule.compress import Codecs, Slab, plan_slab
from minidnn.schedule.lifetimes import lifetimes, trace
from minidnn.schedule.needs import Needs
from minidnn.schedule.region import persistent_region
from minidnn.schedule.tape import Tape
from minidnn.units import round_up

RELEASE_WORKERS = 2


def walk(
    graph: Graph, plan: Plan, offsets: Mapping[str, int] | None = None, persistent: Mapping[str, int] | None = None,
    slab: Slab | None = None,
) -> Walk:  # fmt: skip
    """Lower `plan`; `offsets` gives each stay (`Buffer.key`) its offset in the pool, None leaves all unplaced. Without
    a `slab` nothing is compressed."""
    buffers, nbytes = persistent_region(graph, plan, persistent)
    lowering = Walk(graph, plan, offsets, buffers, nbytes)
    if slab:
        lowering.codecs = Codecs(lowering.tape, graph, plan, slab, lowering.pinned)
    lowering.run()
    return lowering


@dataclass
class Walk:
    """One pass over the stages. `tape` is the result; the other fields are what is true at this point of it."""

    graph: Graph
    plan: Plan
    offsets: Mapping[str, int] | None
    persistent: tuple[Buffer, ...]
    persistent_bytes: int
    tape: Tape = field(default_factory=Tape)
    live: dict[str, Buffer] = field(default_factory=dict)  # tensor -> its present stay on the device
    instances: dict[str, int] = field(default_factory=dict)
    arriving: dict[str, Token] = field(default_factory=dict)  # prefetched, copy-in perhaps not done
    releasing: list[tuple[Buffer, Token]] = field(default_factory=list)  # release issued, perhaps not done
    stored: dict[str, Token] = field(default_factory=dict)  # copied out on a lane of its own, perhaps not done
    fresh: set[str] = field(default_factory=set)  # written on compute since the host last waited for that lane
    pinned: dict[str, HostRange] = field(default_factory=dict)
    codecs: Codecs | None = None
    batch_read: Token | None = None  # an early batch: nobody reads this iteration's input any more
    workers: count[int] = field(default_factory=count)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Emit the whole iteration."""
        self.live = {b.tensor: b for b in self.persistent}
        self._load_batch()
        for start, stop in self.plan.stages:
            self.tape.stage = start
            if start >= self.graph.forward_ops:
                self._await_releases()
                if self.codecs:
                    self.codecs.begin_backward()
            self._stage(start, stop)
        self._await_releases()
        self._return_results()
        self._barrier()

    def _load_batch(self) -> None:
        """The batch, its labels and the step scalars come in from the batch slot; an early batch before the iteration
        in front has ended."""
        for name in self.needs.early:
            self._from_slot(name)
        if self.needs.early:
            self.tape.order(COMPUTE, H2D)  # what follows is overwritten only when that iteration has ended
        for name in self.needs.external:
            if name not in self.live:
                self._alloc(name, lane=self._lane_in)
            if name not in self.needs.early:
                self._from_slot(name)
        if self.plan.lifetime == "iteration":
            for name in self.needs.intermediates:
                if name not in self.live and name not in self.plan.reserve:
                    self._alloc(name)

    def _stage(self, start: int, stop: int) -> None:
        new = [n for n in self.needs.made(start, stop) if n not in self.live]
        missing = [n for n in self.needs.touched(start, stop) if n not in new and n not in self.live]
        ahead = [n for n in self.plan.prefetch.get(start, ()) if n not in self.live and n not in missing]
        workspace = max((self.plan.algorithm(op).workspace for op in self.graph.ops[start:stop]), default=0)

        for name in missing:
            self._fetch(name)
        later: list[str] = []
        if self.plan.order == "prefetch-first":
            for name in ahead:
                self._fetch(name, later)
        for name in new:
            self._alloc(name)
        space = self._alloc(f"workspace@{start}", workspace) if workspace else None
        if self.plan.order != "prefetch-first":
            for name in ahead:
                self._fetch(name, later)

        leaving = self.needs.leaving(start, stop)
        # With host waits a copy-out runs beside the last op that reads its source; without, as soon as that is made.
        departing = leaving if self._eager else self.needs.completed(start, stop)
        # Where the host must wait for a codec, it has better launched the computation before.
        at_once = [n for n in departing if n not in new and self._eager and not self._waits_for_slot(n)]
        for name in at_once:
            self._copy_out(name)
        self._await_arrivals(start, stop)
        for i in range(start, stop):
            self._launch(i, space)
        if self.needs.reads_batch_last(start, stop):
            self.batch_read = self.tape.record(COMPUTE)
        for name in later:
            self._bring(name)
        if not self._eager:  # before the copy-outs below: a free that queues behind them on their lane comes too late
            self._leave([n for n in leaving if n not in departing])
            leaving = [n for n in leaving if n in departing]
        for name in departing:
            if name not in at_once:
                self._copy_out(name)
        self._end_of_stage(start, stop, leaving, space)

    def _end_of_stage(self, start: int, stop: int, leaving: list[str], space: Buffer | None) -> None:
        """Wait as the plan's discipline says, then free what ends here."""
        if self._eager:
            self._host_sync(COMPUTE)
        if self.plan.sync == "both":
            self._host_sync(MEMORY)
        ended = [self.live[n] for n in self.needs.ending(start, stop) if n not in leaving]
        self._free([*([space] if space else []), *ended])
        self._leave(leaving)

    def _leave(self, names: list[str]) -> None:
        """These offloaded tensors are not read again before backward."""
        for name in names:
            buffer = self.live.pop(name)
            if name in self.graph.on_host or self.plan.sync == "both":
                self._free([buffer])
            else:
                self._release(buffer)

    def _return_results(self) -> None:
        """The loss (inference: and the network's output) goes back to the slot; then nothing is left in the pool."""
        results = [n for n in self.needs.results if n in self.live]
        for name in results:
            self._copy_out(name, HostRange("slot", name, 0, self.graph.tensors[name].nbytes))
        kept = {b.key for b in self.persistent}
        rest = [b for b in self.live.values() if b.key not in kept]
        if self._eager:
            self._host_sync(MEMORY)
            self._free(rest)
        else:
            self._free(rest, D2H)  # the copy of the results came after everything on compute

    def _barrier(self) -> None:
        """Iterations meet here: no lane enters the next one before all have finished this one. Only an early batch may
        come in as soon as this one has been read; behind it the lane waits for the others, see `_load_batch`."""
        if self._eager:
            return  # the host has just waited for both lanes
        lanes = [lane for lane in (COMPUTE, D2H, H2D) if any(a.lane == lane for a in self.actions)]
        done = {lane: self.tape.record(lane) for lane in lanes}
        for lane in lanes:
            others = tuple(token for other, token in done.items() if other != lane)
            if lane == H2D and self.needs.early:
                others = () if self.batch_read is None else (self.batch_read,)
            if others:
                self.tape.add(Wait(lane=lane, waits=others))

    @cached_property
    def needs(self) -> Needs:
        """What graph and plan say of each stage's tensors."""
        return Needs(self.graph, self.plan, frozenset(b.tensor for b in self.persistent))

    @property
    def stage(self) -> int:
        """The op that a stage begins with: what is issued belongs to it."""
        return self.tape.stage

    @property
    def actions(self) -> list[Action]:
        """All that was issued."""
        return self.tape.actions

    # -- actions ---------------------------------------------------------------------------------------------------

    @property
    def _eager(self) -> bool:
        return self.plan.sync != "none"

    @property
    def _lane_in(self) -> str:
        """The lane of copy-ins: the papers' one memory stream, or, without host waits, one for each direction."""
        return MEMORY if self._eager else H2D

    @property
    def _lane_out(self) -> str:
        return MEMORY if self._eager else D2H

    def _alloc(self, name: str, nbytes: int | None = None, lane: str = COMPUTE) -> Buffer:
        """A new stay of the tensor, on the lane of its first writer (in eager modes on the host)."""
        instance = self.instances.get(name, 0)
        self.instances[name] = instance + 1
        size = nbytes or self.plan.reserve.get(name) or self.graph.tensors[name].nbytes
        offset = UNPLACED if self.offsets is None else self.persistent_bytes + self.offsets[f"{name}#{instance}"]
        buffer = Buffer(name, instance, offset, size)
        waits = self._overwritten(buffer, lane)
        if self._eager:
            self.tape.add(Alloc(lane=HOST, buffer=buffer, waits=waits, op=self.stage))
        else:
            if waits:
                self.tape.add(Wait(lane=lane, waits=waits, op=self.stage))
            self.tape.add(Alloc(lane=lane, buffer=buffer, op=self.stage))
        self.live[name] = buffer
        return buffer

    def _overwritten(self, buffer: Buffer, lane: str) -> tuple[Token, ...]:
        """Tokens of the releases that may still hold bytes of this range: nobody may use it before."""
        if buffer.offset == UNPLACED:
            return ()
        hit = [pair for pair in self.releasing if pair[0].overlaps(buffer)]
        if self._eager or lane == COMPUTE:  # the host's wait, or compute's, also holds up what follows on other lanes
            self.releasing = [pair for pair in self.releasing if pair not in hit]
        return tuple(token for _, token in hit)

    def _from_slot(self, name: str) -> None:
        self._copy_in(name, HostRange("slot", self.graph.on_host[name], 0, self.graph.tensors[name].nbytes))

    def _copy_in(self, name: str, source: HostRange) -> None:
        buffer = self.live[name]
        self.tape.add(Prefetch(lane=self._lane_in, buffer=buffer, host=source, writes=(buffer,), op=self.stage))
        self.arriving[name] = self.tape.record(self._lane_in)

    def _fetch(self, name: str, later: list[str] | None = None) -> None:
        """Bring an offloaded tensor back: a new stay, and its copy-in. Where that waits for a codec, it may come
        `later`."""
        if not self._eager:
            self.tape.order(COMPUTE, H2D)  # the range was another buffer's, last used on compute
        if name in self.stored:
            self.tape.add(Wait(lane=H2D, waits=(self.stored[name],), op=self.stage))  # the source is still written
        self._alloc(name, lane=self._lane_in)
        if later is not None and self.codecs and name in self.plan.compress:
            later.append(name)
        else:
            self._bring(name)

    def _bring(self, name: str) -> None:
        """The copy-in of an offloaded tensor."""
        if name in self.graph.on_host:
            self._from_slot(name)
            return
        self._copy_in(name, self.codecs.source(name) if self.codecs else self.pinned[name])
        if self.codecs:
            self.codecs.copied_in(name, self.arriving[name])

    def _waits_for_slot(self, name: str) -> bool:
        return self.codecs is not None and self.codecs.waits_for_slot(name)

    def _copy_out(self, name: str, target: HostRange | None = None) -> None:
        if name in self.graph.on_host:
            return  # the host still has the batch
        buffer = self.live[name]
        if name in self.fresh:
            self.tape.order(COMPUTE, self._lane_out)  # the copy must not start before its source is written
        place = target or (self.codecs.slot(name) if self.codecs else self._pinned_range(buffer))
        self.tape.add(Offload(lane=self._lane_out, buffer=buffer, host=place, reads=(buffer,), op=self.stage))
        if self.codecs and target is None and name in self.plan.compress:
            self.codecs.pack(name, self.tape.record(self._lane_out))

    def _pinned_range(self, buffer: Buffer) -> HostRange:
        """Without compression everything has its own place in the slab."""
        offset = max((r.offset + r.nbytes for r in self.pinned.values()), default=0)
        place = HostRange("pinned", buffer.tensor, round_up(offset, ALIGNMENT), buffer.nbytes)
        self.pinned[buffer.tensor] = place
        return place

    def _await_arrivals(self, start: int, stop: int) -> None:
        """What the stage reads must have arrived: the host waits in eager modes, else the compute lane does."""
        for name in dict.fromkeys(n for op in self.graph.ops[start:stop] for n in op.tensors):
            if name in self.arriving:
                token = self.arriving.pop(name)
                if self._eager:
                    self.tape.add(HostWait(lane=HOST, waits=(token,), op=self.stage))
                    if self.codecs:
                        self.codecs.passed((token,))
                else:
                    self.tape.add(Wait(lane=COMPUTE, waits=(token,), op=self.stage))

    def _launch(self, index: int, space: Buffer | None) -> None:
        op = self.graph.ops[index]
        algorithm = self.plan.algorithm(op)
        operands = tuple((argument, self.live[name]) for argument, name in op.bindings)
        used = space if space and algorithm.workspace else None
        reads = tuple(dict.fromkeys(self.live[n] for _, n in op.reads))
        writes = tuple(dict.fromkeys([*(self.live[n] for _, n in op.writes), *([used] if used else [])]))
        self.tape.add(
            Launch(
                lane=COMPUTE, launch=op, algorithm=algorithm.name, operands=operands, workspace=used,
                reads=reads, writes=writes, op=index,
            )
        )  # fmt: skip
        self.fresh.update(n for _, n in op.writes)

    def _host_sync(self, lane: str) -> None:
        self.tape.add(HostSync(lane=HOST, of=lane, op=self.stage))
        if lane == COMPUTE:
            self.fresh.clear()
        else:
            if self.codecs:
                for token in self.arriving.values():
                    self.codecs.passed((token,))
            self.arriving.clear()

    def _free(self, buffers: list[Buffer], lane: str | None = None) -> None:
        if buffers:
            place = lane or (HOST if self._eager else COMPUTE)
            self.tape.add(Free(lane=place, frees=tuple(buffers), op=self.stage))
            for b in buffers:
                self.live.pop(b.tensor, None)

    def _release(self, buffer: Buffer) -> None:
        """Free an offloaded buffer when its copy-out is done: a release worker does, or the memory lane itself."""
        until = self.plan.free_before.get(buffer.tensor, self._next_stage)
        if self._eager:
            copied = self.tape.record(MEMORY)
            token, lane = self.tape.token(), f"release-{next(self.workers) % RELEASE_WORKERS}"
            release = Release(lane=lane, frees=(buffer,), waits=(copied,), signal=token, until=until, op=self.stage)
            self.tape.add(release)
        else:
            self.tape.order(COMPUTE, D2H)  # the stage that has just been issued still reads it
            self.tape.add(Free(lane=D2H, frees=(buffer,), until=until, op=self.stage))
            token = self.stored[buffer.tensor] = self.tape.record(D2H)
        self.releasing.append((buffer, token))

    @property
    def _next_stage(self) -> int:
        return next((stop for start, stop in self.plan.stages if start == self.stage), len(self.graph.ops))

    def _await_releases(self) -> None:
        """Eager modes: after forward the host waits for all releases. Else the ranges that are re-used wait."""
        if not self._eager or not self.releasing:
            return
        self.tape.add(AwaitReleases(lane=HOST, waits=tuple(token for _, token in self.releasing), op=self.stage))
        self.releasing.clear()


def lower(
    graph: Graph, plan: Plan, *, fit: str | None = None, limit: int | None = None, effort: int = EFFORT,
    persistent: Mapping[str, int] | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of a plan, with every buffer's offset.

    Offsets come from offline placement, which stops early at `limit` pool bytes or after `effort`; or, where `fit`
    names a heuristic, from the pool run once with it at the smallest size that suffices. `persistent` gives tensors
    that outlive the iteration the offsets that another schedule of the same arena gave them.
    """
    draft = walk(graph, plan, None, persistent)
    stays = lifetimes(draft.actions)
    bound = lower_bound(stays, ALIGNMENT)
    if fit is None and plan.offsets:
        offsets = plan.offsets
    elif fit is None:
        offsets = place(stays, limit=limit, alignment=ALIGNMENT, effort=effort).offsets
    else:
        offsets = smallest_pool(trace(graph, plan, draft.actions), fit).offsets
    # A heuristic may leave the end of the pool that it was searched with empty: nobody needs to take that.
    pool_bytes = max((round_up(offsets[s.id] + s.nbytes, ALIGNMENT) for s in stays), default=0)
    final = walk(graph, plan, offsets, persistent, plan_slab(graph, plan, draft.actions))
    return Schedule(
        graph, plan, tuple(final.actions), final.persistent, final.persistent_bytes, pool_bytes, final.pinned,
        "planned", fit or "placed", bound,
    )  # fmt: skip
