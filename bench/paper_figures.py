"""Figures 4, 6, 8 and 9 and Table IV of the vDNN++ paper, simulated on its two GPUs. Needs no GPU.

    python bench/paper_figures.py [--out bench/results] [--plots]

What is published as a number stands beside ours; elsewhere a dash. Times are a model's (minidnn.profile.model), and a
model cannot know what a data sheet does not say: which algorithm cuDNN 7 took for a layer, what it reached there (its
times for single layers are published for the four rows of Table I only), what the host thread cost, how far the link
was shared. Absolute times may be off by a tenth, for single layers by half; what can be compared is the order of modes,
where they stall, and the relative improvement (vDNN - vDNN++) / (vDNN - base). Both cards have the link of a PCIe 3.0
slot; Table I alone implies half of that (see minidnn.profile.published).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import describe
from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph
from minidnn.models import create
from minidnn.profile.gpus import named_gpu
from minidnn.profile.model import modelled
from minidnn.profile.profile import Profile
from minidnn.profile.published import table1
from minidnn.report import text_table, timeline_plot
from minidnn.run.choose import Options
from minidnn.run.compare import DEFAULT_MODES, ModeResult, predict
from minidnn.units import format_ms, format_size

GPUS = ("gtx970", "gtx1080ti")
FIGURE_9 = (("AlexNet(128)", "alexnet", 128), ("AlexNet(256)", "alexnet", 256), ("VGG-16(16)", "vgg16", 16),
            ("VGG-16(64)", "vgg16", 64), ("table3(32)", "table3", 32))  # fmt: skip
DEEP = (("VGG-116(32)", "vgg:extra=20", 32), ("VGG-191(32)", "vgg:extra=35", 32))
TABLE_IV: dict[tuple[str, str], tuple[float, float] | str] = {
    ("VGG-116(32)", "dyn"): (2717, 2468), ("VGG-116(32)", "conv(p)"): (3055, 3018),
    ("VGG-116(32)", "all(p)"): (3170, 3129), ("VGG-116(32)", "aconv(p)"): (2717, 2468),
    ("VGG-191(32)", "dyn"): (5139, 5097), ("VGG-191(32)", "conv(p)"): (5139, 5097),
    ("VGG-191(32)", "all(p)"): (5244, 5209), ("VGG-191(32)", "aconv(p)"): "out of memory",
}  # fmt: skip
"""ms on a GTX 1080 Ti: vDNN, vDNN++."""
IMPROVEMENT = {("gtx970", "AlexNet(128)", "all(p)"): 60.0, ("gtx1080ti", "AlexNet(256)", "all(m)"): 60.0}
"""Published relative improvements in percent ("up to 60 %")."""
SECTION_V_A = 57.5
"""(2491 - 2261) / (2491 - 2091) ms: the constructed network, conv(m)."""


def graph_of(model: str, batch: int) -> Graph:
    """The paper's graph: fp32, NCHW, pooling saves X and Y, weights updated inside backward."""
    net = create(model)
    assert net.input_shape is not None
    return build(net, nn.CrossEntropyLoss(), (batch, *net.input_shape), optimizer=optim.SGD(0.01))


def modes_of(graph: Graph, profile: Profile, budget: int | None, modes: tuple[str, ...]) -> dict[str, ModeResult]:
    """Simulated results by mode."""
    return {r.mode: r for r in predict(graph, modes, profile, Options(budget=budget))}


def relative_improvement(base: float | None, vdnn: float | None, vdnnpp: float | None) -> float | None:
    """The paper's definition, in percent; None where vDNN loses nothing to base or one does not fit."""
    if base is None or vdnn is None or vdnnpp is None or vdnn - base < 1e-9:
        return None
    return 100 * (vdnn - vdnnpp) / (vdnn - base)


def figure_9() -> list[dict[str, Any]]:
    """base(p) time over mode time for each network, GPU and mode, and the improvement of vDNN++ over vDNN."""
    rows = []
    for gpu in GPUS:
        for network, model, batch in FIGURE_9:
            graph = graph_of(model, batch)
            profile = modelled(graph, gpu)
            unlimited = modes_of(graph, profile, None, ("base(p)", "base(m)"))
            found = modes_of(graph, profile, named_gpu(gpu).memory_bytes, DEFAULT_MODES)
            for mode in [m for m in DEFAULT_MODES if m.startswith("vdnn:")]:
                name = mode.partition(":")[2]
                vdnn, vdnnpp = found[mode], found[f"vdnn++:{name}"]
                rule = name[-2] if name.endswith(")") else "p"
                base = unlimited[f"base({rule})"].iteration_ms
                rows.append(
                    {
                        "gpu": gpu, "network": network, "mode": name, "base_p_ms": unlimited["base(p)"].iteration_ms,
                        "base_fits": found["base(p)"].fits, "vdnn_ms": vdnn.iteration_ms,
                        "vdnnpp_ms": vdnnpp.iteration_ms,
                        "improvement": relative_improvement(base, vdnn.iteration_ms, vdnnpp.iteration_ms),
                        "published_improvement": IMPROVEMENT.get((gpu, network, name)),
                    }
                )  # fmt: skip
    return rows


