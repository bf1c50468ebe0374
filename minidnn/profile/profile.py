"""The `Profile` type: per op and algorithm its time and workspace, and the link's rates. Always says where from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minidnn.arguments import number, shown
from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph, Target
from minidnn.graph.op import Op


class Shares(NamedTuple):
    """What copies keep of their rates beside a computation, each way: it takes part of the bandwidth on the card that
    they need, and how much goes by the kernel rather than by its op."""

    d2h: float = 1.0
    h2d: float = 1.0


UNDISTURBED = Shares()


def share(value: object) -> float:
    """A copy's share of its rate, checked: above 0, at most 1."""
    return number(value, "shares", 0, 1, bounds="(]")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute an op: its workspace in bytes, its time in ms where known, and what it leaves to copies."""

    name: str = "default"
    workspace: int = 0
    ms: float | None = None
    deterministic: bool = True
    shares: Shares = UNDISTURBED


@dataclass(frozen=True, slots=True)
class Link:
    """Host link: rates in bytes per second each way and latency per copy in ms; `duplex`: both ways at once."""

    d2h: float
    h2d: float
    latency_ms: float = 0.01
    duplex: bool = True

    def ms(self, nbytes: int, to_host: bool) -> float:
        """Time of one copy."""
        return self.latency_ms + nbytes / (self.d2h if to_host else self.h2d) * 1e3

    def fastest(self, other: Link | None) -> Link:
        """The best of two measurements of one link: whatever else uses it makes it slower, never faster. Whether it is
        duplex, the less disturbed one knows."""
        if other is None:
            return self
        quiet = max(self, other, key=lambda link: link.d2h + link.h2d)
        latency_ms = min(self.latency_ms, other.latency_ms)
        return Link(max(self.d2h, other.d2h), max(self.h2d, other.h2d), latency_ms, quiet.duplex)


def op_key(graph: Graph, op: Op) -> str:
    """Key of an op's entries: function, shapes, dtypes, layouts and attributes, so that equal work shares entries."""
    operands = []
    for argument, name in op.bindings:
        t = graph.tensors[name]
        operands.append(f"{argument}={t.dtype}{list(t.shape)}{'' if t.layout == 'NCHW' else t.layout}")
    if op.kind == "update":  # lists of many tensors: their total is what counts
        operands = [f"bytes={sum(graph.tensors[n].nbytes for n in op.tensors)}", f"tensors={len(op.tensors)}"]
    attributes = [f"{k}={v}" for k, v in op.attributes if k != "op"]
    return " ".join([op.function, graph.target.precision, *operands, *attributes])


class HostCosts(NamedTuple):
    """What the host costs in a network, in ms: the fields of a `Profile` of the same names."""

    launch_ms: float
    action_ms: float
    wake_ms: float


