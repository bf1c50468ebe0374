"""The generated parts of README and docs/results.md: Markdown of what the result files say, and of nothing else.

A page marks such a part with `<!-- results: NAME -->` and `<!-- end of NAME -->`; NAME is one of PARTS. What has no
result file is not mentioned. Tables take the rows that the files have; none is named here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench.gpu_sections import all_modes, checks, compression, convolutions, gains, kernels, limits, modes, peers
from bench.markdown import files, heading, megabytes, milliseconds, origin, percent, share, table
from minidnn.units import format_size

RESULTS = Path(__file__).resolve().parent / "results"
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


def rewritten(page: str, results: Path = RESULTS) -> str:
    """A page with its marked parts made anew. Raises KeyError for a part that nobody makes."""
    return MARKED.sub(lambda match: match[1] + part(match[2], results) + match[4], page)


def part(name: str, results: Path) -> str:
    """A marked part: each section's introduction and tables, where there are any."""
    text = "\n"
    for introduction, section in PARTS[name]:
        tables = section(results)
        text += f"{introduction}\n\n{tables}" if tables else ""
    return text


# -- the papers --------------------------------------------------------------------------------------------------------


def memory(results: Path) -> str:
    """README: Table V in short, and what placement reaches."""
    text = ""
    for file, found in files(results, "paper_tables.json"):
        cells = {(c["network"], c["mode"], c["column"]): c for c in found["cells"] if c["table"] == "V"}
        placed = {(r["network"], r["mode"], r["order"]): r for r in found["placement"]}
        lines = []
        for network, mode in dict.fromkeys((c["network"], c["mode"]) for c in cells.values()):
            peak, pool = (cells[network, mode, column] for column in ("aggregate", "prefetch-first, best-fit"))
            row = placed[network, mode, "prefetch-first"]
            lines.append(
                [network, f"`vdnn:{mode}`", f"{peak['published_mb']} / {peak['ours_mb']:.0f}",
                 f"{pool['published_mb']} / {pool['ours_mb']:.0f}", percent(row["best-fit"], row["aggregate_bytes"]),
                 percent(row["placed_bytes"], row["aggregate_bytes"])]
            )  # fmt: skip
        head = ["network (batch)", "mode", "live bytes, peak, MB: published / ours", "pool, MB: published / ours",
                "best-fit pool above the peak", "our placement above the peak"]  # fmt: skip
        text += table(head, lines) + origin(file, found, "paper_tables.py")
    return text


def paper_tables(results: Path) -> str:
    """Every cell of Tables II and V and of sections III-C and V-B; and the placements."""
    text = ""
    for file, found in files(results, "paper_tables.json"):
        for name, cells in groupby(found["cells"], key=lambda c: str(c["table"])):
            lines = [
                [f"{c['network']} {c['mode']}".strip() or "-", c["column"], *map(megabytes, (c["published_mb"],
                 c["ours_mb"], c["needed_mb"]))] for c in cells
            ]  # fmt: skip
            title = f"{'Table' if name in ('II', 'V') else 'Section'} {name}, MB of 2^20 bytes"
            text += heading(title) + table(["case", "column", "published", "ours", "needed"], lines)
        lines = [
            [r["network"], r["mode"], r["order"], format_size(r["aggregate_bytes"]),
             *(percent(r[key], r["aggregate_bytes"]) for key in ("placed_bytes", "best-fit", "high-end"))]
            for r in found["placement"]
        ]  # fmt: skip
        text += heading("Pools above the peak of live bytes")
        text += table(["network", "mode", "order", "peak", "our placement", "best-fit", "high-end"], lines)
        text += origin(file, found, "paper_tables.py")
    return text


def deep(results: Path) -> str:
    """Table IV: networks of a hundred layers and more."""
    text = ""
    for file, found in files(results, "paper_figures.json"):
        lines = [
            [r["network"], f"`{r['mode']}`", *(milliseconds(r[key]) for key in ("vdnn_ms", "vdnnpp_ms")),
             *(r["published"] if isinstance(r["published"], list) else [r["published"]] * 2),
             format_size(r["peak_bytes"])] for r in found["table_iv"]
        ]  # fmt: skip
        head = ["network (batch)", "mode", "vDNN ms", "vDNN++ ms", "published vDNN", "published vDNN++", "memory"]
        text += table(head, lines) + origin(file, found, "paper_figures.py")
    return text


