"""What must hold on a GPU, beside speed: tests, sanitizer, learning, the same bits in all modes, no growth.

    python bench/checks.py [--only digits vgg11] [--out bench/results]

- `tests`: pytest -m cuda; `memory`: that of them which wants the card for itself;
- `memcheck`, `racecheck`: compute-sanitizer over the tests of the kernels;
- `digits`: smallnet learns the handwritten digits, test accuracy by precision;
- `vgg11`: 20 steps on invented images, the losses beside the host's in fp32;
- `torchvision`: its AlexNet and VGG-16, loaded here, give its logits;
- `modes`: every memory mode's gradients after 20 steps, deterministic plans, are those of base to the bit;
- `steps`: 1000 steps of vDNN++ with random delays in the release workers take no memory, and its losses are base's.

Nothing is timed, so what is a process of its own runs beside the rest. A result file keeps what earlier runs on that
card found; a row that is there is left out unless `--again` is given. Fails where one of them does not hold.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT
from bench.peers import NETWORKS
from bench.rows import RESULTS, Rows, card_of
from minidnn import Trainer, models, nn, optim
from minidnn.data import open_data
from minidnn.device.base import Event
from minidnn.device.cuda import PRECISIONS, CudaDevice
from minidnn.device.open import open_device
from minidnn.run.choose import Options
from minidnn.run.compare import Experiment, measure

PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-m", "cuda", "--tb=short"
)  # fmt: skip
"""Warnings are other packages' there, of whatever version a GPU machine has."""
ALONE = "tests/cuda/test_training.py::test_a_run_takes_no_device_memory_and_gives_all_back"
KERNELS = tuple(f"tests/cuda/test_kernels{part}.py" for part in ("", "_pooling", "_prepared"))
SANITIZED = {"float32": "not bfloat16", "bfloat16": "bfloat16"}
"""The kernel tests in two processes, as `-k` has them."""
STEPS, LONG = 20, 1000
MODES = (
    "base", "keep", "vdnn:all", "vdnn:conv", "vdnn:aconv", "vdnn++:all", "vdnn++:conv", "vdnn++:aconv", "vdnn++:dyn",
    "base(m)", "vdnn:all(m)", "vdnn++:all(m)",
)  # fmt: skip
LIMITS = {"fp32": 2e-3, "tf32": 2e-2, "bf16": 5e-2}
"""Of the largest loss, how far the losses of VGG-11 may be from the host's."""
GOOD = 0.98
"""Test accuracy on the digits."""

Batch = tuple[np.ndarray, np.ndarray]


def processes() -> dict[str, list[str]]:
    """What runs as a process of its own, by the name of its row."""
    python = [sys.executable, *PYTEST]
    found = {"tests": [*python, "tests/cuda", "--deselect", ALONE]}
    for tool in ("memcheck", "racecheck"):
        for name, chosen in SANITIZED.items():
            found[f"{tool} {name}"] = ["compute-sanitizer", "--tool", tool, *python, *KERNELS, "-k", chosen]
    return found


def outcome(code: int, output: str) -> dict[str, Any]:
    """How a process of tests ended: `passed`, `failed`, and what a sanitizer says at its end."""
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|error)", output)}
    said = [line.strip("= ").strip() for line in output.splitlines() if "SUMMARY" in line]
    clean = all(re.search(r"SUMMARY: 0 ", line) for line in said)
    holds = code == 0 and clean and counts.get("passed", 0) > 0
    return {"holds": holds, **counts, "sanitizer": said, "end": "" if holds else output[-2000:]}


def run(command: Sequence[str]) -> dict[str, Any]:
    """One process, to its end."""
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return outcome(ended.returncode, ended.stdout)


def batches(shape: tuple[int, ...], count: int) -> list[Batch]:
    """Invented images and labels of ten classes."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape).astype(np.float32), rng.integers(0, 10, shape[0])) for _ in range(count)]


def vgg11(device: Any, precision: str, batch: int, memory: str = "base") -> Trainer:
    """A trainer of VGG-11 on images of 32 x 32 pixels."""
    net = models.create("vgg11", num_classes=10, input_shape=(3, 32, 32))
    nn.init.he(net)
    return Trainer(
        net, nn.CrossEntropyLoss(), optim.SGD(0.002, momentum=0.9), batch, device=device, precision=precision,
        target="native", memory=memory,
    )  # fmt: skip


def digits() -> dict[str, Any]:
    """smallnet's test accuracy after ten epochs."""
    data, accuracy = open_data("digits"), {}
    for precision in PRECISIONS:
        optimizer = optim.SGD(0.05, momentum=0.9)
        with Trainer(
            models.smallnet(), nn.CrossEntropyLoss(), optimizer, 32, device="cuda", precision=precision
        ) as trainer:
            trainer.fit(data, epochs=10, evaluate_epochs=False)
            accuracy[precision] = trainer.evaluate(data)["test_accuracy"]
    return {"holds": min(accuracy.values()) >= GOOD, "test_accuracy": accuracy}


