"""The exception tree. Every error a user can meet is a `MiniDnnError` with one sentence that says what to change."""

from __future__ import annotations


class MiniDnnError(Exception):
    """Base of all errors that minidnn raises on purpose; the CLI prints its sentence and exits with 2."""


class ArgumentError(MiniDnnError, ValueError):
    """An argument has a value that cannot work; the sentence names the argument, its value and what would work."""


class ShapeError(MiniDnnError, ValueError):
    """A layer got a shape it cannot take; names the layer, what came and what was expected."""


class DataError(MiniDnnError):
    """A data set cannot be read: missing, truncated, corrupt, or of the wrong shape."""


class CheckpointError(MiniDnnError):
    """A checkpoint or a weight file cannot be read or written."""


class NonFiniteLoss(MiniDnnError):
    """The loss became NaN or infinite; names the iteration. Nothing is saved."""


class BudgetError(MiniDnnError):
    """A memory budget cannot be kept; names the smallest budget that works."""


class OutOfDeviceMemory(MiniDnnError, MemoryError):
    """An allocation that nothing pending can serve; names size, used, largest free block, limit and live buffers."""


class OutOfPinnedMemory(MiniDnnError, MemoryError):
    """The pinned host memory of a plan exceeds a limit of the machine; names the limit and both sizes."""


class PoolError(MiniDnnError):
    """The pool was used wrongly: double free, foreign block, negative size."""


class ScheduleError(MiniDnnError):
    """A schedule breaks a rule; the sentence names the actions, the tensor and the hazard."""


class CodecError(MiniDnnError):
    """Packed data do not match their checksum or format."""


class DeviceError(MiniDnnError):
    """A device cannot be opened, or an action on it failed; names the device or the action."""
