"""An independent oracle: the allocation trace of one vDNN iteration, made from the papers' rules alone.

It knows layers as rows of bytes, and walks them forward and backward as vDNN++ sections II-B and IV say. Nothing here
comes from the package's own lowering, whose traces are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minidnn.memory.trace import Allocate, Event, Free, Trace

MiB = 2**20
CONV, POOL, FC, SOFTMAX = "conv", "pool", "fc", "softmax"


@dataclass(frozen=True)
class Row:
    """One layer: kind, and bytes of its input, output, weights and biases (fp32)."""

    kind: str
    x: int
    y: int
    weight: int = 0
    bias: int = 0


@dataclass
class Shape:
    """Builds rows; `c`, `h`, `w` is the shape of one sample so far."""

    batch: int
    c: int
    h: int
    w: int
    rows: list[Row] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return 4 * self.batch * self.c * self.h * self.w

    def conv(self, channels: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        x, weight = self.nbytes, 4 * channels * self.c * kernel * kernel
        self._window(kernel, stride, padding)
        self.c = channels
        self.rows.append(Row(CONV, x, self.nbytes, weight, 4 * channels))

    def pool(self, kernel: int, stride: int) -> None:
        x = self.nbytes
        self._window(kernel, stride, 0)
        self.rows.append(Row(POOL, x, self.nbytes))

    def fc(self, features: int) -> None:
        x, weight = self.nbytes, 4 * features * self.c * self.h * self.w
        self.c, self.h, self.w = features, 1, 1
        self.rows.append(Row(FC, x, self.nbytes, weight, 4 * features))

    def softmax(self) -> None:
        self.rows.append(Row(SOFTMAX, self.nbytes, self.nbytes))

    def _window(self, kernel: int, stride: int, padding: int) -> None:
        self.h = (self.h + 2 * padding - kernel) // stride + 1
        self.w = (self.w + 2 * padding - kernel) // stride + 1


def alexnet(batch: int) -> list[Row]:
    """The paper's AlexNet: ungrouped, without LRN and dropout."""
    s = Shape(batch, 3, 227, 227)
    s.conv(96, 11, stride=4)
    s.pool(3, 2)
    s.conv(256, 5, padding=2)
    s.pool(3, 2)
    for channels in (384, 384, 256):
        s.conv(channels, 3, padding=1)
    s.pool(3, 2)
    for features in (4096, 4096, 1000):
        s.fc(features)
    s.softmax()
    return s.rows


def vgg(batch: int, extra: int = 0) -> list[Row]:
    """VGG-16, or with `extra` more convolutions in each of the five groups (20: VGG-116, 35: VGG-191)."""
    s = Shape(batch, 3, 224, 224)
    for channels, convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convs + extra):
            s.conv(channels, 3, padding=1)
        s.pool(2, 2)
    for features in (4096, 4096, 1000):
        s.fc(features)
    s.softmax()
    return s.rows


