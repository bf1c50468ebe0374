"""What was measured is kept where it can be, and its place is no reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidnn.ops.plans import PlanStore
from minidnn.profile.profile import Algorithm


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plans.json"
    store = PlanStore(path)
    store.put("problem", (Algorithm("eng1", 512, 2.0),), {"eng1": b"plan"})
    store.save()
    again = PlanStore(path)
    assert [a.name for a in again.algorithms("problem")] == ["eng1"]
    assert again.blob("problem", "eng1") == b"plan"
    assert [file.name for file in path.parent.iterdir()] == ["plans.json"]


@pytest.mark.parametrize("place", ["file/plans.json", "file/cache/plans.json", "folder"])
def test_a_place_that_takes_nothing_costs_only_the_memory_of_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    store = PlanStore(tmp_path / place)
    store.put("problem", (Algorithm("eng1"),), {})
    store.save()
    store.put("other", (Algorithm("eng2"),), {})
    store.save()
    assert [a.name for a in store.algorithms("problem")] == ["eng1"]
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["file", "folder"]
