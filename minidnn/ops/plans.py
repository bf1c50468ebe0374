"""What is known about convolution plans: the problem that a plan solves, and the store of plans on disk."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidnn.ops.array import Array
from minidnn.profile.profile import Algorithm

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]


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


class PlanStore:
    """What is known about plans, on disk: per problem the algorithms, and the compiled form of slow ones.

    One file per card and library version; a damaged file counts as empty.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: dict[str, list[dict[str, Any]]] = {}
        self.changed = False
        if path is not None and path.exists():
            try:
                self.entries = dict(json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                self.entries = {}

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
        self.entries[key] = [
            {
                "name": a.name, "workspace": a.workspace, "ms": a.ms, "deterministic": a.deterministic,
                "blob": base64.b64encode(blobs[a.name]).decode() if a.name in blobs else None,
            }
            for a in algorithms
        ]  # fmt: skip
        self.changed = True

    def save(self) -> None:
        """Write the file, if anything is new. A reader sees the old file or the new one, never a part."""
        if self.path is not None and self.changed:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(self.entries))
            part.replace(self.path)
            self.changed = False
