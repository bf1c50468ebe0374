"""What bytes hold, for the checker: tensors by version instead of numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from minidnn.graph.graph import Graph
from minidnn.schedule.actions import Buffer, HostRange


@dataclass(frozen=True, slots=True)
class Content:
    """What bytes hold: a tensor as its `version`-th write (0: as it came) in an iteration left it."""

    tensor: str
    iteration: int
    version: int
    copied_to: HostRange | None = None  # in host memory: where the copy-out began


@dataclass(slots=True, eq=False)
class Place:
    """Bytes with a history: what they hold, the last action that changed them, and who has read them since."""

    name: str
    buffer: Buffer | None = None
    content: Content | None = None
    changed: int = -1
    readers: dict[int, int] = field(default_factory=dict)  # lane -> its last reader
    live: bool = True


@dataclass(frozen=True, slots=True)
class Versions:
    """Which version of each tensor an op reads (by name) and makes, and the last one of the iteration."""

    read: tuple[dict[str, int], ...]
    made: tuple[dict[str, int], ...]
    last: dict[str, int]

    @classmethod
    def of(cls, graph: Graph) -> Versions:
        """Count the writes in the graph's order."""
        last = dict.fromkeys(graph.tensors, 0)
        read, made = [], []
        for op in graph.ops:
            read.append({name: last[name] for _, name in op.reads})
            made.append({name: last[name] + 1 for _, name in op.writes})
            last |= made[-1]
        return cls(tuple(read), tuple(made), last)


class Cells:
    """A range of memory cut at every border that occurs, so that each buffer covers whole cells."""

    def __init__(self, ranges: Sequence[tuple[int, int]], name: str) -> None:
        self.borders = sorted({border for pair in ranges for border in pair})
        self.places = [Place(f"{name} from {border}") for border in self.borders]

    def at(self, start: int, end: int) -> list[Place]:
        """What lies on the bytes [start, end), cell by cell."""
        return self.places[self._span(start, end)]

    def fill(self, place: Place) -> None:
        """From now on the buffer of `place` lies on its bytes."""
        assert place.buffer is not None
        span = self._span(place.buffer.offset, place.buffer.end)
        self.places[span] = [place] * (span.stop - span.start)

    def _span(self, start: int, end: int) -> slice:
        return slice(bisect_left(self.borders, start), bisect_left(self.borders, end))
