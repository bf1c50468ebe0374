"""The parts of the documentation that tell what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from statistics import median

from bench.markdown import Result, files, heading, milliseconds, origin, share, size, table
from bench.modes import ERROR, improvements
from bench.peers import HEURISTICS
from bench.rows import ENOUGH
from bench.tradeoff import SAME, picture
from minidnn.device.cuda import PRECISIONS
from minidnn.units import GiB, format_ms

COLUMNS = (
    ("base(p)", ""), ("keep(p)", ""), ("vdnn:all(p)", ""), ("vdnn++:all(p)", ""), ("vdnn:conv(p)", ""),
    ("vdnn++:conv(p)", ""), ("best", "75%"), ("best", "60%"), ("best", "least"),
)  # fmt: skip
"""Modes and budgets of the short table; rows that a file does not have leave their column out."""
OFFLOADING = ("vdnn++:conv(p)", "best")
"""Of these modes the documentation says what limits them."""
OURS = {theirs: ours for ours, theirs in SAME.items()}
"""torchvision's name of a network -> ours, where they differ."""
HEADLINE = ("vgg16:256", "fp32")
"""README has the picture of this, where it was measured; else that of the first row."""


def place(row: Result) -> tuple[str, int, int, str]:
    """Orders rows of the modes bench by network, batch and precision, whenever they were measured."""
    model, _, batch = row["network"].rpartition(":")
    return model, int(batch), PRECISIONS.index(row["precision"]), row["target"]


def modes(results: Path) -> str:
    """README: what a mode costs, one line for each network and precision, on the card that has the most rows."""
    cards = sorted(files(results, "modes-*.json"), key=lambda entry: -len(entry[1]["rows"]))
    if not cards:
        return ""
    (file, found), *others = cards
    rows = {(setting(r), r["mode"], r["budget"]): r for r in sorted(found["rows"].values(), key=place)}
    columns = [c for c in COLUMNS if any(key[1:] == c for key in rows)]
    lines = [
        [name, *(mode_cell(rows.get((name, *column))) for column in columns)]
        for name in dict.fromkeys(key[0] for key in rows)
    ]
    head = ["network, batch", *(titled(*column) for column in columns)]
    first = sorted(found["rows"].values(), key=lambda r: (r["network"], r["precision"]) != HEADLINE)[:1]
    text = heading(found["card"]) + pictures(results, file, first, "bench/results")
    text += table(head, lines) + accuracy(found["rows"].values()) + origin(file, found, "modes.py")
    names = " and ".join(other["card"] for _, other in others)
    return text + (f"[All results](docs/results.md#memory-modes-on-a-gpu) have those of {names}.\n\n" if names else "")


def accuracy(rows: Iterable[Result]) -> str:
    """How far the simulator is from what was measured, in one sentence."""
    fitting = [row for row in rows if row["fits"] and row["simulated"]]
    if not fitting:
        return ""
    errors = [abs(row["simulated"]["error_percent"]) for row in fitting]
    near = sum(error <= ERROR for error in errors)
    exact = sum(row["simulated"]["peak_bytes"] == row["arena_bytes"] for row in fitting)
    beside = [row["peak_bytes"] - row["arena_bytes"] for row in fitting]
    context = max(row["context_bytes"] for row in fitting)
    return (
        f"Simulated with the times that were measured on this card: within {ERROR} % of the iteration in {near} of "
        f"all {len(errors)} rows, in half of them within {median(errors):.1f} %. The arena, which a budget limits, has "
        f"the planned bytes in {exact}; the table has what the driver counts: {size(min(beside))} to "
        f"{size(max(beside))} more, which libraries load. CUDA's context takes {size(context)} beside that.\n\n"
    )