def network(name: str) -> list[Row]:
    """A network of the paper's tables, such as `AlexNet(256)`, `VGG-16(64)` or `VGG-116(32)`."""
    kind, batch = name.removesuffix(")").split("(")
    if kind == "AlexNet":
        return alexnet(int(batch))
    return vgg(int(batch), (int(kind.removeprefix("VGG-")) - 16) // 5)


def offloaded_inputs(rows: Sequence[Row], mode: str) -> set[int]:
    """Layers whose X leaves the device. X0 always does: it is never copied out, but freed, and copied in again."""
    convs = [i for i, row in enumerate(rows) if row.kind == CONV]
    chosen = {
        "none": [],
        "all": [i for i, row in enumerate(rows) if row.kind in (CONV, POOL)],
        "conv": convs,
        "aconv": convs[::2],
    }[mode]
    return {0, *chosen}


def prefetches(rows: Sequence[Row], offloaded: set[int]) -> dict[int, int]:
    """m -> i: during the backward of layer m the input of layer i comes back. One at most, and none beyond a conv."""
    found: dict[int, int] = {}
    for m in range(len(rows) - 1, 0, -1):
        if rows[m].kind == SOFTMAX:
            continue
        for i in range(m - 1, -1, -1):
            if i in offloaded and i not in found.values():
                found[m] = i
                break
            if rows[i].kind == CONV:
                break
    return found


def vdnn_trace(
    rows: Sequence[Row], mode: str, order: str = "prefetch-first", input_twice: bool = False, delay: int = 0
) -> Trace:
    """One iteration of vDNN with memory-optimal algorithms (no workspace).

    `input_twice`: X0 is not freed in forward and yet allocated again at its prefetch, as the published tables count.
    `delay`: releases of forward come that many layers after their copy-out, as vDNN++ allows.
    """
    offloaded = offloaded_inputs(rows, mode)
    forward = _forward(rows, offloaded, {0} if input_twice else set(), delay)
    backward = _backward(rows, offloaded, order)
    return tuple(forward + backward + ([Free("X0", "end")] if input_twice else []))


def _forward(rows: Sequence[Row], offloaded: set[int], stays: set[int], delay: int) -> list[Event]:
    role = {True: "offloaded", False: "kept"}
    events: list[Event] = [Allocate("X0", rows[0].x, role[True], "forward 0")]
    due: dict[int, list[int]] = {}
    last = len(rows) - 1
    for i, row in enumerate(rows):
        if row.kind != SOFTMAX:  # in place
            events.append(Allocate(f"X{i + 1}", row.y, role[i + 1 in offloaded], f"forward {i}"))
        if i in offloaded - stays:
            due.setdefault(min(i + delay, last), []).append(i)
        events += [Free(f"X{j}", f"forward {i}") for j in due.pop(i, ())]
    return events


def _backward(rows: Sequence[Row], offloaded: set[int], order: str) -> list[Event]:
    top = len(rows) - 1 if rows[-1].kind == SOFTMAX else len(rows)  # softmax passes its dY on in place
    events: list[Event] = [Allocate(f"dX{top}", rows[top - 1].y, "gradient", f"backward {top}")]
    plan = prefetches(rows, offloaded)
    names = {i: f"X{i}" for i in range(top + 1)}

    def fetch(i: int, at: str) -> Event:
        names[i] = f"X{i}'"
        return Allocate(names[i], rows[i].x, "prefetched", at)

    for m in range(top - 1, -1, -1):
        row, at = rows[m], f"backward {m}"
        if m in offloaded and names[m] == f"X{m}":
            events.append(fetch(m, at))  # no layer before fetched it
        ahead = [fetch(plan[m], at)] if m in plan else []
        own: list[Event] = [Allocate(f"dX{m}", row.x, "gradient", at)] if m else []
        parameters = {f"dW{m}": row.weight, f"db{m}": row.bias} if row.weight else {}
        own += [Allocate(id, nbytes, "weight_gradient", at) for id, nbytes in parameters.items()]
        events += ahead + own if order == "prefetch-first" else own + ahead
        events += [Free(id, at) for id in (*parameters, names[m + 1], f"dX{m + 1}")]
    events.append(Free(names[0], "backward 0"))
    return events


def driver_rounded(nbytes: Iterable[int]) -> int:
    """What cudaMalloc takes for a list of requests: large ones are rounded up to 2 MiB, small ones share 2 MiB."""
    sizes = list(nbytes)
    large = sum(-(-size // (2 * MiB)) for size in sizes if size >= MiB)
    small = -(-sum(size for size in sizes if size < MiB) // (2 * MiB))
    return (large + small) * 2 * MiB


def parameters(rows: Sequence[Row]) -> list[int]:
    """Bytes of the weights and biases, which live outside the pool."""
    return [size for row in rows for size in (row.weight, row.bias) if size]
