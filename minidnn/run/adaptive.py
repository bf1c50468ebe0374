"""`compress="auto"`: look at the densities now and then, and compress other tensors from the next iteration on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from minidnn.errors import OutOfPinnedMemory
from minidnn.plan.compress import compressed
from minidnn.run.program import Programs
from minidnn.schedule.actions import Schedule
from minidnn.schedule.recompress import recompressed

EVERY = 50
"""Steps from one look to the next."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is compressed from update `step` on, because of which densities, and the slab that this needs."""

    step: int
    compressed: tuple[str, ...]
    density: Mapping[str, float]
    pinned_bytes: int

    def as_dict(self) -> dict[str, object]:
        """For the log."""
        density = {name: round(share, 4) for name, share in self.density.items()}
        return {
            "step": self.step, "compressed": list(self.compressed), "density": density,
            "pinned_bytes": self.pinned_bytes,
        }  # fmt: skip


class Adaptive:
    """Re-plans the compression of a trainer's programs, between iterations only. `choices` has one entry per change,
    the first plan included."""

    def __init__(self, programs: Programs, schedule: Schedule) -> None:
        self.programs = programs
        self.choices = [Choice(0, schedule.plan.compress, {}, programs.pinned_bytes)]
        self._looking = False
        self._density: dict[str, float] = {}

    def before(self, step: int) -> None:
        """Update `step` is about to be issued."""
        if self._looking:
            self._choose(step)
        self._looking = step % EVERY == 0
        for executor in self.programs.training_executors:
            executor.packer.sampling = self._looking

    def _choose(self, step: int) -> None:
        programs, before = self.programs, self.choices[-1].compressed
        programs.finish()
        for executor in programs.training_executors:
            self._density |= executor.packer.density
            schedule = executor.schedule
        chosen = compressed(schedule.graph, schedule.plan, "auto", self._density, before)
        if chosen != before and recompress(programs, chosen):
            self.choices.append(Choice(step, chosen, dict(self._density), programs.pinned_bytes))


def recompress(programs: Programs, names: tuple[str, ...]) -> bool:
    """Compress these tensors from now on, in every program that offloads, with all else as it is. False, and nothing
    is changed, where the machine refuses the pinned bytes that this takes."""
    programs.finish()
    schedules = {key: recompressed(s, names) if s.plan.offload else s for key, s in programs.schedules.items()}
    try:
        programs.take_slab(max(s.pinned_bytes for s in schedules.values()))
    except OutOfPinnedMemory:
        programs.forget_executors()  # the slab, of the size that it had, may lie elsewhere
        if programs.pinned_bytes < max(s.pinned_bytes for s in programs.schedules.values()):
            raise
        return False
    programs.schedules = schedules
    programs.recipe = replace(programs.recipe, options=replace(programs.recipe.options, compress=names))
    programs.forget_executors()
    return True
