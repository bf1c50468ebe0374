"""A schedule is data: the flat list of actions that lowering makes of a plan, and what walks it."""