def follows_the_host() -> dict[str, Any]:
    """The losses of STEPS steps on the host in fp32, and how far the card's are from them."""
    data = batches((8, 3, 32, 32), 2) * (STEPS // 2)

    def losses(device: str, precision: str) -> list[float]:
        with vgg11(device, precision, 8) as trainer:
            return [trainer.step(x, y).loss for x, y in data]

    wanted = losses("host", "fp32")
    found = {precision: losses("cuda", precision) for precision in PRECISIONS}
    gaps = {p: float(np.abs(np.array(values) - wanted).max() / max(wanted)) for p, values in found.items()}
    return {
        "holds": all(gaps[p] <= LIMITS[p] for p in PRECISIONS), "gap": gaps, "host": wanted, "cuda": found
    }  # fmt: skip


def torchvisions_logits() -> dict[str, Any]:
    """How far the logits of torchvision's networks are from its own, of the largest; random weights, fp32."""
    import torch
    from torchvision import models as torchvisions  # type: ignore[import-not-found,unused-ignore]

    gaps = {}
    for name, (ours, theirs) in NETWORKS.items():
        reference = getattr(torchvisions, theirs)(weights=None).eval()
        x = np.random.default_rng(0).standard_normal((2, 3, 224, 224)).astype(np.float32)
        with torch.no_grad():
            wanted = reference(torch.from_numpy(x)).numpy()
        net = models.create(ours)
        net.load_state_dict(reference.state_dict())
        with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1), 2, device="cuda", precision="fp32") as trainer:
            gaps[name] = float(np.abs(trainer.predict(x) - wanted).max() / np.abs(wanted).max())
    return {"holds": max(gaps.values()) < 1e-4, "logits": gaps}


def same_bits() -> dict[str, Any]:
    """Which modes' gradients are those of base after STEPS steps, by precision."""
    equal: dict[str, dict[str, bool]] = {}
    for precision in PRECISIONS:
        experiment = Experiment(
            partial(models.smallvgg, input_shape=(3, 24, 24), width=32), nn.CrossEntropyLoss(),
            optim.SGD(0.01, momentum=0.9), batches((16, 3, 24, 24), STEPS), precision,
        )  # fmt: skip
        opener = partial(open_device, "cuda", precision=precision, deterministic=True)
        results = measure(experiment, MODES, opener, Options(), timed_steps=1)
        equal[precision] = {r.mode: r.fits and r.more["matches_base"] is True for r in results}
    return {"holds": all(all(found.values()) for found in equal.values()), "steps": STEPS, "equal": equal}


def late(device: CudaDevice, seed: int) -> None:
    """Have one release in ten come up to two milliseconds late."""
    after, draw = device.after, random.Random(seed)

    def later(worker: str, event: Event, action: Callable[[], None]) -> Event:
        pause = draw.random() * 2e-3 if draw.random() < 0.1 else 0.0

        def delayed() -> None:
            time.sleep(pause)
            action()

        return after(worker, event, delayed)

    device.after = later  # type: ignore[method-assign]


def no_growth() -> dict[str, Any]:
    """Memory over LONG steps: the driver's, pinned, the process's in MiB; and whether the losses are those of base."""
    ((x, y),) = batches((64, 3, 32, 32), 1)
    losses: dict[str, list[float]] = {}
    grown: dict[str, dict[str, Any]] = {}
    for mode in ("base", "vdnn++:all", "vdnn++:conv"):
        with CudaDevice(precision="tf32", deterministic=True) as device:
            late(device, 1)
            with vgg11(device, "tf32", 64, mode) as trainer:
                losses[mode] = [trainer.step(x, y).loss for _ in range(STEPS)]
                before, resident = device.memory_info(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                for _ in range(LONG):
                    trainer.step(x, y)
                after = device.memory_info()
                grown[mode] = {
                    "arenas_bytes": after.used - before.used, "pinned_bytes": after.pinned - before.pinned,
                    "process_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024,
                    "losses_of_base": losses[mode] == losses["base"],
                }  # fmt: skip
    holds = all(
        g["losses_of_base"] and not g["arenas_bytes"] and not g["pinned_bytes"] and g["process_mib"] < 64
        for g in grown.values()
    )
    return {"holds": holds, "steps": LONG, "grown": grown}


HERE: dict[str, Callable[[], dict[str, Any]]] = {
    "digits": digits, "vgg11": follows_the_host, "torchvision": torchvisions_logits, "modes": same_bits,
    "steps": no_growth,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print a line for each, write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows whose name begins so")
    parser.add_argument("--again", action="store_true", help="check again what the result file already has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    with CudaDevice() as device:
        card = device.name
    rows = Rows(f"checks-{card_of(card)}.json", arguments.out, arguments.again)
    rows.head = {"card": card}

    def wanted(name: str) -> bool:
        chosen = arguments.only is None or any(name.startswith(start) for start in arguments.only)
        return chosen and rows.wanted(name)

    def keep(name: str, work: Callable[[], dict[str, Any]]) -> None:
        row = rows.measure(name, work)
        print(f"{name:20s} {'holds' if row['holds'] else 'DOES NOT HOLD'}", flush=True)

    others = {
        name: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, command in processes().items() if wanted(name)
    }  # fmt: skip
    try:
        for name, work in HERE.items():
            if wanted(name):
                keep(name, work)
        for name, process in others.items():
            output, _ = process.communicate()
            keep(name, partial(outcome, process.returncode, output))
    finally:
        for process in others.values():
            process.kill()
    if wanted("memory"):
        keep("memory", partial(run, [sys.executable, *PYTEST, ALONE]))
    return 0 if all(row["holds"] for row in rows.rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
