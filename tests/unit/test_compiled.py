"""Compiled loops and their cache on disk, which may be damaged or full."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from numba.core.caching import IndexDataCacheFile

from minidnn.compiled import compiled

SOURCE = "def doubled(x):\n    return x + x\n"


def loop(folder: Path, signatures: list[str] | None = None) -> Any:
    """The function of a module in that folder, compiled, as a new process would have it."""
    path = folder / "loops_of_a_test.py"
    if not path.exists():
        path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loops_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compiled(module.doubled, signatures)


def from_disk(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("signatures", [None, ["float64(float64)"]])
def test_machine_code_comes_back_from_disk(tmp_path: Path, signatures: list[str] | None) -> None:
    assert loop(tmp_path, signatures)(2.0) == 4.0
    again = loop(tmp_path, signatures)
    assert (again(2.0), from_disk(again)) == (4.0, 1)


def test_signatures_are_all_that_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        loop(tmp_path, ["float64(float64)"])("text")


@pytest.mark.parametrize("what", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("left", [0, 20])
@pytest.mark.parametrize("signatures", [None, ["float64(float64)"]])
def test_a_damaged_cache_is_compiled_anew(tmp_path: Path, what: str, left: int, signatures: list[str] | None) -> None:
    loop(tmp_path, signatures)(2.0)
    damaged = list((tmp_path / "__pycache__").glob(what))
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:left])
    assert loop(tmp_path, signatures)(2.0) == 4.0
    mended = loop(tmp_path, signatures)
    assert (mended(2.0), from_disk(mended)) == (4.0, 1)


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    @contextmanager
    def full(file: object, path: str) -> Iterator[None]:
        raise OSError(27, "File too large")
        yield

    with patch.object(IndexDataCacheFile, "_open_for_write", full):
        assert loop(tmp_path)(2.0) == 4.0
        assert loop(tmp_path, ["float64(float64)"])(2.0) == 4.0
    with patch("minidnn.compiled._Cache", side_effect=RuntimeError("no locator available")):
        assert loop(tmp_path)(2.0) == 4.0
