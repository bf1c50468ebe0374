"""How near the host's convolutions come to the machine's own matrix product, on the 13 convolutions of VGG-16.

    python bench/host_conv.py [--batch 2] [--rounds 10] [--out bench/results/host_conv.json]
    OPENBLAS_NUM_THREADS=1 python bench/host_conv.py --clock cpu       where other work keeps the cores busy

Each timed convolution is followed by a large square sgemm, so that both see the same load on the machine; the best of
all rounds counts for each. A share is (multiply-adds of the convolution / its time) / (the same of the sgemm): im2col,
col2im, bias, ReLU and all copies are inside the convolution's time. Backward data includes the first layer, which
training never asks for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minidnn.ops.numpy_ops import ALGORITHMS, OPS, workspace_bytes  # noqa: E402

# Name, input channels, filters, image side.
LAYERS = [
    ("conv1_1", 3, 64, 224), ("conv1_2", 64, 64, 224), ("conv2_1", 64, 128, 112), ("conv2_2", 128, 128, 112),
    ("conv3_1", 128, 256, 56), ("conv3_2", 256, 256, 56), ("conv3_3", 256, 256, 56), ("conv4_1", 256, 512, 28),
    ("conv4_2", 512, 512, 28), ("conv4_3", 512, 512, 28), ("conv5_1", 512, 512, 14), ("conv5_2", 512, 512, 14),
    ("conv5_3", 512, 512, 14),
]  # fmt: skip
FUNCTIONS = {"forward": "conv2d_forward", "data": "conv2d_backward_data", "filter": "conv2d_backward_filter"}
ATTRIBUTES: dict[str, Any] = {
    "stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1,
}  # fmt: skip
SGEMM = 2048


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(call: Callable[[], None], clock: Callable[[], float]) -> float:
    """How long one call takes."""
    start = clock()
    call()
    return clock() - start


def flops(batch: int, channels: int, filters: int, side: int) -> int:
    """Floating-point operations of one pass of a layer."""
    return 2 * batch * filters * channels * 9 * side * side


def calls(batch: int, channels: int, filters: int, side: int) -> dict[str, Callable[[], None]]:
    """The three passes of a layer: with bias and ReLU forward, with the mask of the ReLU in front in backward data."""
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((batch, channels, side, side), np.float32), 0)
    w = rng.standard_normal((filters, channels, 3, 3), np.float32)
    dy = rng.standard_normal((batch, filters, side, side), np.float32)
    y, dx, dw, b = np.empty_like(dy), np.empty_like(x), np.empty_like(w), np.zeros(filters, np.float32)
    arrays: dict[str, dict[str, Any]] = {
        "forward": {"x": x, "w": w, "b": b, "y": y, "relu": True},
        "data": {"dy": dy, "w": w, "mask": x, "dx": dx},
        "filter": {"x": x, "dy": dy, "dw": dw},
    }

    def make(kind: str) -> Callable[[], None]:
        function = FUNCTIONS[kind]
        algorithm = ALGORITHMS[function][0]
        nbytes = workspace_bytes(
            function, algorithm, x_shape=x.shape, w_shape=w.shape, y_shape=y.shape, itemsize=4, **ATTRIBUTES
        )
        workspace = np.empty(nbytes, np.uint8)
        return lambda: OPS[function](algorithm=algorithm, workspace=workspace, **arrays[kind], **ATTRIBUTES)

    return {kind: make(kind) for kind in FUNCTIONS}


def measure(batch: int, rounds: int, clock: Callable[[], float]) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Best seconds per layer and pass, and all sgemm times."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((SGEMM, SGEMM), np.float32) for _ in range(2))
    c = np.empty_like(a)

    def product() -> None:
        np.matmul(a, b, out=c)

    sgemm: list[float] = []
    best: dict[str, dict[str, float]] = {}
    for name, *shape in LAYERS:
        passes = calls(batch, *shape)
        for call in passes.values():
            call()  # compiles, and touches all pages
        product()
        best[name] = dict.fromkeys(FUNCTIONS, float("inf"))
        for _ in range(rounds):
            for kind, call in passes.items():
                best[name][kind] = min(best[name][kind], seconds(call, clock))
                sgemm.append(seconds(product, clock))
    return best, sgemm


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(),
        "blas": f"{blas['name']} {blas['version']}",
        "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE", "detected"),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "default",
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "commit": commit.stdout.strip(),
    }  # fmt: skip


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall",
        help="cpu: processor time of all threads together, which other work hardly touches; use one BLAS thread",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "host_conv.json")
    options = parser.parse_args()
    best, sgemm = measure(options.batch, options.rounds, CLOCKS[options.clock])
    peak = 2 * SGEMM**3 / min(sgemm)
    work = {name: flops(options.batch, *shape) for name, *shape in LAYERS}
    share = {name: {k: work[name] / t / peak for k, t in times.items()} for name, times in best.items()}
    total = {k: sum(work.values()) / sum(times[k] for times in best.values()) / peak for k in FUNCTIONS}

    print(f"sgemm {SGEMM}: best {peak / 1e9:.0f} GFLOP/s, median {2 * SGEMM**3 / np.median(sgemm) / 1e9:.0f}")
    print(f"{'VGG-16, batch ' + str(options.batch):20s}" + "".join(f"{kind:>18s}" for kind in FUNCTIONS))
    for name in best:
        print(f"{name:20s}" + "".join(f"{best[name][k] * 1e3:9.2f} ms {share[name][k]:5.0%}" for k in FUNCTIONS))
    print(f"{'all 13':20s}" + "".join(f"{total[k]:18.1%}" for k in FUNCTIONS))

    result = {
        **machine(), "batch": options.batch, "rounds": options.rounds, "clock": options.clock, "sgemm_size": SGEMM,
        "sgemm_gflops": round(peak / 1e9, 1), "sgemm_gflops_median": round(2 * SGEMM**3 / np.median(sgemm) / 1e9, 1),
        "share_of_sgemm": {k: round(v, 3) for k, v in total.items()},
        "layers": {
            name: {k: {"ms": round(best[name][k] * 1e3, 3), "share": round(share[name][k], 3)} for k in FUNCTIONS}
            for name in best
        },
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
