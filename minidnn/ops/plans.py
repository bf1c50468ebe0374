"""What is known about convolution plans: the problem that a plan solves, and the store of plans on disk."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from minidnn.ops.array import Array
from minidnn.profile.profile import Algorithm, HostCosts, Link, Shares, link_of, share
from minidnn.units import round_up

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]
FUSED, ROUNDED = "fused ", "rounded "
"""How the names of plans begin whose epilogue is fused, and of those that leave dW in bf16, for a cast to follow."""
PREPARED = (PADDED, UNFOLDED) = ("padded ", "unfolded ")
"""How the names of plans begin that are plans for other X and W, which are made in the workspace: with zeros for more
channels, or with all values of a window as the channels of a pixel."""
SPLIT = "split "
"""How the names of plans begin that run over a batch in parts, one after another: `split 4 eng1`."""
BATCHED = ("x", "y", "dy", "dx", "mask")
"""Operands whose first axis is the batch's."""
SPLITS = (4, 16)
"""Into at most so many parts a batch is split. cuDNN's Winograd and FFT engines want workspaces in proportion to it."""
FORMAT = 9
"""Of the store: one that was written by other rules of measuring counts as empty."""


def variant_of(name: str) -> str:
    """What the name of a plan that is not padded begins with: FUSED, ROUNDED, or nothing."""
    return next((variant for variant in (FUSED, ROUNDED) if name.startswith(variant)), "")


def kind_of(name: str) -> str:
    """Which of PREPARED the name of a plan begins with, or nothing."""
    return next((kind for kind in PREPARED if name.startswith(kind)), "")


def split_of(name: str) -> tuple[int, str] | None:
    """The number of parts and the plan of each, of a plan that runs in parts."""
    if not name.startswith(SPLIT):
        return None
    count, _, inner = name.removeprefix(SPLIT).partition(" ")
    return int(count), inner


def engine_of(name: str) -> str:
    """The name of a plan without its engine's knobs, of which some go by the size of the batch."""
    return name.partition("_")[0]


