"""What the checker finds: one sentence for each hazard, with the actions that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minidnn.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a schedule breaks. `actions` are indices into the schedule's actions, in the order of `text`."""

    rule: str
    text: str
    actions: tuple[int, ...] = ()


@dataclass(slots=True)
class Findings:
    """Collects findings, each once: what both iterations show is said of the first alone, and what several outcomes
    show of the first of them. `outcome` says which it is that is being looked at."""

    actions: Sequence[Action]
    outcome: str = ""
    found: dict[Finding, Finding] = field(default_factory=dict)

    def add(self, rule: str, text: str, *at: int) -> None:
        """Take a finding. `{0}`, `{1}` in the text stand for the actions `at`, counted on through the iterations."""
        count = len(self.actions)
        first = min((i // count for i in at), default=0)
        names = []
        for i in at:
            action = self.actions[i % count]
            later = ", next iteration" if i // count > first else ""
            names.append(f"'{action.label}' (action {i % count}, {action.lane}{later})")
        finding = Finding(rule, text.format(*names), tuple(i % count for i in at))
        self.found.setdefault(finding, replace(finding, text=finding.text + self.outcome))
