"""Happens-before over the actions of a schedule, as vector clocks.

Three things order two actions, and nothing else: they sit on one lane; the first is on the host lane, so that the other
is not even issued before it is done; or a token, or the host's wait for a whole lane, leads from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidnn.schedule.actions import HOST, Action, HostSync, Token

Clock = tuple[int, ...]
"""Per lane, how many of its actions are done."""


@dataclass(frozen=True, slots=True)
class Order:
    """The relation. Actions are counted on through the iterations.

    `ends` is, for each lane but the host's, what is done when the next iteration's first action may start there.
    """

    lanes: tuple[int, ...]  # action -> its lane's number
    positions: tuple[int, ...]  # action -> its place on that lane, from 1
    clocks: tuple[Clock, ...]  # action -> what is done once it is
    ends: Mapping[str, Clock]

    def before(self, first: int, then: int) -> bool:
        """Whether `first` is done before `then` starts (or they are the same)."""
        return self.clocks[then][self.lanes[first]] >= self.positions[first]

    def before_end(self, first: int, lane: str) -> bool:
        """Whether `first` is done before the next iteration enters the lane."""
        return self.ends[lane][self.lanes[first]] >= self.positions[first]


def happens_before(actions: Sequence[Action], iterations: int) -> Order:
    """The order of so many iterations, one issued after the other; tokens are each iteration's own.

    All edges lead forward in issue order. A wait for a token that was not signalled earlier orders nothing here.
    """
    numbers = {lane: i for i, lane in enumerate(dict.fromkeys([HOST, *(a.lane for a in actions)]))}
    fronts: list[Clock] = [(0,) * len(numbers)] * len(numbers)
    lanes, positions, clocks = [], [], []
    for _ in range(iterations):
        signalled: dict[Token, Clock] = {}
        for action in actions:
            lane = numbers[action.lane]
            clock = tuple(map(max, fronts[lane], fronts[0]))
            for token in action.waits:
                if token in signalled:
                    clock = tuple(map(max, clock, signalled[token]))
            if isinstance(action, HostSync) and action.of in numbers:
                clock = tuple(map(max, clock, fronts[numbers[action.of]]))
            position = clock[lane] + 1
            clock = (*clock[:lane], position, *clock[lane + 1 :])
            fronts[lane] = clock
            if action.signal is not None:
                signalled[action.signal] = clock
            lanes.append(lane)
            positions.append(position)
            clocks.append(clock)
    ends = {name: tuple(map(max, fronts[i], fronts[0])) for name, i in numbers.items() if i}
    return Order(tuple(lanes), tuple(positions), tuple(clocks), ends)
