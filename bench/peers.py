"""minidnn and PyTorch train the same networks on the same card, in one run: times, memory, start-up.

    python bench/peers.py [--networks vgg16:256 vgg16:64 alexnet:256] [--precisions bf16 tf32 fp32]
    python bench/peers.py --peers out-of-core --networks vgg16:256 --precisions fp32 --seconds 200

Networks are torchvision's, dropout included; SGD with momentum; invented images. A step's time is the median of the
intervals between device events at the ends of consecutive steps. minidnn copies its batch from pinned memory in every
step; PyTorch is measured with the batch resident on the card, and with such a copy. Every row has a process of its own:
what libraries keep is in the peak and the start-up of each that wants them. `peak_bytes` is what the driver says is in
use at most, sampled every 20 ms, less what was in use before (the context). PyTorch's caching allocator keeps what
cuDNN's benchmark needed once: `steady_peak_bytes` is the same after that has been given back. A result file keeps what
earlier runs on that card found; a row that is there is not measured again unless `--again` is given.

A name with `heuristics` is without cudnn.benchmark. Compiled fp32 stays NCHW, as eager does: the compiler's own choice
would be channels_last, for which strict fp32 has only slow algorithms, and minutes of trials (455 ms without trials,
where eager takes 383). The out-of-core peers (bench/offload.py) have a setting each: the share of the layers, the
activations that stay until others follow, the number of segments, the compiler's memory budget.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.rows import RESULTS, Peak, Rows, card_of, fill, steps_for, summary, timed, watched
from minidnn import Trainer, models, nn, optim

NETWORKS = {"vgg16": ("vgg:tv=true", "vgg16"), "alexnet": ("alexnet_tv", "alexnet")}
"""Ours and torchvision's name; both take 3 x 224 x 224 images."""
PEERS = ("base", "base --graph", "keep", "torch eager", "torch compile")
OUT_OF_CORE = (
    "torch OffloadActivations 5", "torch save_on_cpu", "torch checkpoint 8", "torch checkpoint 2",
    "torch OffloadActivations 1", "torch save_on_cpu 50%", "torch checkpoint 4", "torch OffloadActivations 15",
    "torch checkpoint 16", "torch compile 0.5", "torch compile 0.2", "torch compile 0.75", "torch compile 0",
)  # fmt: skip
"""Each of PyTorch's ways with its setting, the most important first."""
HEURISTICS = " heuristics"
"""Ends the name of a peer that takes cuDNN's own choice of algorithms."""
SECONDS = 1.5
STEPS = (5, 100)
"""At least and at most so many timed steps, else SECONDS of them."""
SLOW_MS, FEW = 600.0, 3
"""So slow a peer is warm after one step, and so few timed ones are enough."""


def ours(network: str, batch: int, precision: str, memory: str, graph: bool) -> dict[str, Any]:
    """A memory mode of minidnn: one batch in flight while the next is issued, as `fit` does it."""
    with watched() as peak:
        began = time.perf_counter()
        net = models.create(NETWORKS[network][0])
        trainer = Trainer(
            net, nn.CrossEntropyLoss(), optim.SGD(0.001, momentum=0.9), batch, memory=memory, device="cuda",
            precision=precision, graph=graph,
        )  # fmt: skip
        with trainer:
            fill(trainer)
            filled = time.perf_counter()
            trainer.settle(trainer.issue(trainer._slots[0].batch, batch))
            startup = time.perf_counter() - began
            first = time.perf_counter() - filled
            schedule = trainer.schedule
            found = {
                "startup_s": startup, "first_step_s": first, **timed(trainer, SECONDS, STEPS),
                "arena_bytes": trainer.peak_bytes, "persistent_bytes": schedule.persistent_bytes,
                "pinned_bytes": trainer.pinned_bytes, "launches": len(trainer.executor(batch).steps),
                "algorithms": {name: a.name for name, a in schedule.plan.algorithms.items() if a.name != "default"},
            }  # fmt: skip
    return {**found, "peak_bytes": peak.nbytes}


def torchs(network: str, batch: int, precision: str, peer: str) -> dict[str, Any]:
    """PyTorch: cudnn.benchmark, channels_last for tensor cores, fused SGD; bf16 by autocast."""
    import torch

    torch.backends.cudnn.benchmark = not peer.endswith(HEURISTICS)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with watched() as peak:
        found = train_with_torch(network, batch, precision, peer.removesuffix(HEURISTICS), peak)
    return {**found, "peak_bytes": peak.nbytes}


