"""`python -m minidnn` is the command `minidnn`."""

from __future__ import annotations

import sys

from minidnn.cli import entry

if __name__ == "__main__":
    sys.exit(entry())
