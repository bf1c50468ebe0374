"""Where figures are drawn. Matplotlib loads when the first one is (extra `plot`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from minidnn.errors import MiniDnnError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def drawing() -> Iterator[None]:
    """Text is drawn as it is: titles and labels are names of a user's, in which dollar signs begin no formula, and a
    character that the font does not have becomes a box without a warning."""
    try:
        import matplotlib.figure
    except ImportError:
        raise MiniDnnError("plots need matplotlib; pip install 'minidnn[plot]'") from None
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def drawable(title: str) -> str:
    """A title in which bytes of a file's name that are no characters are escaped, as the terminal shows them."""
    return title.encode("utf-8", "backslashreplace").decode("utf-8")


def png(figure: Figure, path: Path | None) -> bytes:
    """The figure as a PNG, also written to `path` where given."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    if path is not None:
        Path(path).write_bytes(buffer.getvalue())
    return buffer.getvalue()
