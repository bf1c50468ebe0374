"""Running schedules: the executor, the simulator, the choice among plans, and the trainer."""