def figure_9(results: Path) -> str:
    """All bars of Figure 9 as numbers, and the constructed network."""
    text = ""
    for file, found in files(results, "paper_figures.json"):
        lines = [
            [r["gpu"], r["network"], f"`{r['mode']}`", *(milliseconds(r[k]) for k in ("base_p_ms", "vdnn_ms",
             "vdnnpp_ms")), *(share(r[k]) for k in ("improvement", "published_improvement"))]
            for r in found["figure_9"]
        ]  # fmt: skip
        own = found["section_v_a"]
        lines.append(
            ["Table I's times", own["network"], "`conv(m)`", *(milliseconds(own[k]) for k in ("base_ms", "vdnn_ms",
             "vdnnpp_ms")), *(share(own[k]) for k in ("improvement", "published_improvement"))]
        )  # fmt: skip
        head = ["GPU", "network", "mode", "base(p) ms", "vDNN ms", "vDNN++ ms", "improvement", "published"]
        text += table(head, lines) + origin(file, found, "paper_figures.py")
    return text


def planners(results: Path) -> str:
    """Time over the lower bound, mean over the budgets at which a policy fits; and how far `best` is from it."""
    text = ""
    for file, found in files(results, "planners.json"):
        rows = found.get("summary", [])  # a run that was cut short has none yet
        policies = list(dict.fromkeys(name for row in rows for name in row["mean_ratio"]))
        lines = []
        for row in rows:
            cells = [
                "-" if row["mean_ratio"].get(p) is None else f"{row['mean_ratio'][p]:.3f} ({row['fits'][p]})"
                for p in policies
            ]
            near = f"{row['within']}/{row['budgets']}"
            lines.append([row["case"], *cells, near, f"{row['worst_ratio']:.3f}"])
        head = ["network (batch), GPU", *(f"`{p}`" for p in policies), f"`best` within {found.get('near')}",
                "worst of `best`"]  # fmt: skip
        text += table(head, lines) + origin(file, found, "planners.py") if lines else ""
    return text


def all_planners(results: Path) -> str:
    """The same, behind the plots of Figures 2 and 3."""
    text = planners(results)
    drawn = [path.name for path in sorted(results.glob("planners_*.png"))] if text else []
    return "".join(f"![{Path(name).stem}](../bench/results/{name})\n\n" for name in drawn) + text


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def host(results: Path) -> str:
    """Host convolutions, the codec, the run-time pool, and densities of trained activations."""
    return host_convolutions(results) + codec(results) + pool(results) + activations(results)


def host_convolutions(results: Path) -> str:
    """Convolutions of VGG-16 on the host as shares of sgemm."""
    text = ""
    for file, found in files(results, "host_conv*.json"):
        shares = [f"{100 * found['share_of_sgemm'][way]:.0f} %" for way in ("forward", "data", "filter")]
        line = [str(found["batch"]), found["openblas_coretype"], f"{found['sgemm_gflops']:.0f}", *shares]
        head = ["batch", "OpenBLAS core", "sgemm GFLOP/s", "forward", "data gradient", "filter gradient"]
        text += heading("VGG-16's convolutions on the host, as shares of sgemm")
        text += table(head, [line]) + origin(file, found, "host_conv.py")
    return text


def codec(results: Path) -> str:
    """Zero-value compression: GB/s of unpacked data on one core."""
    text = ""
    for file, found in files(results, "zvc_*.json"):
        lines = [
            [f"{r['bits']} bits", r["zeros"], f"{r['density']:.2f}", f"{r['packed_share']:.3f}",
             *(f"{r['gb_per_s'][k]['best']:.1f}" for k in ("memcpy_1", "compress_1", "decompress_1"))]
            for r in found["rows"]
        ]  # fmt: skip
        head = ["values", "zeros", "density", "packed / raw", "memcpy GB/s", "pack GB/s", "unpack GB/s"]
        text += heading("Zero-value codec, one core") + table(head, lines) + origin(file, found, "zvc.py")
    return text


