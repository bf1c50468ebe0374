"""The log of a run: one JSON object a line, whole lines only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

from minidnn.errors import ArgumentError


class Log:
    """Appends to a file, or writes to a pipe or a device. What fails to be written whole is taken back, where a file
    can be cut, and what another run left of a line ends before the first record. Raises ArgumentError naming the file
    and what the system says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as error:
            raise self._refused(error) from None
        self._regular = S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._torn = self._regular and self._ends_inside_a_line()

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, with the system when this returns."""
        line = (b"\n" if self._torn else b"") + json.dumps(record).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size if self._regular else None
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            if end is not None:
                with suppress(OSError):
                    self._file.truncate(end)
            raise self._refused(error) from None
        self._torn = False

    def close(self) -> None:
        """Every line has been written; what closing says is no news."""
        with suppress(OSError):
            self._file.close()

    def _ends_inside_a_line(self) -> bool:
        with suppress(OSError), open(self.path, "rb") as file:  # of an empty one there is no last byte
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
        return False

    def _refused(self, error: OSError) -> ArgumentError:
        return ArgumentError(f"log {self.path} cannot be written: {error.strerror}; name another file")
