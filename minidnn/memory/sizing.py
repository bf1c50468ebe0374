"""How large must a pool be? The search of vDNN++ (section IV-B), and the choice over heuristics and orders.

The paper starts at the aggregate peak and replays the trace in a pool that cannot grow; where a request fails it starts
again with the pool enlarged by what was missing. The size found suffices for every iteration, but is not always the
smallest: best fit may serve a trace from 9 units and not from 11. "Simulate and choose" over heuristics and allocation
orders is what the paper proposes without doing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minidnn.errors import BudgetError
from minidnn.memory.fit import FITS, Fit, named_fit
from minidnn.memory.pool import Allocator, Block, Pool
from minidnn.memory.trace import GRANULARITY, Allocate, Trace, aggregate_peak
from minidnn.units import format_size, round_up


@dataclass(frozen=True)
class Sizing:
    """A pool that serves a trace: its heuristic, bytes, the offset of each id, and the number of restarts."""

    fit: str
    nbytes: int
    offsets: Mapping[str, int]
    restarts: int


def replay(trace: Trace, pool: Allocator) -> dict[str, Block]:
    """Serve a trace from a pool; the block of each id. Raises OutOfDeviceMemory where a request fails."""
    blocks: dict[str, Block] = {}
    for event in trace:
        if isinstance(event, Allocate):
            blocks[event.id] = pool.allocate(event.nbytes, event.role, event.id)
        else:
            pool.free(blocks[event.id])
    return blocks


def smallest_pool(trace: Trace, fit: Fit | str = "best-fit", start: int | None = None) -> Sizing:
    """The paper's search. `start` is the first size tried (bytes), by default the aggregate peak.

    Raises BudgetError where no pool serves the trace with this heuristic: `high-end` looks at the rightmost free block
    only, and that one may be too small in a pool of any size.
    """
    heuristic = fit if isinstance(fit, Fit) else named_fit(fit)
    size = round_up(aggregate_peak(trace) if start is None else start, GRANULARITY)
    blocks, failed, missing = _serve(trace, Pool(size, heuristic))
    if failed:
        # In a pool with room for all requests side by side, twice, the free middle is always the largest block: more
        # room changes nothing, so what fails there fails everywhere and the search would not end.
        enough = sum(round_up(event.nbytes, GRANULARITY) for event in trace if isinstance(event, Allocate))
        hopeless = _serve(trace, Pool(2 * enough, heuristic))[1]
        if hopeless:
            raise BudgetError(
                f"{heuristic.name} serves {format_size(hopeless.nbytes)} for {hopeless.id} from no size of pool; "
                "choose another fit"
            )
    restarts = 0
    while failed:
        size = round_up(size + missing, GRANULARITY)
        restarts += 1
        blocks, failed, missing = _serve(trace, Pool(size, heuristic))
    return Sizing(heuristic.name, size, {id: block.address for id, block in blocks.items()}, restarts)


def _serve(trace: Trace, pool: Pool) -> tuple[dict[str, Block], Allocate | None, int]:
    """Blocks by id up to the request that failed, that request, and the bytes that were missing for it."""
    blocks: dict[str, Block] = {}
    for event in trace:
        if not isinstance(event, Allocate):
            pool.free(blocks[event.id])
            continue
        block = pool.try_allocate(event.nbytes, event.role, event.id)
        if block is None:
            # At least 1, lest a heuristic that refuses what it could reach keep the search where it is.
            return blocks, event, max(event.nbytes - pool.reach(event.role), 1)
        blocks[event.id] = block
    return blocks, None, 0


def smallest_over(traces: Mapping[str, Trace], fits: Iterable[str] = tuple(FITS)) -> tuple[str, Sizing]:
    """Simulate and choose: the smallest pool over named traces (one for each allocation order) and heuristics.

    Returns the trace's name and the sizing; of equal ones the first. Raises BudgetError where nothing serves.
    """
    best: tuple[str, Sizing] | None = None
    refused: BudgetError | None = None
    for name, trace in traces.items():
        for fit in fits:
            try:
                sizing = smallest_pool(trace, fit)
            except BudgetError as error:
                refused = error
                continue
            if best is None or sizing.nbytes < best[1].nbytes:
                best = name, sizing
    if best is None:
        raise refused or BudgetError("no trace or no heuristic was given; give at least one of each")
    return best