def limits(results: Path) -> str:
    """How long modes that offload compute and copy, and how far their iterations are from the bound."""
    text = ""
    for file, found in files(results, "modes-*.json"):
        lines = []
        for row in sorted(found["rows"].values(), key=place):
            bounds = row.get("bounds")
            if row["mode"] not in OFFLOADING or not (row["fits"] and row["offloaded_bytes"] and bounds):
                continue
            computing, copying = bounds["compute_ms"], bounds["out_ms"] + bounds["back_ms"]
            times = map(milliseconds, (computing, copying, bounds["ms"], row["ms"]))
            name = titled(row["mode"], row["budget"])
            longer = "copying" if copying > computing else "computing"
            lines.append([setting(row), name, *times, longer, f"{row['ms'] / bounds['ms']:.2f}"])
        if lines:
            head = ["network, batch", "mode", "computing, ms", "copying, ms", "bound, ms", "iteration, ms", "longer",
                    "iteration / bound"]  # fmt: skip
            text += heading(found["card"]) + table(head, lines) + origin(file, found, "modes.py")
    return text


def gains(results: Path) -> str:
    """vDNN++ against vDNN in the same mode, beside what the paper has of that network on its card."""
    text = ""
    for file, found in files(results, "modes-*.json"):
        rows = dict(sorted(found["rows"].items(), key=lambda item: place(item[1])))
        lines = [
            [r["setting"], f"`{r['mode']}`", size(r["offloaded_bytes"]),
             *(milliseconds(r[k]) for k in ("base_ms", "vdnn_ms", "vdnn++_ms")),
             *(share(r[k] and 100 * r[k])
               for k in ("gain", "paper_gain", "relative_improvement", "paper_relative_improvement"))]
            for r in improvements(rows)
        ]  # fmt: skip
        head = ["network:batch", "mode", "copied out", "base ms", "vDNN ms", "vDNN++ ms", "gain", "published",
                "relative improvement", "published"]  # fmt: skip
        kept = [i for i in range(len(head)) if any(line[i] != "-" for line in lines)]
        if lines:
            short = [[line[i] for i in kept] for line in lines]
            text += heading(found["card"]) + table([head[i] for i in kept], short) + origin(file, found, "modes.py")
    return text


def all_modes(results: Path) -> str:
    """Every row of the modes bench."""
    text = ""
    for file, found in files(results, "modes-*.json"):
        text += heading(found["card"])
        text += pictures(results, file, found["rows"].values(), "../bench/results")
        for name, rows in groupby(sorted(found["rows"].values(), key=place), key=setting):
            lines = [
                [f"`{r['mode']}`", r["budget"] or "-", milliseconds(r.get("ms")),
                 f"{r['images_per_s']:.0f}" if r["fits"] else "-",
                 *(size(r.get(k)) for k in ("peak_bytes", "arena_bytes", "pinned_bytes", "offloaded_bytes")),
                 stalls(r.get("stall_ms")), *simulated(r)]
                for r in rows
            ]  # fmt: skip
            head = ["mode", "budget", "ms", "images/s", "peak", "arena", "pinned", "offloaded", "stalls ms",
                    "simulated ms", "error", "bound ms"]  # fmt: skip
            text += heading(name) + table(head, lines)
        text += origin(file, found, "modes.py")
    return text


def peers(results: Path) -> str:
    """minidnn beside PyTorch: a line for each network and precision, a column for each way to train."""
    text = ""
    for file, found in files(results, "peers-*.json"):
        cells: dict[tuple[str, str], str] = {}
        for key, row in sorted(found["rows"].items(), key=lambda item: HEURISTICS in item[0]):
            network, _, way = key.partition(": ")
            mark = " ¹" if HEURISTICS in way else ""
            cells.setdefault((network, way.removesuffix(HEURISTICS)), peer_cell(row) + mark)
        cells = {(named(network), way): cell for (network, way), cell in cells.items()}
        networks, ways = (list(dict.fromkeys(key[k] for key in cells)) for k in (0, 1))
        names = [way.replace("torch", "PyTorch", 1) if way.startswith("torch") else f"minidnn `{way}`" for way in ways]
        lines = [[network, *(cells.get((network, way), "-") for way in ways)] for network in sorted(networks)]
        text += heading(found["card"]) + table(["", *names], lines)
        text += "¹ without `cudnn.benchmark`\n\n" if any("¹" in cell for cell in cells.values()) else ""
        text += origin(file, found, "peers.py")
    return text


