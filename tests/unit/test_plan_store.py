"""What was measured is kept where it can be, and its place is no reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidnn.ops.plans import FORMAT, PlanStore
from minidnn.profile.profile import Algorithm

PLANS = (
    f'{{"format": {FORMAT}, "host": {{}}, "link": null, "kernels": "", "times": {{"op": 1.0}}, "slowdown": {{}}, '
    '"shares": {}, "plans": {"problem": %s}}'
)


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


@pytest.mark.parametrize(
    "damage",
    [
        "[" * 100_000, "", "null", "[]", '{"format": 8}',
        *(PLANS % entry for entry in (
            "5", "[5]", "[{}]", "null",
            '[{"name": "a", "workspace": -5, "ms": 1.0, "deterministic": true, "blob": null}]',
            '[{"name": "a", "workspace": 0, "ms": NaN, "deterministic": true, "blob": null}]',
            '[{"name": "a", "workspace": 0, "ms": 1.0, "deterministic": true, "blob": "!!!"}]',
        )),
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(damage)
    store = PlanStore(path)
    assert (store.algorithms("problem"), store.blob("problem", "a"), store.times) == ((), None, {})


def test_two_who_measure_at_once_keep_what_both_have_found(tmp_path: Path) -> None:
    one, two = PlanStore(tmp_path / "plans.json"), PlanStore(tmp_path / "plans.json")
    for store, name in ((one, "one"), (two, "two")):
        store.put(name, (Algorithm(name, 0, 1.0),), {})
        store.add_times({"both": 1.0 if store is one else 2.0, name: 3.0})
        store.save()
    found = PlanStore(tmp_path / "plans.json")
    assert found.times == {"both": 2.0, "one": 3.0, "two": 3.0}  # of one figure the last
    assert [a.name for name in ("one", "two") for a in found.algorithms(name)] == ["one", "two"]
