"""Batch slots: the host side of an iteration. One pinned region holds batch, labels, step scalars and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minidnn.device.base import Device, Event, Region, view
from minidnn.graph.graph import Graph
from minidnn.graph.op import SCALARS, SCALARS_LENGTH
from minidnn.graph.tensor import Role, Tensor
from minidnn.units import round_up


class BatchSlot:
    """One slot; a trainer has three. It holds a whole batch, and scalars and results for each of its micro-batches."""

    def __init__(self, device: Device, fields: Mapping[str, Tensor]) -> None:
        self.device = device
        self.fields = dict(fields)
        self.first_row = 0
        self.part = 0
        self._starts: dict[str, int] = {}
        end = 0
        for name, t in self.fields.items():
            self._starts[name] = end
            end = round_up(end + t.nbytes, 512)
        self.region: Region = device.pinned(end)

    def place(self, name: str) -> int:
        """Where the present micro-batch's part of a field begins in the region."""
        t = self.fields[name]
        row = self.part if name in PER_PART else self.first_row
        return self._starts[name] + row * (t.nbytes // t.shape[0])

    def array(self, name: str) -> np.ndarray:
        """The field as an array, all rows (scalars and loss: all micro-batches)."""
        assert self.region.array is not None
        t = self.fields[name]
        return view(t, self.region.array[self._starts[name] : self._starts[name] + t.nbytes])

    def select(self, part: int, first_row: int, scalars: Mapping[str, float]) -> None:
        """Turn to micro-batch `part`, which begins at `first_row`; write its step scalars, those not named are 0."""
        self.part, self.first_row = part, first_row
        row = self.array("scalars")[part]
        row[:] = 0
        for name, value in scalars.items():
            row[SCALARS.index(name)] = value

    def close(self) -> None:
        """Return the region."""
        self.device.give_back(self.region)


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that was issued: its results are in the slot once `done` is."""

    slot: BatchSlot
    rows: int
    parts: int
    step: int
    train: bool
    done: Event


PER_PART = ("scalars", "loss")
"""Fields with one row for each micro-batch."""


def slot_fields(graph: Graph, labels: tuple[int, ...], label_dtype: str, rows: int, parts: int) -> dict[str, Tensor]:
    """What a slot holds for batches of `rows` in up to `parts` micro-batches: input, labels, scalars, loss, output."""
    output = graph.tensors[graph.output]
    return {
        "input": Tensor("input", (rows, *graph.tensors["input"].shape[1:]), "float32", Role.INPUT),
        "labels": Tensor("labels", (rows, *labels[1:]), label_dtype, Role.LABEL),
        "scalars": Tensor("scalars", (parts, SCALARS_LENGTH), "float64", Role.SCALARS),
        "loss": Tensor("loss", (parts, 2), graph.target.weight_dtype, Role.LOSS),
        graph.output: Tensor(graph.output, (rows, *output.shape[1:]), output.dtype, Role.ACTIVATION, output.layout),
    }
