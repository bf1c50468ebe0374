"""How fast the zero-value codec is: GB/s of unpacked data, per core and in total, beside memcpy and blosc2.

    python bench/zvc.py                      writes bench/results/zvc_<cores>core.json and prints the tables
    python bench/zvc.py --mib 512 --rounds 9 --output results.json

Each row is one element size, one way in which zeros lie (scattered, or in runs) and one density (share of values that
are not zero). All functions of a row take turns, round after round, so that memcpy and the codec see the same machine;
a rate is that of the best round, and the median is kept beside it. One core's rate is per second of its thread's own
time, which other programs do not stretch; the rate of all cores is per second on the clock, and worth what the load
average beside it says. Packed memory is re-used, as from the second training step on; "fresh" is the first step, where
each page is new (with glibc). blosc2 (LZ4, shuffle, level 1, its fastest) is called as a user would; it is left out
where it is not installed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn import codec

DENSITIES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
RUN_LENGTH = 256  # mean values in a row that are all zero, or all not
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

Array = NDArray[Any]
Rates = dict[str, dict[str, float]]


def activations(length: int, density: float, zeros: str, bits: int) -> Array:
    """Values of a rectified normal distribution, as float32 or as its upper half (bfloat16), zeros as asked."""
    rng = np.random.default_rng(0)
    values = np.abs(rng.standard_normal(length, dtype=np.float32)) + np.float32(1e-3)
    if zeros == "scattered":
        keep = rng.random(length, dtype=np.float32) < density
    else:
        runs = rng.geometric(1 / RUN_LENGTH, size=2 * length // RUN_LENGTH + 100)
        keep = np.resize(np.repeat(rng.random(runs.size) < density, runs), length)
    values *= keep
    halves: Array = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values if bits == 32 else halves


def rates(functions: dict[str, Callable[[], object]], nbytes: int, rounds: int) -> Rates:
    """GB/s of each function, called in turns: by the clock if its name ends in "all", else by this thread's time."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            clock = time.perf_counter if name.endswith("all") else time.thread_time
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return {
        name: {
            "best": round(nbytes / min(taken[1:]) / 1e9, 3),
            "median": round(nbytes / statistics.median(taken[1:]) / 1e9, 3),
        }
        for name, taken in seconds.items()
    }


def return_free_pages() -> None:
    """Give what malloc keeps for later back to the system, so that "fresh" memory is fresh."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Case:
    """One array, and everything that is timed on it. `each` runs a task on all parts: in turn, or on a pool."""

    def __init__(self, array: Array, pool: ThreadPoolExecutor) -> None:
        self.array = array
        self.out = np.ones_like(array)
        self.memory = codec.PackedMemory()
        self.kept: list[codec.PackedPart] = []
        self.pool = pool
        self.places = codec.split(array.size, max(codec.PARTS, CORES))
        self.packed = [codec.pack(array[where], checksum=True) for where in self.places]
        self.plain = [codec.pack(array[where]) for where in self.places]

    def copy(self, where: slice) -> None:
        np.copyto(self.out[where], self.array[where])

    def compress(self, each: Callable[..., Any], checksum: bool = False) -> None:
        for part in list(each(partial(self.pack, memory=self.memory, checksum=checksum), self.places)):
            part.release()

    def compress_fresh(self) -> None:
        self.kept += map(partial(self.pack, memory=codec.PackedMemory()), self.places)  # kept: no page serves twice

    def pack(self, where: slice, *, memory: codec.PackedMemory, checksum: bool = False) -> codec.PackedPart:
        return codec.pack(self.array[where], memory=memory, checksum=checksum)

    def decompress(self, each: Callable[..., Any], parts: list[codec.PackedPart]) -> None:
        list(each(lambda part, where: codec.unpack(part, self.out[where]), parts, self.places))

    def functions(self) -> dict[str, Callable[[], object]]:
        every = self.pool.map
        return {
            "memcpy_1": lambda: np.copyto(self.out, self.array),
            "compress_1": lambda: self.compress(map),
            "decompress_1": lambda: self.decompress(map, self.plain),
            "compress_checksum_1": lambda: self.compress(map, checksum=True),
            "decompress_checksum_1": lambda: self.decompress(map, self.packed),
            "": return_free_pages,
            "compress_fresh_1": self.compress_fresh,
            "density_1": lambda: codec.density(self.array),
            "memcpy_all": lambda: list(every(self.copy, self.places)),
            "compress_all": lambda: self.compress(every),
            "decompress_all": lambda: self.decompress(every, self.plain),
        }

    def blosc2_functions(self, blosc2: Any) -> tuple[dict[str, Callable[[], object]], float]:
        """blosc2's functions, and the share of the bytes that it keeps."""
        options = {
            "codec": blosc2.Codec.LZ4, "filters": [blosc2.Filter.SHUFFLE], "clevel": 1, "typesize": self.array.itemsize,
        }  # fmt: skip
        packed = blosc2.compress2(self.array, nthreads=1, **options)
        functions: dict[str, Callable[[], object]] = {}
        for name, threads in (("1", 1), ("all", CORES)):
            functions[f"blosc2_compress_{name}"] = partial(blosc2.compress2, self.array, nthreads=threads, **options)
            functions[f"blosc2_decompress_{name}"] = partial(blosc2.decompress2, packed, dst=self.out, nthreads=threads)
        return functions, len(packed) / self.array.nbytes

    def check(self) -> None:
        """The timed functions did what they are for."""
        self.out.fill(1)
        self.decompress(self.pool.map, self.plain)
        if self.out.tobytes() != self.array.tobytes():
            raise SystemExit("the codec did not restore the array: its rates mean nothing")

    def ratio(self, frac: int = codec.FRAC) -> float:
        return sum(codec.pack(self.array[where], frac=frac).nbytes for where in self.places) / self.array.nbytes


