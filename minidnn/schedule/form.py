"""The part of the checker that looks at one action at a time: lanes, tokens, operands, and where things lie."""

from __future__ import annotations

from collections.abc import Mapping

from minidnn.schedule.actions import (
    COMPUTE,
    D2H,
    H2D,
    HOST,
    MEMORY,
    Action,
    Alloc,
    AwaitReleases,
    Buffer,
    Compress,
    Decompress,
    Free,
    HostSync,
    HostWait,
    Launch,
    Offload,
    PartAction,
    Prefetch,
    Record,
    Release,
    Schedule,
    Wait,
)
from minidnn.schedule.finding import Findings

STREAMS = frozenset({COMPUTE, MEMORY, D2H, H2D})
PLACES = STREAMS | {HOST}
WORKERS: Mapping[type[Action], str] = {Release: "release-", Compress: "codec-", Decompress: "codec-"}
GRAIN = 512
"""Sizes are rounded up to this many bytes, so the peak may lie that far behind the last buffer."""

LANES: Mapping[type[Action], frozenset[str]] = {
    Alloc: PLACES, Free: PLACES, Launch: frozenset({COMPUTE}), Offload: frozenset({MEMORY, D2H}),
    Prefetch: frozenset({MEMORY, H2D}), Record: STREAMS, Wait: STREAMS, HostWait: frozenset({HOST}),
    HostSync: frozenset({HOST}), AwaitReleases: frozenset({HOST}), **dict.fromkeys(WORKERS, frozenset()),
}  # fmt: skip


def check_form(schedule: Schedule, findings: Findings) -> None:
    """Find what is wrong with actions by themselves, with tokens, and with the layout of the arena."""
    for at, action in enumerate(schedule.actions):
        _lane(findings, at, action)
        _waits(findings, at, action)
        _fields(findings, at, action)
        if isinstance(action, Launch):
            _binding(schedule, findings, at, action)
    _tokens(schedule, findings)
    _persistent(schedule, findings)
    if schedule.placement == "planned":
        _pool(schedule, findings)


def _lane(findings: Findings, at: int, action: Action) -> None:
    allowed = LANES.get(type(action))
    if allowed is None:
        findings.add("lane", "{0} is of a kind that the checker does not know", at)
    elif type(action) in WORKERS:
        kind, number = WORKERS[type(action)], action.lane.partition("-")[2]
        if action.lane != kind + number or not number.isdigit():
            findings.add("lane", f"{{0}} is not on a {kind.rstrip('-')} worker's lane", at)
    elif action.lane not in allowed:
        findings.add("lane", f"{{0}} is on the wrong lane; it may be on {', '.join(sorted(allowed))}", at)
    if isinstance(action, HostSync) and action.of not in STREAMS:
        findings.add("lane", f"{{0}} waits for {action.of!r}, which is no stream", at)


def _waits(findings: Findings, at: int, action: Action) -> None:
    """Tokens only where every interpreter looks for them: anywhere else they would order nothing."""
    count = len(action.waits)
    if isinstance(action, (Release, Compress)):
        right = count == 1
    elif isinstance(action, (Wait, HostWait, AwaitReleases, Decompress)):
        right = count >= 1
    else:
        right = count == 0 or (isinstance(action, Alloc) and action.lane == HOST)
    if not right:
        findings.add("token", f"{{0}} waits for {count} tokens, which its kind cannot", at)
    if (action.signal is not None) != isinstance(action, (Record, Release, PartAction)):
        findings.add("token", f"{{0}} signals {action.signal}; records and workers signal a token, no other does", at)


def _fields(findings: Findings, at: int, action: Action) -> None:
    if isinstance(action, Launch):
        right = not action.frees
    elif isinstance(action, Offload):
        right = action.reads == (action.buffer,) and not action.writes + action.frees
    elif isinstance(action, Prefetch):
        right = action.writes == (action.buffer,) and not action.reads + action.frees
    elif isinstance(action, Free):
        right = bool(action.frees) and not action.reads + action.writes
    else:
        right = not action.reads + action.writes + action.frees
    if not right:
        findings.add("binding", "{0} reads, writes or frees other buffers than its kind does", at)