@dataclass(frozen=True)
class Profile:
    """Entries by `op_key`; algorithms are listed fastest first. `source`: "measured on ...", "modelled ...", "host"."""

    source: str
    entries: Mapping[str, tuple[Algorithm, ...]] = field(default_factory=dict)
    link: Link | None = None
    launch_ms: float = 0.005
    """Host time to launch an op or a copy, in ms."""
    action_ms: float = 0.005
    """Host time for any other action, in ms: an event, a wait for one, memory taken or given back."""
    wake_ms: float = 0.0
    """What a wait for the device costs on top: the host goes on late and launches the next op more slowly, in ms."""
    scratch_bytes: int = 0
    """What the device's libraries need in every arena, in front of all tensors."""
    target: Target | None = None
    """What the graph was built for that was measured; None: the entries are of no one target."""

    @property
    def measured(self) -> bool:
        """Whether the times were measured on a device."""
        return self.source.startswith("measured")

    def algorithms(self, graph: Graph, op: Op) -> tuple[Algorithm, ...]:
        """The ways to compute an op, fastest first. An op that no entry names has one, without workspace."""
        return self.entries.get(op_key(graph, op), (Algorithm(),))

    def time_ms(self, graph: Graph, op: Op, algorithm: str) -> float:
        """Time of the op with that algorithm. Raises ArgumentError when the profile does not know it."""
        return self.cost(graph, op, algorithm)[0]

    def cost(self, graph: Graph, op: Op, algorithm: str) -> tuple[float, Shares]:
        """Time of the op with that algorithm, and what it leaves to copies. Raises ArgumentError where the profile does
        not know it."""
        for entry in self.algorithms(graph, op):
            if entry.name == algorithm and entry.ms is not None:
                return entry.ms, entry.shares
        raise ArgumentError(
            f"profile ({self.source}) has no time for {op.name} with algorithm {algorithm}; "
            "use a measured profile or name a GPU"
        )

    def save(self, path: Path) -> None:
        """Write as JSON."""
        entries = {key: [_fields(a) for a in algorithms] for key, algorithms in self.entries.items()}
        link = asdict(self.link) if self.link else None
        text = {
            "source": self.source, "launch_ms": self.launch_ms, "action_ms": self.action_ms, "wake_ms": self.wake_ms,
            "scratch_bytes": self.scratch_bytes, "target": asdict(self.target) if self.target else None, "link": link,
            "entries": entries,
        }  # fmt: skip
        Path(path).write_text(json.dumps(text, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. Raises ArgumentError naming the file when it is no profile."""
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
            entries = {str(key): tuple(map(_algorithm, ways)) for key, ways in text["entries"].items()}
            if not all(entries.values()):
                raise ArgumentError("an op without an algorithm; it needs one")
            link = link_of(**text["link"]) if text["link"] else None
            target = Target(**text["target"]) if text.get("target") else None
            scratch, launch_ms = _size(text.get("scratch_bytes", 0)), number(text["launch_ms"], "launch_ms", 0)
            action_ms = number(text.get("action_ms", launch_ms), "action_ms", 0)
            wake_ms = number(text.get("wake_ms", 0.0), "wake_ms", 0)
            return cls(str(text["source"]), entries, link, launch_ms, action_ms, wake_ms, scratch, target)
        except OSError as error:
            raise ArgumentError(
                f"profile {path} cannot be read: {error.strerror}; "
                "give a file that 'minidnn profile' wrote"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ArgumentErrors are ValueErrors
            raise ArgumentError(
                f"profile {path} is damaged or no profile; "
                "give a file that 'minidnn profile' wrote"
            ) from None


def _fields(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm as JSON has it."""
    fields = asdict(algorithm)
    if algorithm.shares == UNDISTURBED:
        del fields["shares"]
    return fields


def _algorithm(fields: dict[str, Any]) -> Algorithm:
    """An algorithm as JSON has it, its numbers checked: a plan that believed wrong ones would be wrong too."""
    found = Algorithm(**fields)
    workspace = _size(found.workspace)
    ms = None if found.ms is None else number(found.ms, "ms", 0, 1e12)
    d2h, h2d = map(share, found.shares)
    return Algorithm(str(found.name), workspace, ms, bool(found.deterministic), Shares(d2h, h2d))


def link_of(d2h: object, h2d: object, latency_ms: object = 0.01, duplex: object = True) -> Link:
    """A link that a file tells of, checked: rates that can be multiplied and divided by, and a latency of 0 or more."""
    if not isinstance(duplex, bool):
        raise ArgumentError(f"duplex is {shown(duplex)}; it must be true or false")
    rates = number(d2h, "d2h", 1, 1e18, "[]"), number(h2d, "h2d", 1, 1e18, "[]")
    return Link(*rates, number(latency_ms, "latency_ms", 0), duplex)


def _size(value: object) -> int:
    """Bytes, below an exbibyte."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**60:
        raise ArgumentError(f"workspace is {shown(value)}; it must be bytes")
    return value
