"""The convolutions of VGG-16 through cuDNN: which plans there are, are they right, how fast, with how much workspace.

    python bench/convolutions.py [--batch 64] [--precisions bf16 fp32 tf32] [--layers conv1_1 ...] [--out bench/results]

First every plan of a small problem is compared with PyTorch in float64; then each layer's forward (bias and ReLU),
data gradient (with the ReLU's backward where VGG-16 has one) and filter gradient are timed, plan by plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import describe
from bench.kernel_cases import array, gap, poisoned
from bench.kernels import milliseconds
from minidnn.ops import cudnn_ops
from minidnn.ops.context import Context
from minidnn.ops.cudnn_plans import Plans
from minidnn.ops.kernels import Kernels
from minidnn.ops.plans import PlanStore, Problem

LAYERS = {  # name: (C, K, pixels, times in VGG-16, does a ReLU stand in front)
    "conv1_1": (3, 64, 224, 1, False), "conv1_2": (64, 64, 224, 1, True), "conv2_1": (64, 128, 112, 1, False),
    "conv2_2": (128, 128, 112, 1, True), "conv3_1": (128, 256, 56, 1, False), "conv3_2": (256, 256, 56, 2, True),
    "conv4_1": (256, 512, 28, 1, False), "conv4_2": (512, 512, 28, 2, True), "conv5_1": (512, 512, 14, 3, True),
}  # fmt: skip
WINDOW: dict[str, Any] = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
FORMS = {"bf16": (torch.bfloat16, True), "tf32": (torch.float32, True), "fp32": (torch.float32, False)}
FUNCTIONS = {
    "conv2d_forward": cudnn_ops.conv2d_forward, "conv2d_backward_data": cudnn_ops.conv2d_backward_data,
    "conv2d_backward_filter": cudnn_ops.conv2d_backward_filter,
}  # fmt: skip


class Layer:
    """One convolution's tensors, and its three problems."""

    def __init__(self, n: int, c: int, k: int, pixels: int, precision: str, masked: bool, first: bool = False) -> None:
        dtype, nhwc = FORMS[precision]
        form = torch.channels_last if nhwc else torch.contiguous_format

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(dtype).to(memory_format=form)

        self.precision = precision
        self.x, self.dy = random(n, c, pixels, pixels).relu_(), random(n, k, pixels, pixels)
        self.w = random(k, c, 3, 3) / (9 * c) ** 0.5
        self.b = torch.randn(k, device="cuda")
        self.y, self.dx = poisoned(self.dy), poisoned(self.x)
        self.dw = poisoned(self.w, torch.float32)
        self.arrays: dict[str, dict[str, Any]] = {
            "conv2d_forward": {"x": array(self.x), "w": array(self.w), "b": array(self.b), "y": array(self.y)},
            "conv2d_backward_data": {"dy": array(self.dy), "w": array(self.w), "dx": array(self.dx)},
            "conv2d_backward_filter": {"x": array(self.x), "dy": array(self.dy), "dw": array(self.dw)},
        }
        if masked:
            self.arrays["conv2d_backward_data"]["mask"] = array(self.x)
        if first:
            del self.arrays["conv2d_backward_data"]

    def problem(self, function: str) -> Problem:
        """The plans' view."""
        relu = {"relu": True} if function == "conv2d_forward" else {}
        return cudnn_ops.problem(function, self.precision, self.arrays[function], **WINDOW, **relu)

    def bind(self, on: Context, function: str, algorithm: str, workspace: int) -> Any:
        """The launch."""
        relu = {"relu": True} if function == "conv2d_forward" else {}
        return FUNCTIONS[function](
            on, **self.arrays[function], **WINDOW, **relu, algorithm=algorithm, workspace=workspace
        )

    def errors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Per function the output and what it should be, by PyTorch in float64."""
        x = self.x.double().contiguous().requires_grad_()
        w = self.w.double().contiguous().requires_grad_()
        z = F.conv2d(x, w, self.b.double(), padding=1)
        dx, dw = torch.autograd.grad(z, (x, w), self.dy.double().contiguous())
        if "mask" in self.arrays["conv2d_backward_data"]:
            dx = torch.where(self.x <= 0, torch.zeros_like(dx), dx)
        return {"conv2d_forward": (self.y, z.relu()), "conv2d_backward_data": (self.dx, dx),
                "conv2d_backward_filter": (self.dw, dw)}  # fmt: skip


def context(precision: str, stream: torch.cuda.Stream, store: PlanStore, kernels: Kernels, seconds: float) -> Context:
    """Where ops of one precision are bound."""
    scratch = torch.empty(8 * 2**20, device="cuda", dtype=torch.uint8)
    context.kept = scratch  # type: ignore[attr-defined]
    plans = Plans(stream.cuda_stream, store, build_seconds=seconds, tried=1000)
    return Context(kernels, stream.cuda_stream, (scratch.data_ptr(), scratch.numel()), precision, plans=plans)


def check(on: Context, precision: str, workspace: torch.Tensor) -> list[dict[str, Any]]:
    """Every plan of a small problem, masked and with a bias: its error."""
    layer = Layer(4, 32, 48, 20, precision, masked=True)
    wanted = layer.errors()
    rows = []
    for function in layer.arrays:
        assert on.plans is not None
        for plan in on.plans.explore(layer.problem(function), 4):
            output, reference = wanted[function]
            output.fill_(float("nan"))
            torch.cuda.synchronize()
            try:
                layer.bind(on, function, plan.name, workspace.data_ptr())()
            except Exception as error:
                print(f"{precision} {function} {plan.name}: {error}", flush=True)
                continue
            torch.cuda.synchronize()
            rows.append({"precision": precision, "function": function, "plan": plan.name, "workspace": plan.workspace,
                         "deterministic": plan.deterministic, "error": gap(output, reference)})  # fmt: skip
        mine = [r for r in rows if r["function"] == function]
        errors = sorted(r["error"] for r in mine)
        fused = sum(r["plan"].startswith("fused") for r in mine)
        if mine:
            print(f"{precision} {function}: {len(mine)} plans ({fused} fused, {sum(r['deterministic'] for r in mine)} "
                  f"deterministic), errors {errors[0]:.1e} .. {errors[-1]:.1e}", flush=True)  # fmt: skip
    return rows


def measure(
    on: Context, name: str, batch: int, precision: str, stream: torch.cuda.Stream, workspace: torch.Tensor
) -> list[dict[str, Any]]:
    """All plans of one layer, timed."""
    c, k, pixels, times, masked = LAYERS[name]
    layer = Layer(batch, c, k, pixels, precision, masked, first=name == "conv1_1")
    rows = []
    for function in layer.arrays:
        begin = time.perf_counter()
        problem = layer.problem(function)
        assert on.plans is not None
        found = on.plans.explore(problem, 4)
        seconds = time.perf_counter() - begin
        mine = []
        for rank, plan in enumerate(found):
            if plan.workspace > workspace.numel():
                continue
            try:
                ms = milliseconds(layer.bind(on, function, plan.name, workspace.data_ptr()), stream, 5)
            except Exception as error:
                print(f"{precision} {name} {function} {plan.name}: {error}", flush=True)
                continue
            mine.append({"precision": precision, "layer": name, "times": times, "function": function,
                         "plan": plan.name, "ms": ms, "workspace": plan.workspace,
                         "deterministic": plan.deterministic, "rank": rank,
                         "build_s": on.plans._built[problem.key, plan.name].build_seconds,
                         "compiled": on.plans._built[problem.key, plan.name].compiled})  # fmt: skip
        if not mine:
            print(f"{precision} {name} {function}: no plan", flush=True)
            continue
        on.plans.record(problem, {r["plan"]: r["ms"] for r in mine})
        mine.sort(key=lambda r: r["ms"])
        best = mine[0]
        least = min(mine, key=lambda r: (r["workspace"], r["ms"]))
        print(
            f"{precision} {name} {function[7:]:15s} {best['ms']:7.3f} ms, {best['workspace'] / 2**20:7.1f} MiB "
            f"{best['plan'][:28]:28s} | least: {least['ms']:7.3f} ms {least['workspace'] / 2**20:6.1f} MiB "
            f"| {len(mine)} plans, {seconds:.1f} s",
            flush=True,
        )  # fmt: skip
        rows += mine
    return rows


def totals(rows: list[dict[str, Any]]) -> None:
    """Sums over VGG-16: the fastest plans, deterministic ones, fused or not, and within bounds of workspace."""
    rules = {
        "fastest": lambda r: True, "deterministic": lambda r: r["deterministic"],
        "not fused": lambda r: not r["plan"].startswith("fused"), "16 MiB": lambda r: r["workspace"] <= 2**24,
        "no workspace": lambda r: r["workspace"] == 0,
    }  # fmt: skip
    for precision in dict.fromkeys(r["precision"] for r in rows):
        for title, rule in rules.items():
            best: dict[tuple[str, str], float] = {}
            for r in rows:
                key = (r["layer"], r["function"])
                if r["precision"] == precision and rule(r):
                    best[key] = min(best.get(key, 1e9), r["ms"] * r["times"])
            parts = {f: sum(ms for (_, g), ms in best.items() if g == f) for f in FUNCTIONS}
            text = ", ".join(f"{f[7:]} {ms:.2f}" for f, ms in parts.items())
            print(f"{precision} {title:14s} {sum(parts.values()):7.2f} ms ({text}); {len(best)} ops")


def extras(on: Context, workspace: torch.Tensor) -> dict[str, Any]:
    """Host time of a launch, and a plan that went through the store."""
    assert on.plans is not None
    layer = Layer(4, 32, 48, 20, on.precision, masked=True)
    problem = layer.problem("conv2d_forward")
    wanted, wrong = layer.errors()["conv2d_forward"], []
    plans = on.plans.algorithms(problem)
    launch = layer.bind(on, "conv2d_forward", plans[0].name, workspace.data_ptr())
    launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        launch()
    host = (time.perf_counter() - begin) / 200 * 1e6
    torch.cuda.synchronize()
    restored = 0
    on.plans._built.clear()
    for plan in plans:
        if on.plans.store.blob(problem.key, plan.name):
            wanted[0].fill_(float("nan"))
            torch.cuda.synchronize()
            layer.bind(on, "conv2d_forward", plan.name, workspace.data_ptr())()
            torch.cuda.synchronize()
            restored += on.plans._built[(problem.key, plan.name)].index < 0
            wrong.append(gap(*wanted))
    print(f"{on.precision}: {host:.1f} us of host time per launch; {restored} plans restored, worst error "
          f"{max(wrong, default=0):.1e}", flush=True)  # fmt: skip
    return {"precision": on.precision, "host_us": host, "restored": restored, "restored_error": max(wrong, default=0)}


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32", "fp32"], choices=list(FORMS))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=1.0, help="slow builds per graph")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    card, stream, kernels = torch.cuda.get_device_name(), torch.cuda.Stream(), Kernels()
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = PlanStore(None)
    workspace = torch.empty(4 * 2**30, device="cuda", dtype=torch.uint8)
    checks, rows, more = [], [], []
    for precision in arguments.precisions:
        on = context(precision, stream, store, kernels, arguments.seconds)
        checks += check(on, precision, workspace)
        more.append(extras(on, workspace))
        for name in arguments.layers:
            rows += measure(on, name, arguments.batch, precision, stream, workspace)
            torch.cuda.empty_cache()
    totals(rows)
    target = arguments.out / f"convolutions-{card.replace(' ', '-')}.json"
    environment = describe("cupy-cuda13x", "nvidia-cudnn-frontend", "torch")
    result = {"card": card, "environment": environment, "checks": checks, "extras": more, "plans": rows}
    target.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
