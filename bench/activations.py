"""How dense activations of trained networks are, layer by layer, and what compressing them saves.

    python bench/activations.py                          AlexNet and VGG-16, small images, on the host; some minutes
    python bench/activations.py --device cuda --input 224 --batch 16 --steps 1000 --networks vgg16

Trains each network from scratch on the handwritten digits (1,797 images of 8 x 8, scaled up, in three channels) in mode
`vdnn++:all` with every offloaded tensor compressed, and reads from the codec what it packed: at the first step, and
after the last (Adam, `--lr`). The share saved is given as measured, and for the papers' image sizes with the
measured densities.

What this is not: a network trained on ImageNet. Digits are easier and their images plainer, so densities differ from
the published ones, which the table shows beside ours (vDNN++, section V-C: 36 % saved on AlexNet(128), 67 % on
VGG-16(16), all offloaded layers compressed). Writes bench/results/activations_<device>.json; "density" in it is a file
for `minidnn memory --density`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from environment import describe

from minidnn import Trainer, nn, optim
from minidnn.data import Data, Dataset, from_arrays, open_data
from minidnn.graph.build import build
from minidnn.models import create
from minidnn.plan.compress import compressible, predicted
from minidnn.profile.profile import Profile
from minidnn.report import text_table
from minidnn.run.choose import choose
from minidnn.units import format_size

MODE = "vdnn++:all(m)"
SMALLEST = {"alexnet": 95, "vgg16": 32}
"""Images as small as the networks' poolings allow."""
PAPER = {"alexnet": (128, 0.36), "vgg16": (16, 0.67)}
"""Batch and share saved, section V-C."""


def digits(side: int, seed: int) -> Data:
    """The handwritten digits, scaled up linearly to 3 x side x side."""
    small = open_data("digits", seed=seed)
    assert small.test is not None
    return from_arrays("digits", _scaled(small.train, side), _scaled(small.test, side), classes=10)


def _scaled(part: Dataset, side: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.empty((len(part), 1, 8, 8), np.float32), np.empty(len(part), np.int64)
    part.read(np.arange(len(part)), x, y)
    at = np.clip((np.arange(side) + 0.5) * 8 / side - 0.5, 0, 7)
    low = np.minimum(at.astype(int), 6)
    weights = np.zeros((side, 8), np.float32)
    weights[np.arange(side), low], weights[np.arange(side), low + 1] = 1 - (at - low), at - low
    images = np.einsum("ah,nchw,bw->ncab", weights, x, weights, optimize=True)
    return np.repeat(images, 3, axis=1).astype(np.float32), y


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one network; what the codec packed at the first step and after the last."""
    side = args.input or SMALLEST[name]
    data = digits(side, args.seed)
    net = create(name, num_classes=10, input_shape=(3, side, side))
    optimizer = optim.Adam(args.lr, schedule=optim.WarmUp(20))
    with Trainer(
        net, nn.CrossEntropyLoss(), optimizer, args.batch, memory=MODE, device=args.device, compress="all",
        seed=args.seed,
    ) as trainer:  # fmt: skip
        began = time.perf_counter()
        x, y = np.empty((args.batch, 3, side, side), np.float32), np.empty(args.batch, np.int64)
        data.train.read(np.arange(args.batch), x, y)
        trainer.step(x, y)
        first = trainer.compression()
        epochs = -(-args.steps * args.batch // len(data.train))
        result = trainer.fit(data, epochs, steps=args.steps, evaluate_epochs=False)
        score = trainer.evaluate(data)
        trainer.step(x, y)
        codec_s = trainer.programs.codec_s
        last = trainer.compression()
        pinned = {"pinned_bytes": trainer.pinned_bytes, "pinned_raw_bytes": trainer.schedule.pinned_raw_bytes}
    return {
        "network": name, "input": [3, side, side], "batch": args.batch, "lr": args.lr, "steps": result.steps + 1,
        "seconds": round(time.perf_counter() - began, 1), "codec_s": round(codec_s, 2),
        "test_accuracy": score["test_accuracy"], "test_loss": score["test_loss"], **pinned,
        "untrained": first, "trained": last,
        "density": {t["tensor"]: round(t["density"], 4) for t in last["compressed"]},
    }  # fmt: skip


def at_paper_size(found: dict[str, Any]) -> float:
    """Share of the offloaded bytes that compression saves at the paper's image and batch size, by our densities."""
    net = create(found["network"])
    assert net.input_shape is not None
    batch = PAPER[found["network"]][0]
    graph = build(net, nn.CrossEntropyLoss(), (batch, *net.input_shape), optimizer=optim.SGD(0.01))
    plan = choose(graph, MODE, Profile("none")).plan
    ratio = predicted(graph, replace(plan, compress=compressible(graph, plan)), found["density"])["ratio"]
    return float(1 - 1 / ratio)


def show(found: dict[str, Any]) -> None:
    """Print a network's table."""
    print(
        f"\n{found['network']}, input {found['input'][1]}, batch {found['batch']}, {found['steps']} steps on digits: "
        f"test accuracy {100 * found['test_accuracy']:.1f} %, codecs {found['codec_s']} s of {found['seconds']} s"
    )
    before = {t["tensor"]: t for t in found["untrained"]["compressed"]}
    rows = [
        [t["tensor"], t["layer"] or "-", format_size(t["raw_bytes"]), f"{before[t['tensor']]['density']:.3f}",
         f"{t['density']:.3f}", f"{100 * (1 - 1 / t['ratio']):.1f} %"]
        for t in found["trained"]["compressed"]
    ]  # fmt: skip
    print(text_table(("offloaded", "read by", "bytes", "untrained", "trained", "saved"), rows))
    batch, published = PAPER[found["network"]]
    print(
        f"saved of all offloaded bytes: {100 * found['saved']:.1f} % as trained here, "
        f"{100 * found['saved_at_paper_size']:.1f} % for these densities at {found['network']}({batch}) on 224-pixel "
        f"images; published {100 * published:.0f} %\npinned: {format_size(found['pinned_bytes'])} instead of "
        f"{format_size(found['pinned_raw_bytes'])}"
    )


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(SMALLEST), choices=list(SMALLEST))
    parser.add_argument("--device", default="host")
    parser.add_argument("--input", type=int, help="height and width of the images (default: as small as works)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.networks:
        found = measure(name, args)
        found["saved"] = 1 - 1 / found["trained"]["ratio"]
        found["saved_at_paper_size"] = at_paper_size(found)
        show(found)
        results.append(found)
    output = args.output or Path(__file__).parent / "results" / f"activations_{args.device.partition(':')[0]}.json"
    if output.exists():  # networks of other runs stay
        kept = json.loads(output.read_text(encoding="utf-8"))["networks"]
        results += [other for other in kept if other["network"] not in args.networks]
    text = {
        "what": "density of the offloaded activations of networks trained on upscaled digits, and what packing saves",
        "published_saved": {name: share for name, (_, share) in PAPER.items()}, "environment": describe("numba"),
        "networks": results,
    }  # fmt: skip
    output.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
