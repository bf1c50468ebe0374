"""What every result file says of where it was made: processor, cores, versions, date, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ("bench/results", "docs", "README.md")
"""What benches write."""


def describe(*packages: str) -> dict[str, Any]:
    """The environment; `packages` adds versions to those of Python and NumPy (None where not installed)."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("numpy", *packages)},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
    }


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The checked-out commit, with a plus sign where files differ; MINIDNN_COMMIT where there is no checkout.

    Results and the pages that are written from them do not count: a run of several benches changes them as it goes.
    """
    if "MINIDNN_COMMIT" in os.environ:
        return os.environ["MINIDNN_COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", ".", *(f":(exclude){name}" for name in WRITTEN)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