def pool(results: Path) -> str:
    """The run-time pool: microseconds of an allocation and a free."""
    text = ""
    for file, found in files(results, "pool_*.json"):
        fits = list(dict.fromkeys(r["fit"] for r in found["rows"]))
        best = {(r["live"], r["fit"]): r["best_us"] for r in found["rows"]}
        lines = [
            [f"{live:,}", *(f"{best[live, fit]:.1f}" if (live, fit) in best else "-" for fit in fits)]
            for live in dict.fromkeys(r["live"] for r in found["rows"])
        ]
        text += heading("Run-time pool, microseconds for an allocation and a free")
        text += table(["live blocks", *fits], lines) + origin(file, found, "pool.py")
    return text


def activations(results: Path) -> str:
    """What compression saves of the offloaded activations of trained networks."""
    text = ""
    for file, found in files(results, "activations_*.json"):
        lines = [
            [n["network"], "x".join(map(str, n["input"])), str(n["batch"]), str(n["steps"]),
             f"{100 * n['test_accuracy']:.1f} %", f"{n['trained']['density']:.2f}", f"{100 * n['saved']:.0f} %",
             f"{100 * n['saved_at_paper_size']:.0f} %", f"{100 * found['published_saved'][n['network']]:.0f} %"]
            for n in found["networks"]
        ]  # fmt: skip
        head = ["network", "input", "batch", "steps", "test accuracy", "density", "saved", "at the paper's size",
                "published (ImageNet)"]  # fmt: skip
        text += heading("Compression of the activations of networks trained on digits")
        text += table(head, lines) + origin(file, found, "activations.py")
    return text


PARTS: Mapping[str, Sequence[tuple[str, Callable[[Path], str]]]] = {
    "readme": (
        ("""**Memory as the vDNN++ paper counts it** (Table V). The paper's pool places tensors at run time, and
fragments; minidnn places them all beforehand.""", memory),
        ("**Networks of more than a hundred layers** (Table IV), simulated on a modelled GTX 1080 Ti.", deep),
        ("**Planners**: time over the lower bound, mean over the budgets that a policy can keep (how many), simulated.",
         planners),
        ("**Memory modes on a GPU**: time of an iteration, and device memory in use at most.", modes),
        ("""**Beside PyTorch** on the same card: an iteration with the copy of its batch, and device memory in use at
most.""", peers),
    ),
    "planners": (
        ("""Mean of time over the bound over the budgets that a policy fits (in parentheses how many those are), at how
many of them `best` is near the bound, and its worst.""", planners),
    ),
    "page": (
        ("""## vDNN++: pools, pinned memory, fragmentation

"Ours" counts the network's input twice, as the paper did; "needed" counts it once.""", paper_tables),
        ("""## vDNN++, Table IV

Simulated on a modelled GTX 1080 Ti.""", deep),
        ("""## vDNN++, Figure 9 and section V-A

Simulated on modelled cards. The improvement is (vDNN - vDNN++) / (vDNN - base). Where the paper prints no number there
is a dash.

![Speed of each mode relative to base(p)](images/figure_9.png)""", figure_9),
        ("""## Beaumont et al., Figures 2 and 3

Time over the lower bound, mean over the budgets that a policy can keep (how many), simulated.""", all_planners),
        ("## Memory modes on a GPU", all_modes),
        ("""## Where the link is the limit

Computing as measured without copies; copying both ways at the rate of the link. By these times, which are off by as
much as simulated iterations are, no schedule in the same memory is faster than the bound.""", limits),
        ("""## vDNN++ against vDNN on a GPU

The gain is (vDNN - vDNN++) / vDNN, the relative improvement (vDNN - vDNN++) / (vDNN - base), of their times. Published
are figures of a GTX 1080 Ti in fp32, where the paper prints any. Where nothing is copied out (`dyn` may choose so) the
two do the same work and differ by how often the host waits, and by chance.""", gains),
        ("""## Beside PyTorch

The same networks on the same card: an iteration with the copy of its batch, and device memory in use at
most.""", peers),
        ("## Compressed pinned buffers", compression),
        ("## What holds on a GPU", checks),
        ("## CUDA kernels", kernels),
        ("""## VGG-16's convolutions through cuDNN

Sums over the network, forward and both gradients (in parentheses the number of different problems).""", convolutions),
        ("## On the host", host),
    ),
}  # fmt: skip
"""The parts by name: an introduction and what makes the tables."""
