"""Pinned memory: exact plans, and the limits of the machine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import OutOfPinnedMemory
from minidnn.memory.pinned import (
    HostLimit,
    PinnedPlan,
    check_host_limits,
    host_limits,
    locked_limit,
    plan_pinned,
)
from minidnn.memory.place import Interval

MiB = 2**20


def together(*sizes: int) -> list[Interval]:
    return [Interval(f"x{i}", nbytes, 0, 1) for i, nbytes in enumerate(sizes)]


def test_what_is_on_the_host_together_takes_exactly_its_sum() -> None:
    plan = plan_pinned(together(128, 640, 64))
    assert plan.nbytes == 832
    assert {id: nbytes for id, (_, nbytes) in plan.ranges.items()} == {"x0": 128, "x1": 640, "x2": 64}


@given(st.lists(st.integers(1, 10**9), max_size=12))
def test_odd_sizes_cost_less_than_one_alignment_each(sizes: list[int]) -> None:
    plan = plan_pinned(together(*sizes))
    assert sum(sizes) <= plan.nbytes < sum(sizes) + 64 * max(len(sizes), 1)
    assert all(offset % 64 == 0 for offset, _ in plan.ranges.values())
    ends = sorted(plan.ranges.values())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ends))


def test_ranges_that_are_never_needed_together_are_shared() -> None:
    plan = plan_pinned([Interval("a", 640, 0, 5), Interval("b", 128, 0, 9), Interval("c", 640, 5, 9)])
    assert plan.nbytes == 768
    assert plan.ranges["a"] == plan.ranges["c"]


def test_nothing_offloaded_needs_nothing() -> None:
    assert plan_pinned([]) == PinnedPlan({}, 0)


def machine(root: Path, tree: dict[str, str] | None = None) -> Path:
    """A tree with /proc and /sys as given, and 100 MiB available."""
    for name, text in {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   102400 kB\n", **(tree or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_is_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path)
    check_host_limits(100 * MiB, root=root)
    with pytest.raises(OutOfPinnedMemory) as caught:
        check_host_limits(100 * MiB + 1, root=root)
    assert str(caught.value) == (
        "100.0 MiB of pinned memory are needed, but the machine's available memory is 100.0 MiB with 100.0 MiB left; "
        "use a smaller batch, offload fewer layers or raise that limit"
    )


V2 = {
    "proc/self/cgroup": "0::/user.slice/job\n",
    "sys/fs/cgroup/user.slice/memory.max": f"{50 * MiB}\n",
    "sys/fs/cgroup/user.slice/memory.current": f"{30 * MiB}\n",
    "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {10 * MiB}\n",
    "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
}


def test_cgroup_2_limits_count_at_every_level_less_what_is_in_use(tmp_path: Path) -> None:
    root = machine(tmp_path, V2)
    assert list(host_limits(root))[1:] == [HostLimit("memory.max of cgroup /user.slice", 50 * MiB, 30 * MiB)]
    check_host_limits(30 * MiB, root=root)
    with pytest.raises(
        OutOfPinnedMemory, match=r"memory\.max of cgroup /user\.slice is 50\.0 MiB with 30\.0 MiB left"
    ):
        check_host_limits(30 * MiB + 1, root=root)


def test_a_container_sees_its_cgroup_at_the_mount_point(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/../../else/where\n",
        "sys/fs/cgroup/memory.max": "4096\n",
        "sys/fs/cgroup/memory.current": "96\n",
    }
    assert list(host_limits(machine(tmp_path, tree)))[1:] == [HostLimit("memory.max of cgroup /", 4096, 4000)]


def test_cgroup_1_limits(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * MiB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{9 * MiB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {2 * MiB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    root = machine(tmp_path, tree)
    assert list(host_limits(root))[1:] == [HostLimit("memory.limit_in_bytes of cgroup /job", 8 * MiB, MiB)]
    with pytest.raises(OutOfPinnedMemory, match=r"memory\.limit_in_bytes of cgroup /job"):
        check_host_limits(MiB + 1, root=root)


LOCKED = {
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nVmLck:\t      16 kB\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max locked memory         65536                unlimited            bytes     \n",
}


def test_locked_memory_is_limited_only_where_it_is_asked_for(tmp_path: Path) -> None:
    root = machine(tmp_path, LOCKED)
    check_host_limits(MiB, root=root)
    check_host_limits(48 * 1024, locked=True, root=root)
    with pytest.raises(OutOfPinnedMemory, match=r"RLIMIT_MEMLOCK \(ulimit -l\) is 64\.0 KiB with 48\.0 KiB left"):
        check_host_limits(48 * 1024 + 1, locked=True, root=root)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("proc/self/status", "CapEff:\t0000000000000000", "CapEff:\t0000000000004000"),
        ("proc/self/limits", "65536", "unlimited"),
    ],
)
def test_a_privileged_process_or_an_unlimited_one_may_lock_anything(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    root = machine(tmp_path, {**LOCKED, name: LOCKED[name].replace(old, new)})
    assert list(locked_limit(root)) == []


def test_this_machine_answers() -> None:
    check_host_limits(0, locked=True)
    with pytest.raises(OutOfPinnedMemory):
        check_host_limits(2**60)


def test_a_machine_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert list(host_limits(tmp_path)) == []
    check_host_limits(2**50, locked=True, root=tmp_path)
