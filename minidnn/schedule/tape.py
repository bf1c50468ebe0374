"""What lowering has issued so far. The walk over the stages and the codecs write on the same tape."""

from __future__ import annotations

from dataclasses import dataclass, field

from minidnn.schedule.actions import Action, Record, Token, Wait


@dataclass
class Tape:
    """Actions in issue order. `stage` is the op that new ones belong to."""

    actions: list[Action] = field(default_factory=list)
    stage: int = 0
    _tokens: int = 0

    def add(self, action: Action) -> None:
        """Issue an action."""
        self.actions.append(action)

    def token(self) -> Token:
        """A token that nobody has signalled yet."""
        self._tokens += 1
        return self._tokens - 1

    def record(self, lane: str) -> Token:
        """The token that says: everything so far on this lane is done."""
        token = self.token()
        self.add(Record(lane=lane, signal=token, op=self.stage))
        return token

    def order(self, first: str, then: str) -> None:
        """Everything so far on lane `first` happens before what follows on lane `then`."""
        self.add(Wait(lane=then, waits=(self.record(first),), op=self.stage))
