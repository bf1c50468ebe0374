"""Each CUDA kernel at the sizes of real networks: right (against PyTorch), and how near to the card's copy rate.

    python bench/kernels.py [--only NAME] [--again]

A kernel's rate counts the bytes that it must read and write, each once; what it moves may stay in the card's cache
between launches where it is small. Yardsticks, on the same card in the same run: a device-to-device copy of 2 GiB; and,
launched like the kernel, PyTorch's elementwise kernel that reads half as many bytes and writes half, since what moves
little ends before the memory is at its rate.
Prints a table and writes kernels-<card>.json to the output folder, after each row; rows that are there are not measured
again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernel_cases import FAMILIES, Case
from bench.rows import ENOUGH, RESULTS, Rows, card_of
from minidnn.ops.context import Context
from minidnn.ops.kernels import Kernels, Launcher

LAUNCHES = 10
"""Of a kernel, per timed replay."""


def milliseconds(launch: Launcher, stream: torch.cuda.Stream, repeats: int = 15) -> float:
    """Median time of a launch. Several are replayed as one CUDA graph: a host that takes longer to launch a kernel than
    the card to run it is not what is measured."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(LAUNCHES):
            launch()
        graph.capture_end()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / LAUNCHES


def copy_rate(repeats: int = 15) -> float:
    """Bytes read and written per second by a device-to-device copy. Not replayed from a graph, where a copy may be left
    to a slower engine; it is long enough that its launch does not count."""
    source = torch.randint(0, 255, (2**31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    rates = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        rates.append(2 * source.numel() / begin.elapsed_time(end) * 1e3)
    return statistics.median(rates)


def plain_ms(nbytes: int, stream: torch.cuda.Stream) -> float:
    """Time of an elementwise kernel that moves as many bytes."""
    source = torch.zeros(max(nbytes // 8, 1), device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: torch.neg(source, out=target), stream)


def measured(case: Case, stream: torch.cuda.Stream, rate: float) -> dict[str, Any]:
    """A case's row; `rate`: bytes per second of the card's copy."""
    torch.cuda.synchronize()
    case.launch()
    torch.cuda.synchronize()
    error = case.wrong()
    ms = milliseconds(case.launch, stream)
    reached, plain = case.nbytes / ms * 1e3, plain_ms(case.nbytes, stream)
    return {"ms": ms, "MB": case.nbytes / 1e6, "GB/s": reached / 1e9, "share": reached / rate, "copy_GBps": rate / 1e9,
            "plain_ms": plain, "of_plain": plain / ms, "error": error, "right": error <= case.limit}  # fmt: skip


def main() -> None:
    """Measure what is missing, print a line for each, write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--again", action="store_true", help="measure again what the result file already has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    stream = torch.cuda.Stream()
    scratch = torch.empty(32 * 2**20, device="cuda", dtype=torch.uint8)
    on = Context(Kernels(), stream.cuda_stream, (scratch.data_ptr(), scratch.numel()))
    card, rate = torch.cuda.get_device_name(), copy_rate()
    print(f"{card}, copy {rate / 1e9:.0f} GB/s (read + write)", flush=True)
    rows = Rows(f"kernels-{card_of(card)}.json", arguments.out, arguments.again)
    rows.head = {"card": card}
    for family in FAMILIES:
        for case in family(on):
            if arguments.only in case.name and rows.wanted(case.name):
                row = rows.measure(case.name, partial(measured, case, stream, rate))
                shares = f"{row['share']:5.2f} {row['of_plain']:5.2f}"
                numbers = f"{row['ms']:8.4f} ms {row['GB/s']:7.0f} GB/s {shares} {row['error']:9.1e}"
                print(f"{case.name:48s} {numbers}{'' if row['right'] else '  WRONG'}", flush=True)
        torch.cuda.empty_cache()
    found = rows.rows.values()
    good, plain = (sum(row[share] >= ENOUGH for row in found) for share in ("share", "of_plain"))
    right = sum(row["right"] for row in found)
    print(f"{right} of {len(found)} right; at {ENOUGH:.0%} or more of the copy rate {good}, of plain kernels {plain}")


if __name__ == "__main__":
    main()
