"""README and docs/*.md as tests see them: their code, and the environment in which it runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli import ROOT

PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
"""Path from the root -> page."""
STAND_INS = Path(__file__).parent / "stand_ins"
"""Packages that pages use and tests cannot have: torchvision, whose weights come from the network."""
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(STAND_INS))), "PYTHONWARNINGS": "error",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language: these are run."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def shown_only(page: str) -> list[str]:
    """The lines of indented blocks, which take long or need a GPU or the network; continued lines are joined."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"(?<=\n\n)(?:    .*\n)+", text)
    return [line.strip() for block in found for line in block.replace("\\\n", " ").splitlines()]
