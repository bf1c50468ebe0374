"""The optimum of a small placement, by trying every order that matters.

Among the lowest placements take one whose offsets sum up to the least. Placed in order of offset, each of its buffers
lies where first fit puts it, or it could move down. So first fit in orders that give rising offsets finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidnn.memory.place import Interval, lower_bound


def smallest_height(stays: Sequence[Interval], alignment: int = 1) -> int:
    """The least height of any placement. Time is exponential in the number of stays."""
    sizes = [-(-s.nbytes // alignment) * alignment for s in stays]
    near = [
        [j for j, other in enumerate(stays) if j != i and other.start < s.end and s.start < other.end]
        for i, s in enumerate(stays)
    ]
    bound = lower_bound(stays, alignment)
    best = sum(sizes)
    seen: set[tuple[int, ...]] = set()

    def first_fit(tops: tuple[int, ...], i: int) -> int:
        offset = 0
        for bottom, end in sorted((tops[j] - sizes[j], tops[j]) for j in near[i] if tops[j]):
            if bottom - offset >= sizes[i]:
                break
            offset = max(offset, end)
        return offset

    def extend(tops: tuple[int, ...], floor: int) -> None:
        nonlocal best
        if tops in seen or best == bound:
            return
        seen.add(tops)
        if all(tops):
            best = max(tops)
        lowest = {i: first_fit(tops, i) for i, top in enumerate(tops) if not top}
        if any(max(floor, offset) + sizes[i] >= best for i, offset in lowest.items()):
            return  # what is placed later lies no lower than this
        for i, offset in lowest.items():
            if offset >= floor:
                extend((*tops[:i], offset + sizes[i], *tops[i + 1 :]), offset)

    if stays:
        extend((0,) * len(stays), 0)
    return best