def measure(bits: int, zeros: str, density: float, nbytes: int, rounds: int) -> dict[str, Any]:
    """One row."""
    with ThreadPoolExecutor(CORES) as pool:
        case = Case(activations(nbytes * 8 // bits, density, zeros, bits), pool)
        functions, blosc2_ratio = case.functions(), None
        if installed("blosc2"):
            more, blosc2_ratio = case.blosc2_functions(import_module("blosc2"))
            functions |= more
        speed = rates(functions, case.array.nbytes, rounds)
        del speed[""]
        seconds = speed.pop("density_1")
        case.check()
    return {
        "bits": bits,
        "zeros": zeros,
        "density": round(float(np.count_nonzero(case.array)) / case.array.size, 4),
        "packed_share": round(case.ratio(), 4),
        "packed_share_frac_32": round(case.ratio(32), 4),
        "blosc2_share": blosc2_ratio and round(blosc2_ratio, 4),
        "gb_per_s": speed,
        "density_sample_ms": round(case.array.nbytes / seconds["best"] / 1e6, 4),
        "compress_of_memcpy_1": round(speed["compress_1"]["best"] / speed["memcpy_1"]["best"], 3),
        "decompress_of_memcpy_1": round(speed["decompress_1"]["best"] / speed["memcpy_1"]["best"], 3),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    codec.warm_up()
    from llvmlite import binding

    from minidnn.codec import loops

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cpu_kind": binding.get_host_cpu_name(),
        "cores": CORES,
        "avx512_loops": loops.HAS_AVX512,
        "python": platform.python_version(),
        **{package: installed(package) for package in ("numpy", "numba", "llvmlite", "blosc2")},
    }


def git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str | None:
    """The commit that is measured, with "+" where codec or bench differ from it; None outside a repository."""
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "../minidnn/codec", "zvc.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# Column heads and the rates under them, in three blocks: one core, all cores, blosc2 on one and on all cores.
BLOCKS = (
    {
        "memcpy": "memcpy_1",
        "pack": "compress_1",
        "unpack": "decompress_1",
        "pack+s": "compress_checksum_1",
        "unpk+s": "decompress_checksum_1",
        "fresh": "compress_fresh_1",
    },
    {"memcpy": "memcpy_all", "pack": "compress_all", "unpack": "decompress_all"},
    {
        "pack": "blosc2_compress_1",
        "unpack": "blosc2_decompress_1",
        "packN": "blosc2_compress_all",
        "unpkN": "blosc2_decompress_all",
    },
)


def heading() -> str:
    heads = [" ".join(f"{head:>6}" for head in block) for block in BLOCKS]
    return (
        f"GB/s of unpacked data: on one core (+s: with checksum; fresh: into new pages) | on {CORES} cores | "
        f"blosc2: share kept, on one and on N = {CORES} cores\n"
        f"bits     zeros density packed | {heads[0]} | {heads[1]} |  share {heads[2]}"
    )


def line(row: dict[str, Any]) -> str:
    speed = row["gb_per_s"]
    cells = [
        " ".join(f"{speed[name]['best']:6.2f}" if name in speed else f"{'-':>6}" for name in block.values())
        for block in BLOCKS
    ]
    share = "-" if row["blosc2_share"] is None else f"{row['blosc2_share']:.3f}"
    head = f"{row['bits']:>4} {row['zeros']:>9} {row['density']:7.3f} {row['packed_share']:6.3f}"
    return f"{head} | {cells[0]} | {cells[1]} | {share:>6} {cells[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the array (more than the caches hold)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--commit", default=commit(), help="what to write as the measured commit")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"zvc_{CORES}core.json")
    arguments = parser.parse_args()

    result: dict[str, Any] = {
        "what": "zero-value codec, GB/s of unpacked data (1 GB = 10^9 bytes)",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": arguments.commit,
        "machine": machine(),
        "array_mib": arguments.mib,
        "rounds": arguments.rounds,
        "run_length": RUN_LENGTH,
        "parts": max(codec.PARTS, CORES),
        "frac": codec.FRAC,
        "load_average": [round(os.getloadavg()[0], 1)],  # before and after
        "rows": [],
    }
    print(heading())
    for bits in (32, 16):
        for zeros in ("scattered", "runs"):
            for density in arguments.densities:
                row = measure(bits, zeros, density, arguments.mib * 2**20, arguments.rounds)
                result["rows"].append(row)
                print(line(row), flush=True)
    result["load_average"].append(round(os.getloadavg()[0], 1))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
