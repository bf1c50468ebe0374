"""Every table and figure of the project, made anew: benches, pictures, and the generated parts of README and docs.

    python bench/run_all.py                  everything that this machine can measure; hours
    python bench/run_all.py --list           what there is, and what of it needs a GPU
    python bench/run_all.py --only paper_tables figures
    python bench/run_all.py --readme         the pages alone, from the result files as they are; a second

Benches run one after another as processes of their own and write bench/results/; one that fails leaves the others and
its old results alone, and the exit code is 1. Those on a GPU keep rows that are measured already (see their --again).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT
from bench.sections import rewritten
from minidnn.device.cuda import PRECISIONS
from minidnn.device.open import open_device
from minidnn.errors import DeviceError

PAGES = (ROOT / "README.md", ROOT / "docs" / "planners.md", ROOT / "docs" / "results.md")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Step:
    """One bench as it is run: script, arguments, environment."""

    script: str
    arguments: tuple[str, ...] = ()
    gpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """As typed in the checkout."""
        return ["python", f"bench/{self.script}.py", *self.arguments]


NETWORKS = ("vgg16:256", "vgg16:64", "alexnet_tv:256", "vgg116:32", "vgg191:32", "table3:256")
"""The memory modes are compared on these, in all precisions."""


def modes(network: str, precision: str, target: str = "native") -> Step:
    """The memory modes of one network."""
    return Step("modes", ("--network", network, "--precision", precision, "--targets", target), gpu=True)


STEPS = (
    Step("paper_tables"),
    Step("paper_figures", ("--plots",)),
    Step("planners", ("--plots",)),
    Step("host_conv", ("--clock", "cpu"), environment={"OPENBLAS_CORETYPE": "Haswell"}),
    Step("host_conv", ("--clock", "cpu", "--out", "bench/results/host_conv_detected_core.json")),
    Step("pool"),
    Step("zvc"),
    Step("activations"),
    Step("checks", gpu=True),
    Step("kernels", gpu=True),
    Step("convolutions", gpu=True),
    Step("compress", gpu=True),
    Step("peers", gpu=True),
    Step("peers", ("--peers", "out-of-core", "--networks", "vgg16:256", "--precisions", "fp32", "bf16"), gpu=True),
    *(modes(network, precision) for network in NETWORKS for precision in PRECISIONS),
    modes("table3:256", "fp32", "paper"), modes("vgg191:96", "fp32"), modes("vgg16:2560", "bf16"),
    Step("tradeoff"), Step("figures"),
)  # fmt: skip
"""In the order in which they run."""


def gpu_missing() -> str:
    """Why no GPU can be used; empty where one can."""
    try:
        open_device("cuda").close()
    except (DeviceError, ImportError) as error:
        return str(error)
    return ""


def run(step: Step) -> bool:
    """Run a bench; whether it went well."""
    print(f"\n$ {' '.join(step.command)}", flush=True)
    environment = {**os.environ, **ONE_THREAD, **step.environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *step.command[1:]], cwd=ROOT, env=environment).returncode == 0


def write_pages() -> None:
    """Make the generated parts of README and docs anew."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'as it was' if new == text else 'rewritten'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where a bench failed."""
    names = list(dict.fromkeys(step.script for step in STEPS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="BENCH", help="these benches alone")
    parser.add_argument("--readme", action="store_true", help="run no bench: write the pages from the result files")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args = parser.parse_args(argv)
    steps = [] if args.readme else [step for step in STEPS if step.script in args.only]
    if args.list:
        for step in steps:
            print(f"{'GPU' if step.gpu else 'CPU'}  {' '.join(step.command)}")
        return 0
    missing = gpu_missing() if any(step.gpu for step in steps) else ""
    failed = [step for step in steps if not (step.gpu and missing) and not run(step)]
    if missing:
        print(f"\nno GPU, its benches were left out: {missing}")
    write_pages()
    for step in failed:
        print(f"failed: {' '.join(step.command)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
