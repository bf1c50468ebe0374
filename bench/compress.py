"""Training with the pinned buffers compressed: what it costs in time, what it saves in pinned memory, and the bits.

    python bench/compress.py                                  VGG-16(64) and AlexNet(256), bf16 and fp32, on a GPU
    python bench/compress.py --device host --networks smallvgg:8 --precisions fp32 --mode "vdnn++:all(m)"

Each row is what `minidnn compare --compress all` says of one mode, which it runs with compression and without it, from
the same weights over the same batches; the gradients of both are held against those of `base`. Activations are those of
a network that begins to train, about half of them zero; for trained ones see bench/activations.py.

Writes compress-<card>.json to the output folder, after each row; rows that are there are not measured again (see
`--again`). Exits with 1 where gradients differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT
from bench.rows import RESULTS, Rows, card_of
from minidnn.device.open import open_device
from minidnn.units import format_size

KEPT = (
    "iteration_ms", "uncompressed_ms", "stall_ms", "peak_bytes", "pinned_bytes", "pinned_raw_bytes", "packed_bytes",
    "density", "ratio", "cpu_share", "matches_base",
)  # fmt: skip
"""What a row keeps of what `compare` says. `cpu_share`: cores that packing and unpacking kept busy, on average."""
LIMIT_S = 600
SAID = {True: "bit-equal", False: "DIFFER", None: "not compared, base does not fit"}
"""Of `matches_base`."""


def compared(network: str, precision: str, mode: str, device: str, steps: int) -> dict[str, Any]:
    """One run of `minidnn compare`: the mode's row, and the device."""
    model, _, batch = network.rpartition(":")
    command = [
        sys.executable, "-m", "minidnn", "compare", model, "--batch", batch, "--precision", precision, "--modes", mode,
        "--compress", "all", "--device", device, "--steps", str(steps), "--json", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.strip())
    said = json.loads(done.stdout)
    (row,) = said["modes"]
    return {"network": network, "precision": precision, "mode": mode, "device": said["device"],
            **{key: row[key] for key in KEPT}}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["vgg16:64", "alexnet:256"], metavar="MODEL:BATCH")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--mode", default="vdnn++:all(p)", help="(default: vdnn++:all(p))")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or host (default: cuda)")
    parser.add_argument("--steps", type=int, default=3, help="timed iterations (default: 3)")
    parser.add_argument("--again", action="store_true", help="measure rows that the result file already has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    with open_device(arguments.device) as device:
        card = device.name
    rows = Rows(f"compress-{card_of(card)}.json", arguments.out, arguments.again, head={"card": card})
    equal = True
    for network, precision in product(arguments.networks, arguments.precisions):
        key, options = f"{network} {precision}: {arguments.mode}", (arguments.mode, arguments.device, arguments.steps)
        if not rows.wanted(key):
            continue
        row = rows.measure(key, partial(compared, network, precision, *options))
        equal = equal and row["matches_base"] is not False
        print(
            f"{key}: {row['uncompressed_ms']:.2f} ms, compressed {row['iteration_ms']:.2f}; pinned "
            f"{format_size(row['pinned_raw_bytes'])}, compressed {format_size(row['pinned_bytes'])}; gradients "
            + SAID[row["matches_base"]],
            flush=True,
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
