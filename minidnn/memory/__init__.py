"""The memory manager, in integers only: run-time pool, offline placement, pool sizing, traces, pinned memory.

`trace` says what is asked for, `pool` serves it one request at a time as CNMeM does (with a heuristic of `fit`),
`sizing` finds how large such a pool must be, `place` lays a whole known trace out at once, `validate` checks any,
and `pinned` plans and accounts for the host's side.
"""