def named(network: str) -> str:
    """The peers bench has torchvision's names; `alexnet` is another network here."""
    model, _, rest = network.partition(" ")
    return f"{OURS.get(model, model)} {rest}"


def kernels(results: Path) -> str:
    """Our own CUDA kernels against the card's copy rate, and against an elementwise kernel that moves as much."""
    text = ""
    for file, found in files(results, "kernels-*.json"):
        rows = found["rows"].values()
        good, plain = (sum(row[share] >= ENOUGH for row in rows) for share in ("share", "of_plain"))
        right = "all right" if all(r["right"] for r in rows) else f"{sum(r['right'] for r in rows)} right"
        rates = sorted({round(row["copy_GBps"]) for row in rows})
        copy = " to ".join(str(rate) for rate in (rates[0], rates[-1])[: len(rates)])
        text += heading(found["card"]) + (
            f"{len(rows)} cases, {right}; {good} reach {100 * ENOUGH:.0f} % or more of the card's copy rate, {copy} "
            f"GB/s read and written; {plain} reach that share of what PyTorch's elementwise kernel reaches that "
            "moves as many bytes.\n\n"
        )
        lines = [
            [name, f"{r['ms']:.4f}", f"{r['GB/s']:.0f}", *(f"{100 * r[s]:.0f} %" for s in ("share", "of_plain")),
             f"{r['error']:.1e}"]
            for name, r in found["rows"].items()
        ]  # fmt: skip
        columns = ["kernel", "ms", "GB/s", "of copy rate", "of elementwise", "error"]
        text += table(columns, lines) + origin(file, found, "kernels.py")
    return text


def checks(results: Path) -> str:
    """What must hold on a GPU: each check, whether it does, and its figures."""
    text = ""
    for file, found in files(results, "checks-*.json"):
        rows = found["rows"].items()
        lines = [[name, "holds" if row["holds"] else "**does not hold**", figures(row)] for name, row in rows]
        text += heading(found["card"]) + table(["check", "", "figures"], lines) + origin(file, found, "checks.py")
    return text


def figures(row: Result) -> str:
    """What a check found, for a reader."""
    if "test_accuracy" in row:
        return ", ".join(f"{precision} {accuracy:.2%}" for precision, accuracy in row["test_accuracy"].items())
    if "gap" in row:
        return "largest gap, of the largest loss: " + ", ".join(f"{p} {gap:.1e}" for p, gap in row["gap"].items())
    if "logits" in row:
        return "largest gap, of the largest logit: " + ", ".join(f"{n} {gap:.1e}" for n, gap in row["logits"].items())
    if "equal" in row:
        modes = sum(len(found) for found in row["equal"].values())
        same = sum(equal for found in row["equal"].values() for equal in found.values())
        return f"{same} of {modes} runs have the gradients of base after {row['steps']} steps"
    if "grown" in row:
        return f"{row['steps']} steps each of {', '.join(f'`{mode}`' for mode in row['grown'])}"
    others = [f"{row[how]} {said}" for how, said in (("failed", "failed"), ("error", "with errors")) if row.get(how)]
    tests = ", ".join([f"{row.get('passed', 0)} tests passed", *others])
    return "; ".join([tests, *row.get("sanitizer", ())])