def table_iv() -> list[dict[str, Any]]:
    """VGG-116 and VGG-191 on the 1080 Ti."""
    rows = []
    for network, model, batch in DEEP:
        graph = graph_of(model, batch)
        profile = modelled(graph, "gtx1080ti")
        names = ("all(p)", "conv(p)", "aconv(p)", "dyn")
        modes = tuple(f"{family}:{name}" for name in names for family in ("vdnn", "vdnn++"))
        found = modes_of(graph, profile, named_gpu("gtx1080ti").memory_bytes, modes)
        for name in names:
            vdnn, vdnnpp = found[f"vdnn:{name}"], found[f"vdnn++:{name}"]
            rows.append(
                {
                    "network": network, "mode": name, "vdnn_ms": vdnn.iteration_ms, "vdnnpp_ms": vdnnpp.iteration_ms,
                    "peak_bytes": vdnn.peak_bytes, "fits": vdnn.fits, "published": TABLE_IV[network, name],
                }
            )  # fmt: skip
    return rows


def section_v_a() -> dict[str, Any]:
    """The constructed network with Table I's own times: conv(m) under base, vDNN and vDNN++."""
    graph = graph_of("table3", 32)
    found = modes_of(graph, table1(graph), None, ("base(m)", "vdnn:conv(m)", "vdnn++:conv(m)"))
    base, vdnn, vdnnpp = (found[mode].iteration_ms for mode in ("base(m)", "vdnn:conv(m)", "vdnn++:conv(m)"))
    return {
        "network": "table3(32)", "base_ms": base, "vdnn_ms": vdnn, "vdnnpp_ms": vdnnpp,
        "improvement": relative_improvement(base, vdnn, vdnnpp), "published_improvement": SECTION_V_A,
    }  # fmt: skip


def figure_6() -> list[dict[str, Any]]:
    """VGG-16(64) on the 1080 Ti, memory-optimal: forward computation against the transfer of X, layer by layer."""
    graph = graph_of("vgg16", 64)
    profile = modelled(graph, "gtx1080ti")
    assert profile.link is not None
    rows = []
    for layer in graph.layers[:-1]:
        ops = [op for op in graph.ops if op.forward and op.layer == layer.index]
        slowest = [min(profile.algorithms(graph, op), key=lambda a: (a.workspace, a.ms or 0)) for op in ops]
        rows.append(
            {
                "layer": layer.name, "kind": layer.kind, "compute_ms": sum(a.ms or 0 for a in slowest),
                "transfer_ms": profile.link.ms(graph.tensors[layer.x].nbytes, True),
            }
        )  # fmt: skip
    return rows


def draw(out: Path) -> None:
    """Figures 4 and 8: the constructed network's timelines with Table I's times."""
    graph = graph_of("table3", 32)
    found = modes_of(graph, table1(graph), None, ("vdnn:conv(m)", "vdnn++:conv(m)"))
    lines = {mode: r.timeline for mode, r in found.items() if r.timeline is not None}
    timeline_plot(lines, out / "figure_4_and_8.png", title="vDNN (Figure 4) and vDNN++ (Figure 8): table3(32), conv(m)")


Rows = list[dict[str, Any]]


def _print(figure9: Rows, iv: Rows, va: dict[str, Any], six: Rows) -> None:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} %"

    print("\nFigure 9: base(p) time / mode time (simulated; the paper's bars carry no numbers)")
    lines = []
    for row in figure9:
        base = row["base_p_ms"]
        ratios = ["-" if row[key] is None else f"{base / row[key]:.3f}" for key in ("vdnn_ms", "vdnnpp_ms")]
        lines.append(
            [row["gpu"], row["network"], row["mode"], format_ms(base) + ("" if row["base_fits"] else " (too large)"),
             *ratios, percent(row["improvement"]), percent(row["published_improvement"])]
        )  # fmt: skip
    header = ["gpu", "network", "mode", "base(p) ms", "vDNN", "vDNN++", "improvement", "published"]
    print(text_table(header, lines))
    print("\nTable IV: ms on a GTX 1080 Ti, vDNN and vDNN++")
    lines = [
        [r["network"], r["mode"], format_ms(r["vdnn_ms"]), format_ms(r["vdnnpp_ms"]),
         r["published"] if isinstance(r["published"], str) else "{:.0f} / {:.0f}".format(*r["published"]),
         format_size(r["peak_bytes"]) + ("" if r["fits"] else " (does not fit)")]
        for r in iv
    ]  # fmt: skip
    print(text_table(["network", "mode", "vDNN", "vDNN++", "published", "peak"], lines))
    print(
        f"\nSection V-A, constructed network with Table I's times: base {format_ms(va['base_ms'])}, vDNN "
        f"{format_ms(va['vdnn_ms'])}, vDNN++ {format_ms(va['vdnnpp_ms'])} ms; relative improvement "
        f"{percent(va['improvement'])} (published {va['published_improvement']} % at a size that cannot have run)"
    )
    print("\nFigure 6: VGG-16(64), memory-optimal, forward computation against the transfer of X")
    lines = [[r["layer"], r["kind"], format_ms(r["compute_ms"]), format_ms(r["transfer_ms"])] for r in six]
    print(text_table(["layer", "kind", "compute ms", "transfer ms"], lines))


def main() -> int:
    """Print all, write JSON, and with --plots the timelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the result files")
    parser.add_argument("--plots", action="store_true", help="draw Figures 4 and 8")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    nine, four, five, six = figure_9(), table_iv(), section_v_a(), figure_6()
    _print(nine, four, five, six)
    result = {**describe(), "figure_9": nine, "table_iv": four, "section_v_a": five, "figure_6": six}
    (args.out / "paper_figures.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.plots:
        draw(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