@dataclass(frozen=True)
class Problem:
    """A convolution: `function` is conv2d_forward, _backward_data or _backward_filter, `operands` its named arrays."""

    function: str
    operands: tuple[tuple[str, Array], ...]
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    relu: bool
    precision: str

    @property
    def key(self) -> str:
        """Equal for problems that share plans: everything but the addresses."""
        arrays = [f"{name}={a.dtype}{list(a.shape)}/{list(a.strides)}" for name, a in self.operands]
        window = f"stride={self.stride} padding={self.padding} dilation={self.dilation} groups={self.groups}"
        return " ".join([self.function, self.precision, *arrays, window, f"relu={self.relu}"])

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The operands by name."""
        return dict(self.operands)

    @property
    def has_epilogue(self) -> bool:
        """Whether something follows the convolution."""
        names = self.arrays
        return self.relu or "b" in names or "mask" in names

    @property
    def variants(self) -> tuple[str, ...]:
        """The kinds of plan to look for, the best first. With bf16 operands cuDNN has no good engine that writes dW in
        float32, for some shapes none at all."""
        if self.has_epilogue:
            return FUSED, ""
        operands, output = self.operands[:-1], self.operands[-1][1]
        return (ROUNDED, "") if operands[0][1].dtype != output.dtype else ("",)

    @property
    def rounded_bytes(self) -> int:
        """What a ROUNDED plan needs beside cuDNN's workspace: dW in bf16."""
        return round_up(2 * self.operands[-1][1].size, 256)

    def prepared(self, kind: str, workspace: int = 0) -> Problem | None:
        """The same convolution over X and W as plans of that kind (of PREPARED) want them, in arrays at the front of
        the workspace; None where X does not want it. Tensor cores read 16 bytes at a time: of an image's three channels
        cuDNN's good engines make nothing. What the zeros add to Y is zero, and what they get of dW is cut off.
        """
        x, name = self.arrays.get("x"), "dw" if "dw" in self.arrays else "w"
        if x is None or self.precision == "fp32" or self.groups > 1 or "nhwc" not in x.layouts:
            return None
        w, full = self.arrays[name], 16 // x.itemsize
        (n, c, height, width), (k, _, r, s) = x.shape4, w.shape4
        if c >= full or n * height * width >= 2**31:
            return None
        if kind == PADDED:
            shapes, window = ((n, full, height, width), (k, full, r, s)), self.window
        elif r * s == 1 or "nhwc" not in w.layouts:
            return None
        else:
            channels = round_up(r * s * c, 16)
            shapes = (n, channels, *self.pixels), (k, channels, 1, 1)
            window = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
        wide_x = Array.channels_last(workspace, shapes[0], x.dtype)
        wide_w = Array.channels_last(workspace + round_up(wide_x.nbytes, 256), shapes[1], w.dtype)
        wide = {"x": wide_x, name: wide_w}
        operands = tuple((name, wide.get(name, array)) for name, array in self.operands)
        return replace(self, operands=operands, **window)

    def prepared_bytes(self, kind: str) -> int:
        """What a plan of that kind needs beside the workspace of the plan for the other X and W."""
        wide = self.prepared(kind)
        if wide is None:
            return 0
        pairs = zip(self.operands, wide.operands, strict=True)
        return sum(round_up(b.nbytes, 256) for (_, a), (_, b) in pairs if a != b)

    @property
    def window(self) -> dict[str, Any]:
        """Stride, padding and dilation by name."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    @property
    def pixels(self) -> Pair:
        """Height and width of the output's images."""
        _, _, p, q = (self.arrays.get("y") or self.arrays["dy"]).shape4
        return p, q

    @property
    def part_counts(self) -> tuple[int, ...]:
        """Into how many equal parts the batch may be split: those of all operands begin at 16 bytes, as plans want."""
        batched = [array for name, array in self.operands if name in BATCHED]
        counts = [
            count for count in range(2, max(SPLITS) + 1)
            if batched[0].shape[0] % count == 0 and all(a.nbytes // count % 16 == 0 for a in batched)
        ]  # fmt: skip
        largest = (max((count for count in counts if count <= most), default=1) for most in SPLITS)
        return tuple(dict.fromkeys(count for count in largest if count > 1))

    def parts(self, count: int, workspace: int = 0) -> tuple[Problem, ...]:
        """The same convolution over each part of the batch. The first part's dW is this one's, that of every other is
        at the front of the workspace, to be added."""

        def part(name: str, array: Array, i: int) -> Array:
            if name in BATCHED:
                shape = (array.shape[0] // count, *array.shape[1:])
                return replace(array, address=array.address + i * (array.nbytes // count), shape=shape)
            return replace(array, address=workspace) if name == "dw" and i else array

        return tuple(
            replace(self, operands=tuple((name, part(name, array, i)) for name, array in self.operands))
            for i in range(count)
        )

    @property
    def split_bytes(self) -> int:
        """What a SPLIT plan needs beside the workspace of a part's plan."""
        dw = self.arrays.get("dw")
        return round_up(dw.nbytes, 256) if dw is not None else 0

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        arrays = self.arrays
        (n, _, p, q), w = (arrays.get("y") or arrays["dy"]).shape4, arrays.get("w") or arrays["dw"]
        return 2 * n * p * q * w.size


class PlanStore:
    """What was measured on a card, on disk: per convolution the plans and the compiled form of slow ones (`entries`),
    the ms of other ops by their profile key (`times`), how many times as long a convolution takes in an iteration
    (`slowdown`, by profile key), what copies keep beside an op (`shares`, by profile key and algorithm), what the host
    costs in a network (`host`, by the network's digest), and the link.

    One file per card and library version; a damaged file counts as empty. `kernels` says which sources our own kernels
    have: `times` and `shares` of others are forgotten.
    """

    def __init__(self, path: Path | None, kernels: str = "") -> None:
        self.path = path
        self.kernels = kernels
        self.entries: dict[str, list[dict[str, Any]]] = {}
        self.times: dict[str, float] = {}
        self.slowdown: dict[str, float] = {}
        self.shares: dict[str, Shares] = {}
        self.host: dict[str, HostCosts] = {}
        self.link: Link | None = None
        self.changed = False
        self._seen = self._version()
        if path is not None:
            # ArgumentErrors are ValueErrors.
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                text = json.loads(path.read_text())
                if text["format"] != FORMAT:
                    raise ValueError(text["format"])
                link = link_of(**text["link"]) if text["link"] else None
                times = {str(key): float(ms) for key, ms in text["times"].items()}
                host = {str(key): HostCosts(*map(float, costs)) for key, costs in text["host"].items()}
                slowdown = {str(key): float(factor) for key, factor in text["slowdown"].items()}
                shares = {str(key): Shares(*map(share, kept)) for key, kept in text["shares"].items()}
                entries = {str(key): [_read(**entry) for entry in found] for key, found in text["plans"].items()}
                same = text.get("kernels", "") == kernels
                self.link, self.host, self.slowdown, self.entries = link, host, slowdown, entries
                self.times, self.shares = (times, shares) if same else ({}, {})

    def _version(self) -> tuple[int, int] | None:
        """Which file is there now; None: none."""
        with suppress(OSError):
            if self.path is not None:
                found = self.path.stat()
                return found.st_mtime_ns, found.st_ino
        return None

    def _add(self, other: PlanStore) -> None:
        """What this store does not have of another."""
        for name in ("entries", "times", "slowdown", "shares", "host"):
            setattr(self, name, getattr(other, name) | getattr(self, name))
        self.link = other.link if self.link is None else self.link.fastest(other.link)

    def add_times(self, times: Mapping[str, float]) -> None:
        """Keep the ms of ops by their profile keys."""
        self.times |= times
        self.changed = True

    def add_host(self, network: str, costs: HostCosts) -> None:
        """Keep what the host costs in a network."""
        self.host[network] = costs
        self.changed = True

    def add_slowdown(self, slowdown: Mapping[str, float]) -> None:
        """Keep by how much convolutions are slower in an iteration."""
        self.slowdown |= slowdown
        self.changed = True

    def add_shares(self, shares: Mapping[str, Shares]) -> None:
        """Keep what copies keep of their rates beside ops."""
        self.shares |= shares
        self.changed = True

    def add_link(self, link: Link) -> None:
        """Keep the link's rates, the fastest that were seen."""
        self.link = link.fastest(self.link)
        self.changed = True

    def algorithms(self, key: str) -> tuple[Algorithm, ...]:
        """What was found for a problem, fastest first; empty: it was never looked at."""
        found = [Algorithm(e["name"], e["workspace"], e["ms"], e["deterministic"]) for e in self.entries.get(key, [])]
        return tuple(sorted(found, key=lambda a: (a.ms is None, a.ms or 0.0)))

    def blob(self, key: str, name: str) -> bytes | None:
        """The compiled plan, if it is kept."""
        for entry in self.entries.get(key, []):
            if entry["name"] == name and entry["blob"]:
                return base64.b64decode(entry["blob"])
        return None

    def put(self, key: str, algorithms: tuple[Algorithm, ...], blobs: Mapping[str, bytes]) -> None:
        """Replace what is known about a problem; `save` writes it."""
        self.entries[key] = [_entry(a, blobs.get(a.name)) for a in algorithms]
        self.changed = True

    def extend(self, key: str, algorithms: Iterable[Algorithm]) -> None:
        """Add plans to what is known about a problem."""
        self.entries[key] = [*self.entries.get(key, []), *(_entry(a, None) for a in algorithms)]
        self.changed = True

    def save(self) -> None:
        """Write the file, if anything is new. A reader sees the old file or the new one, never a part. Where none can
        be written, what was found lasts as long as the process: that costs time, and is no reason to stop."""
        if self.path is not None and self.changed:
            part = self.path.with_suffix(f".{os.getpid()}.tmp")
            if self._version() != self._seen:  # another process has found something since
                self._add(PlanStore(self.path, self.kernels))
            link = asdict(self.link) if self.link else None
            text = {
                "format": FORMAT, "host": self.host, "link": link, "kernels": self.kernels, "times": self.times,
                "slowdown": self.slowdown, "shares": self.shares, "plans": self.entries,
            }  # fmt: skip
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                part.write_text(json.dumps(text))
                part.replace(self.path)
                self._seen = self._version()
            except OSError:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                self.path = None
            self.changed = False


def _read(name: str, workspace: int, ms: float | None, deterministic: bool, blob: str | None) -> dict[str, Any]:
    """A plan as a file has it, checked."""
    way = Algorithm(str(name), int(workspace), None if ms is None else float(ms), bool(deterministic))
    if way.workspace < 0 or (way.ms is not None and not 0 <= way.ms < inf):
        raise ValueError(f"{name} takes {ms} ms and {workspace} bytes")
    if blob is not None:
        base64.b64decode(blob, validate=True)
    return {**_entry(way, None), "blob": blob}


def _entry(a: Algorithm, blob: bytes | None) -> dict[str, Any]:
    """A plan as the file has it."""
    return {
        "name": a.name, "workspace": a.workspace, "ms": a.ms, "deterministic": a.deterministic,
        "blob": base64.b64encode(blob).decode() if blob is not None else None,
    }  # fmt: skip