def _binding(schedule: Schedule, findings: Findings, at: int, action: Launch) -> None:
    """A launch binds its op's operands and no others, each tensor to one buffer, and the plan's algorithm."""
    ops, op = schedule.graph.ops, action.launch
    if not 0 <= action.op < len(ops) or ops[action.op] != op:
        findings.add("binding", f"{{0}} is not op {action.op} of the graph", at)
        return
    if tuple((argument, b.tensor) for argument, b in action.operands) != op.bindings:
        findings.add("binding", "{0} does not bind the operands that its op declares", at)
    buffers: dict[str, Buffer] = {}
    for _, buffer in action.operands:
        if buffers.setdefault(buffer.tensor, buffer) != buffer:
            findings.add("binding", f"{{0}} binds {buffer.tensor} to two places", at)
    space = {action.workspace} if action.workspace else set()
    reads = {buffers[name] for _, name in op.reads if name in buffers}
    writes = {buffers[name] for _, name in op.writes if name in buffers} | space
    if set(action.reads) != reads or set(action.writes) != writes:
        findings.add("binding", "{0} says that it touches other buffers than it binds", at)
    algorithm = schedule.plan.algorithm(op)
    if action.algorithm != algorithm.name:
        findings.add("binding", f"{{0}} uses algorithm {action.algorithm}; the plan says {algorithm.name}", at)
    given = action.workspace.nbytes if action.workspace else 0
    if given < algorithm.workspace:
        findings.add("binding", f"{{0}} has {given} bytes of workspace; it needs {algorithm.workspace}", at)
    if action.rows is not None:
        findings.add("ops", f"{{0}} computes rows {action.rows[0]} to {action.rows[1]} only", at)


def _tokens(schedule: Schedule, findings: Findings) -> None:
    """Signalled once, and before (in issue order) anything waits: then every wait ends, and no cycle is possible."""
    signalled: dict[int, int] = {}
    for at, action in enumerate(schedule.actions):
        for token in action.waits:
            if token not in signalled:
                findings.add("token", f"{{0}} waits for token {token}, which nothing before it signals", at)
        if action.signal is not None:
            if action.signal in signalled:
                text = f"{{0}} signals token {action.signal} as {{1}} does"
                findings.add("token", text, at, signalled[action.signal])
            signalled[action.signal] = at


def _persistent(schedule: Schedule, findings: Findings) -> None:
    """The persistent region holds what outlives an iteration, side by side."""
    last: Buffer | None = None
    for buffer in sorted(schedule.persistent, key=lambda b: b.offset):
        if not 0 <= buffer.offset <= buffer.end <= schedule.persistent_bytes:
            findings.add("arena", f"{buffer.key} leaves the persistent region of {schedule.persistent_bytes} bytes")
        if last and last.overlaps(buffer):
            findings.add("overlap", f"{buffer.key} and {last.key} share bytes of the persistent region")
        if not last or buffer.end > last.end:
            last = buffer
        tensor = schedule.graph.tensors.get(buffer.tensor)
        if tensor is None or buffer.nbytes < tensor.nbytes:
            findings.add("arena", f"{buffer.key} has {buffer.nbytes} bytes, too few for its tensor")


def _pool(schedule: Schedule, findings: Findings) -> None:
    """Every buffer lies in the pool, and the pool ends with the highest of them."""
    low, high, top = schedule.persistent_bytes, schedule.peak_bytes, schedule.persistent_bytes
    for at, action in enumerate(schedule.actions):
        if isinstance(action, Alloc):
            buffer = action.buffer
            top = max(top, buffer.end)
            if not low <= buffer.offset <= buffer.end <= high:
                where = f"bytes {buffer.offset} to {buffer.end}"
                findings.add("arena", f"{{0}} puts {buffer.key} at {where}; the pool is {low} to {high}", at)
    if top <= high - GRAIN:
        findings.add("arena", f"the schedule says that its peak is {high} bytes; its buffers end at {top}")