def compression(results: Path) -> str:
    """Training with pinned buffers compressed, beside without."""
    text = ""
    for file, found in files(results, "compress-*.json"):
        lines = [
            [r["network"].replace(":", ", batch "), r["precision"], f"`{r['mode']}`",
             milliseconds(r["uncompressed_ms"]), milliseconds(r["iteration_ms"]), size(r["pinned_raw_bytes"]),
             size(r["pinned_bytes"]), f"{r['density']:.2f}", f"{r['cpu_share']:.1f}",
             {True: "bit-equal", False: "**differ**", None: "not compared"}[r["matches_base"]]]
            for r in found["rows"].values()
        ]  # fmt: skip
        head = ["network", "precision", "mode", "ms", "ms, compressed", "pinned", "pinned, compressed", "density",
                "cores busy", "gradients"]  # fmt: skip
        text += heading(found["card"]) + table(head, lines) + origin(file, found, "compress.py")
    return text


def convolutions(results: Path) -> str:
    """The convolutions of VGG-16 through cuDNN: the fastest plans, and the fastest without workspace, added up."""
    text = ""
    for file, found in files(results, "convolutions-*.json"):
        lines = []
        for precision in dict.fromkeys(r["precision"] for r in found["plans"]):
            rows = [r for r in found["plans"] if r["precision"] == precision]
            sums = []
            for rule in (lambda r: True, lambda r: r["deterministic"], lambda r: r["workspace"] == 0):
                best: dict[tuple[str, str], float] = {}
                for r in filter(rule, rows):
                    key = (r["layer"], r["function"])
                    best[key] = min(best.get(key, r["ms"] * r["times"]), r["ms"] * r["times"])
                sums.append(f"{sum(best.values()):.2f} ({len(best)})")
            lines.append([precision, str(len(rows)), *sums])
        head = ["precision", "plans", "fastest, ms (problems)", "deterministic", "without workspace"]
        text += table(head, lines) + origin(file, found, "convolutions.py")
    return text


# -- cells -------------------------------------------------------------------------------------------------------------


def setting(row: Result) -> str:
    """Network, batch, precision and graph of a row of the modes bench."""
    network = row["network"].rpartition(":")[0]
    return f"{network} ({row['batch']}), {row['precision']}, {row['target']}"


def titled(mode: str, budget: str) -> str:
    """A mode and the name of its budget, if it has one."""
    return f"`{mode}`" + (f" in {budget}" if budget else "")


def pictures(results: Path, file: str, rows: Iterable[Result], folder: str) -> str:
    """Time against memory, by bench/tradeoff.py, of the networks and precisions of these rows, where it was drawn;
    `folder` is that of the results as the page sees it."""
    card = Path(file).stem.partition("-")[2]
    text = ""
    for network, precision in dict.fromkeys((row["network"], row["precision"]) for row in rows):
        name = picture(card, network, precision)
        if (results / name).exists():
            text += f"![Time against memory: {network}, {precision}]({folder}/{name})\n\n"
    return text


def mode_cell(row: Result | None) -> str:
    """Time and memory of a mode."""
    if row is None:
        return "-"
    if not row["fits"]:
        return "does not fit"
    return f"{format_ms(row['ms'])} ms, {row['peak_bytes'] / GiB:.1f} GiB"


def peer_cell(row: Result) -> str:
    """Time and memory. PyTorch's time includes the copy of the batch, as ours does; its memory is what it has in use
    once its allocator has given back what choosing algorithms took."""
    nbytes = row.get("steady_peak_bytes", row["peak_bytes"])
    return f"{format_ms(row.get('ms_with_copy', row['ms']))} ms, {nbytes / GiB:.1f} GiB"


def stalls(by_cause: Mapping[str, float] | None) -> str:
    """Causes that stalled an iteration for long enough to say so."""
    parts = [f"{cause} {ms:.1f}" for cause, ms in (by_cause or {}).items() if ms >= 0.05]
    return ", ".join(parts) or "-"


def simulated(row: Result) -> list[str]:
    """What the simulator said, its error, and the lower bound."""
    said, bounds = row.get("simulated") or {}, row.get("bounds") or {}
    error = said.get("error_percent")
    return [milliseconds(said.get("ms")), "-" if error is None else f"{error:+.1f} %", milliseconds(bounds.get("ms"))]
