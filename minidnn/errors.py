"""The exception tree. Every error a user can meet is a `MiniDnnError` with one sentence that says what to change."""

from __future__ import annotations

from typing import NoReturn


class MiniDnnError(Exception):
    """Base of all errors that minidnn raises on purpose; the CLI prints its sentence and exits with 2."""

    action: str | None = None
    """Label of the schedule's action in which it came up, where it did in one."""


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
    """A memory budget cannot be kept; names the smallest that works, `needed` in bytes (None: there is none)."""

    def __init__(self, sentence: str, needed: int | None = None) -> None:
        super().__init__(sentence)
        self.needed = needed


class OutOfDeviceMemory(MiniDnnError, MemoryError):
    """An allocation that nothing pending can serve; names size, used, largest free block, limit and live buffers. Where
    it is an arena, `needed` has its bytes."""

    def __init__(self, sentence: str, needed: int | None = None) -> None:
        super().__init__(sentence)
        self.needed = needed


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


def raise_at(error: BaseException, label: str) -> NoReturn:
    """Raise what the caller of an iteration shall see of an error that came up in action `label`.

    minidnn's own errors and interrupts stay what they are and get the action as a note; any other error becomes the
    cause of a DeviceError that names the action. An error that knows its action already goes on as it is.
    """
    if getattr(error, "action", None) is None:
        if isinstance(error, Exception) and not isinstance(error, MiniDnnError):
            named = DeviceError(f"action '{label}' failed: {error or type(error).__name__}")
            named.action = label
            raise named from error
        add_note(error, f"in action '{label}'")
        error.action = label  # type: ignore[attr-defined]
    raise error


def add_note(error: BaseException, text: str) -> None:
    """`error.add_note`, for Python 3.10 too."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
