"""Pinned host memory: how much a plan needs, and whether the machine can give it.

vDNN needs page-locked host memory for everything it offloads (vDNN++, section III-C). The need is known before step 1
as one slab of exact size, with a fixed range for each offloaded tensor. How the bytes are taken is the device's
business; this module plans and checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from minidnn.errors import OutOfPinnedMemory
from minidnn.memory.place import Interval, place
from minidnn.units import format_size

ALIGNMENT = 64
"""Bytes: a cache line, the widest vector of the CPU, and enough for any copy engine."""

CAP_IPC_LOCK = 14
UNLIMITED = 2**60  # cgroup version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class PinnedPlan:
    """One slab: `ranges` gives each id its (offset, nbytes), `nbytes` is the slab's exact size."""

    ranges: Mapping[str, tuple[int, int]]
    nbytes: int


def plan_pinned(stays: Sequence[Interval], alignment: int = ALIGNMENT) -> PinnedPlan:
    """Ranges for what is on the host during `[start, end)`; what is never there together may share bytes.

    In a network without branches everything offloaded is on the host when forward ends: nothing is shared, and the
    slab is the sum of the sizes, each rounded up to `alignment` except the last.
    """
    placement = place(stays, alignment=alignment)
    ranges = {stay.id: (placement.offsets[stay.id], stay.nbytes) for stay in stays}
    return PinnedPlan(ranges, max((offset + nbytes for offset, nbytes in ranges.values()), default=0))


@dataclass(frozen=True, slots=True)
class HostLimit:
    """A bound on host memory: what it is called, its value, and how much of it is left (bytes)."""

    name: str
    value: int
    left: int


def check_host_limits(nbytes: int, locked: bool = False, root: Path = Path("/")) -> None:
    """Raises OutOfPinnedMemory where `nbytes` more do not fit in free memory or in the memory cgroup's limit.

    With `locked`, RLIMIT_MEMLOCK counts too. It binds `mlock`, not the plain memory of the host device, and NVIDIA's
    driver does not charge it (seen with driver 580: an unprivileged process limited to 64 KiB registers 256 MiB).
    `root` is where /proc and /sys are found.
    """
    limits = [*host_limits(root), *(locked_limit(root) if locked else ())]
    for limit in limits:
        if nbytes > limit.left:
            raise OutOfPinnedMemory(
                f"{format_size(nbytes)} of pinned memory are needed, but {limit.name} is {format_size(limit.value)} "
                f"with {format_size(limit.left)} left; use a smaller batch, offload fewer layers or raise that limit"
            )


def host_limits(root: Path = Path("/")) -> Iterator[HostLimit]:
    """Free memory, and the memory limit of each cgroup (version 1 or 2) that this process is in."""
    free = _fields(root / "proc/meminfo").get("MemAvailable")
    if free is not None:
        yield HostLimit("the machine's available memory", free, free)
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _cgroup(mount, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _cgroup(mount / "memory", path, names)


def locked_limit(root: Path = Path("/")) -> Iterator[HostLimit]:
    """RLIMIT_MEMLOCK (soft), if there is one and the process is not exempt (CAP_IPC_LOCK)."""
    status = _fields(root / "proc/self/status", base=16)
    if status.get("CapEff", 0) >> CAP_IPC_LOCK & 1:
        return
    for line in _text(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            if soft.isdigit():
                locked = _fields(root / "proc/self/status").get("VmLck", 0)
                yield HostLimit("RLIMIT_MEMLOCK (ulimit -l)", int(soft), max(int(soft) - locked, 0))


def _cgroup(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[HostLimit]:
    """Limits from the process's group up to the mount point; inside a container only the latter may be visible."""
    limit_file, usage_file, reclaimable = names
    inner = PurePosixPath("/", path).relative_to("/")
    for group in (inner, *inner.parents):
        limit = _text(mount / group / limit_file).strip()
        if not limit.isdigit() or int(limit) >= UNLIMITED:  # "max", or no such group here
            continue
        usage = int(_text(mount / group / usage_file).strip() or 0)
        usage -= _fields(mount / group / "memory.stat").get(reclaimable, 0)  # page cache gives way
        name = PurePosixPath("/", group)
        yield HostLimit(f"{limit_file} of cgroup {name}", int(limit), max(int(limit) - max(usage, 0), 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(path: Path, base: int = 10) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` lines as bytes by name; lines that are not numbers in `base` are left out."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        try:
            found[words[0]] = int(words[1], base) * (1024 if words[2:] == ["kB"] else 1)
        except (IndexError, ValueError):
            continue
    return found
