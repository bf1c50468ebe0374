"""minidnn and PyTorch train the same networks on the same card, in one run: times, memory, start-up.

    python bench/peers.py [--networks vgg16:256 vgg16:64 alexnet:256] [--precisions bf16 tf32 fp32]

Networks are torchvision's, dropout included; SGD with momentum; invented images. A step's time is the median of the
intervals between device events at the ends of consecutive steps. minidnn copies its batch from pinned memory in every
step; PyTorch is measured with the batch resident on the card, and with such a copy. `peak_bytes` is what the driver
says is in use at most, sampled every 20 ms, less what was in use before (the context). A result file keeps what
earlier runs on that card found; a row that is there is not measured again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT, describe
from minidnn import Trainer, models, nn, optim

NETWORKS = {"vgg16": ("vgg:tv=true", "vgg16"), "alexnet": ("alexnet_tv", "alexnet")}
"""Ours and torchvision's name; both take 3 x 224 x 224 images."""
PEERS = ("base", "base --graph", "keep", "torch eager", "torch compile")
WARM_UP = 5
SECONDS = 1.5
STEPS = (12, 100)
"""At least and at most so many timed steps, else SECONDS of them."""


@dataclass
class Peak:
    """Device memory in use, from the driver."""

    before: int = 0
    most: int = 0

    @property
    def nbytes(self) -> int:
        return self.most - self.before


def in_use() -> int:
    """Bytes of device memory that the driver counts as taken, by anybody."""
    from cupy_backends.cuda.api import runtime

    free, total = runtime.memGetInfo()
    return int(total - free)


@contextmanager
def watched() -> Iterator[Peak]:
    """Sample the memory in use while the block runs."""
    peak = Peak(in_use())
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            peak.most = max(peak.most, in_use())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.most = max(peak.most, in_use())


def steps_for(ms: float) -> int:
    """How many steps to time when one takes about `ms`."""
    return int(min(max(SECONDS * 1e3 / ms, STEPS[0]), STEPS[1]))


def ours(network: str, batch: int, precision: str, memory: str, graph: bool) -> dict[str, Any]:
    """A memory mode of minidnn: one batch in flight while the next is issued, as `fit` does it."""
    rng = np.random.default_rng(0)
    with watched() as peak:
        began = time.perf_counter()
        net = models.create(NETWORKS[network][0])
        trainer = Trainer(
            net, nn.CrossEntropyLoss(), optim.SGD(0.001, momentum=0.9), batch, memory=memory, device="cuda",
            precision=precision, graph=graph,
        )  # fmt: skip
        try:
            for slot in trainer._slots:
                slot.batch.array("input")[...] = rng.random(slot.batch.array("input").shape, np.float32) - 0.5
                slot.batch.array("labels")[...] = rng.integers(0, 1000, batch)
            filled = time.perf_counter()
            trainer.settle(trainer.issue(trainer._slots[0].batch, batch))
            startup = time.perf_counter() - began
            first = time.perf_counter() - filled
            issued: list[float] = []
            run_ours(trainer, batch, WARM_UP)
            times = run_ours(trainer, batch, 4)
            times = run_ours(trainer, batch, steps_for(statistics.median(times)), issued)
            schedule = trainer.schedule
            found = {
                "startup_s": startup, "first_step_s": first, "host_ms": statistics.median(issued),
                "arena_bytes": trainer.peak_bytes, "persistent_bytes": schedule.persistent_bytes,
                "pinned_bytes": trainer.pinned_bytes, "launches": len(trainer.executor(batch).steps),
                "algorithms": {name: a.name for name, a in schedule.plan.algorithms.items() if a.name != "default"},
                **summary(times, batch),
            }  # fmt: skip
        finally:
            trainer.close()
    return {**found, "peak_bytes": peak.nbytes}


def run_ours(trainer: Trainer, batch: int, steps: int, issued: list[float] | None = None) -> list[float]:
    """Intervals between the ends of steps, ms; `issued` gets the host's time for each."""
    device = trainer.device
    compute = device.stream("compute")
    stamps = [device.stamp(compute)]
    pending: list[Any] = []
    for step in range(steps):
        slot = trainer._slots[step % len(trainer._slots)].batch
        begin = time.perf_counter()
        pending.append(trainer.issue(slot, batch))
        if issued is not None:
            issued.append((time.perf_counter() - begin) * 1e3)
        stamps.append(device.stamp(compute))
        if len(pending) > 1:
            trainer.settle(pending.pop(0))
    while pending:
        trainer.settle(pending.pop(0))
    return [device.elapsed_ms(a, b) for a, b in pairwise(stamps)][1:]