def train_with_torch(network: str, batch: int, precision: str, peer: str, peak: Peak) -> dict[str, Any]:
    """Everything that lives on the card lives in here."""
    import torch
    import torch.nn.functional as F
    import torchvision  # type: ignore[import-not-found,unused-ignore]

    from bench.offload import Way, flat, way_of

    form = torch.contiguous_format if precision == "fp32" else torch.channels_last
    began = time.perf_counter()
    with torch.device("cuda"):
        net = getattr(torchvision.models, NETWORKS[network][1])(weights=None).to(memory_format=form)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, fused=True)
    x = (torch.rand(batch, 3, 224, 224, device="cuda") - 0.5).to(memory_format=form)
    y = torch.randint(0, 1000, (batch,), device="cuda")
    host_x = torch.rand(batch, 3, 224, 224).to(memory_format=form).pin_memory()
    kind, _, setting = peer.partition(" ")
    way = Way(net) if kind in ("eager", "compile") else way_of(peer, flat(net))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            return F.cross_entropy(way.forward(x), y)

    forward = torch.compile(loss) if kind == "compile" else loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with way.around():
            found = forward(x, y)
        found.backward()
        way.after()
        optimizer.step()

    def step_with_copy() -> None:
        x.copy_(host_x, non_blocking=True)
        step()

    with compiler(form is torch.channels_last, setting) if kind == "compile" else nullcontext():
        step()
        torch.cuda.synchronize()
        startup = time.perf_counter() - began
        (rough,) = run_torch(step, 1)
        if rough < SLOW_MS:
            rough = statistics.median(run_torch(step, 3))
        count = steps_for(rough, SECONDS, STEPS) if rough < SLOW_MS else FEW
        torch.cuda.empty_cache()
        with watched(before=peak.before) as steady:
            times, copied = run_torch(step, count), run_torch(step_with_copy, count)
    return {
        "startup_s": startup, **summary(times, batch), "ms_with_copy": statistics.median(copied),
        "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
        "steady_peak_bytes": steady.nbytes, "implementation": way.about or f"torch {torch.__version__}",
    }  # fmt: skip


@contextmanager
def compiler(channels_last: bool, share: str) -> Iterator[None]:
    """While it is entered the compiler may choose channels_last, or not, and with a share recomputes activations so
    that this share of their memory suffices."""
    import torch._functorch.config
    import torch._inductor.config

    budget = {"activation_memory_budget": float(share)} if share else {}
    with (
        torch._inductor.config.patch(layout_optimization=channels_last),
        torch._functorch.config.patch(budget),
    ):
        yield


def run_torch(step: Callable[[], None], steps: int) -> list[float]:
    """Intervals between the ends of steps, ms, after one more step."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for event in events:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def alone(peer: str, network: str, batch: int, precision: str) -> dict[str, Any]:
    """One row, by a process of its own, which has no context on the card but its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, peer, network, batch, precision).result()


def measure(peer: str, network: str, batch: int, precision: str) -> dict[str, Any]:
    """One row."""
    from cupy_backends.cuda.api import runtime

    runtime.free(0)  # the context: nobody's peak counts it
    if peer.startswith("torch "):
        return torchs(network, batch, precision, peer.removeprefix("torch "))
    return ours(network, batch, precision, peer.removesuffix(" --graph"), peer.endswith("--graph"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["vgg16:256", "vgg16:64", "alexnet:256"])
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32", "fp32"], choices=["bf16", "tf32", "fp32"])
    known = ", ".join((*PEERS, *OUT_OF_CORE)).replace("%", "%%")
    parser.add_argument("--peers", nargs="*", default=list(PEERS),
                        help=f"of {known}, or other memory modes; out-of-core means all of those")  # fmt: skip
    parser.add_argument("--seconds", type=float, help="begin no row that would end later")
    parser.add_argument("--again", action="store_true", help="measure rows that the result file already has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    from cupy_backends.cuda.api import runtime

    card = runtime.getDeviceProperties(0)["name"].decode()
    deadline = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    rows = Rows(f"peers-{card_of(card)}.json", arguments.out, arguments.again, deadline)
    rows.head = {"card": card}
    peers = [name for peer in arguments.peers for name in (OUT_OF_CORE if peer == "out-of-core" else (peer,))]
    for spec in arguments.networks:
        network, batch = spec.split(":")[0], int(spec.split(":")[1])
        for precision in arguments.precisions:
            for peer in peers:
                key = f"{network} batch {batch} {precision}: {peer}"
                if not rows.wanted(key) or rows.late:
                    continue
                try:
                    row = rows.measure(key, partial(alone, peer, network, batch, precision))
                except Exception as error:  # one peer's failure is not the others'
                    print(f"{key}: {type(error).__name__}: {error}", flush=True)
                    continue
                print(line(key, row), flush=True)


def line(key: str, row: dict[str, Any]) -> str:
    """A row for a reader."""
    extra = f"with copy {row['ms_with_copy']:7.2f}" if "ms_with_copy" in row else f"host {row['host_ms']:5.2f} ms"
    steady = f" (then {row['steady_peak_bytes'] / 2**30:.2f})" if "steady_peak_bytes" in row else ""
    return (
        f"{key:48s} {row['ms']:8.2f} ms {extra:18s} {row['images_per_s']:7.0f} images/s "
        f"{row['peak_bytes'] / 2**30:6.2f} GiB{steady}, start {row['startup_s']:5.1f} s"
    )


if __name__ == "__main__":
    main()