def torchs(network: str, batch: int, precision: str, compiled: bool) -> dict[str, Any]:
    """PyTorch: cudnn.benchmark, channels_last for tensor cores, fused SGD; bf16 by autocast."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.cuda.reset_peak_memory_stats()
    with watched() as peak:
        found = train_with_torch(network, batch, precision, compiled)
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return {**found, "peak_bytes": peak.nbytes}


def train_with_torch(network: str, batch: int, precision: str, compiled: bool) -> dict[str, Any]:
    """Everything that lives on the card lives in here."""
    import torch
    import torch.nn.functional as F
    import torchvision

    form = torch.contiguous_format if precision == "fp32" else torch.channels_last
    began = time.perf_counter()
    with torch.device("cuda"):
        net = getattr(torchvision.models, NETWORKS[network][1])(weights=None).to(memory_format=form)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, fused=True)
    x = (torch.rand(batch, 3, 224, 224, device="cuda") - 0.5).to(memory_format=form)
    y = torch.randint(0, 1000, (batch,), device="cuda")
    host_x = torch.rand(batch, 3, 224, 224).to(memory_format=form).pin_memory()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            return F.cross_entropy(net(x), y)

    forward = torch.compile(loss) if compiled else loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(x, y).backward()
        optimizer.step()

    def step_with_copy() -> None:
        x.copy_(host_x, non_blocking=True)
        step()

    step()
    torch.cuda.synchronize()
    startup = time.perf_counter() - began
    run_torch(step, WARM_UP)
    count = steps_for(statistics.median(run_torch(step, 4)))
    times, copied = run_torch(step, count), run_torch(step_with_copy, count)
    return {
        "startup_s": startup, **summary(times, batch), "ms_with_copy": statistics.median(copied),
        "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
    }  # fmt: skip


def run_torch(step: Callable[[], None], steps: int) -> list[float]:
    """Intervals between the ends of steps, ms."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)][1:]


def summary(times: list[float], batch: int) -> dict[str, Any]:
    """Median, spread, throughput."""
    ms = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return {
        "ms": ms, "ms_quartiles": [quartiles[0], quartiles[2]], "steps": len(times), "images_per_s": batch / ms * 1e3
    }  # fmt: skip


def measure(peer: str, network: str, batch: int, precision: str) -> dict[str, Any]:
    """One row."""
    if peer.startswith("torch"):
        return torchs(network, batch, precision, peer == "torch compile")
    return ours(network, batch, precision, peer.removesuffix(" --graph"), peer.endswith("--graph"))


def main() -> None:
    """Measure, print, write after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["vgg16:256", "vgg16:64", "alexnet:256"])
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32", "fp32"], choices=["bf16", "tf32", "fp32"])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}, or other memory modes")
    parser.add_argument("--again", action="store_true", help="measure rows that the result file already has")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    from cupy_backends.cuda.api import runtime

    runtime.free(0)  # the context: nobody's peak counts it
    card = runtime.getDeviceProperties(0)["name"].decode()
    name = f"peers-{card.replace(' ', '-')}.json"
    found: dict[str, Any] = {}
    for folder in (ROOT / "bench" / "results", arguments.out):
        if (folder / name).exists():
            found |= json.loads((folder / name).read_text())["rows"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for spec in arguments.networks:
        network, batch = spec.split(":")[0], int(spec.split(":")[1])
        for precision in arguments.precisions:
            for peer in arguments.peers:
                key = f"{network} batch {batch} {precision}: {peer}"
                if key in found and not arguments.again:
                    continue
                try:
                    row = measure(peer, network, batch, precision)
                except Exception as error:  # one peer's failure is not the others'
                    print(f"{key}: {type(error).__name__}: {error}", flush=True)
                    continue
                environment = describe("cupy-cuda13x", "nvidia-cudnn-frontend", "torch", "torchvision", "triton")
                found[key] = {**row, "environment": environment}
                print(line(key, row), flush=True)
                text = json.dumps({"card": card, "rows": found}, indent=1)
                (arguments.out / name).write_text(text + "\n")


def line(key: str, row: dict[str, Any]) -> str:
    """A row for a reader."""
    extra = f"with copy {row['ms_with_copy']:7.2f}" if "ms_with_copy" in row else f"host {row['host_ms']:5.2f} ms"
    return (
        f"{key:48s} {row['ms']:8.2f} ms {extra:18s} {row['images_per_s']:7.0f} images/s "
        f"{row['peak_bytes'] / 2**30:6.2f} GiB, start {row['startup_s']:5.1f} s"
    )


if __name__ == "__main__":
    main()
