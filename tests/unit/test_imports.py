"""The house keeps its order: imports point down the list of design layers, and heavy libraries load late."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minidnn"

# From the top; a module may import from its own row and from rows below it. The longest prefix counts.
ROWS = (
    ("minidnn.__init__", "minidnn.__main__"),
    ("minidnn.cli",),
    ("minidnn.report", "minidnn.run.compare", "minidnn.run.trainer", "minidnn.run.loop", "minidnn.checkpoint",
     "minidnn.data"),
    ("minidnn.run.program", "minidnn.run.adaptive", "minidnn.run.footprint", "minidnn.run.sweep",
     "minidnn.run.explain"),
    ("minidnn.run.choose",),
    ("minidnn.run.executor", "minidnn.run.packing", "minidnn.run.captured", "minidnn.run.simulator", "minidnn.run.live",
     "minidnn.run.observe", "minidnn.run.record", "minidnn.run.timing"),
    ("minidnn.run.timeline", "minidnn.run.slot", "minidnn.run.weights", "minidnn.run.bound", "minidnn.run.loads",
     "minidnn.run.whole_copies", "minidnn.run.arguments", "minidnn.run.fewer_rows", "minidnn.run.__init__",
     "minidnn.run.log", "minidnn.run.turn",
     "minidnn.device", "minidnn.ops"),
    ("minidnn.schedule",),
    ("minidnn.plan",),
    ("minidnn.profile",),
    ("minidnn.memory", "minidnn.codec"),
    ("minidnn.graph.build",),
    ("minidnn.models",),
    ("minidnn.nn", "minidnn.optim"),
    ("minidnn.graph",),
    ("minidnn.compiled",),
    ("minidnn.units", "minidnn.progress"),
    ("minidnn.arguments",),
    ("minidnn.errors",),
)  # fmt: skip

HEAVY = {"cupy", "cupyx", "cudnn", "numba", "matplotlib", "PIL", "torch", "tqdm"}
CUDA_FILES = {"device/cuda.py", "device/cuda_system.py", "ops/cudnn_plans.py", "ops/kernels.py"}
MODULES = {
    ".".join(["minidnn", *path.relative_to(PACKAGE).with_suffix("").parts]): path
    for folder in (PACKAGE, PACKAGE / "models")  # rglob does not follow the symlink
    for path in folder.rglob("*.py")
}


def row(module: str) -> int:
    """The row of a module, counted from the top."""
    if module == "minidnn":
        return len(ROWS) - 1  # the version alone
    found = [
        (len(prefix), index)
        for index, prefixes in enumerate(ROWS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    assert found, f"{module} has no row: place it in ROWS"
    return max(found)[1]


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, anywhere in it; `from minidnn import nn` counts as minidnn.nn."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or f"{name}.__init__" in MODULES else str(node.module) for name in names}
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    own = row(module)
    wrong = {
        name for name in imports(MODULES[module])
        if name.split(".")[0] == "minidnn" and row(name) < own
    }  # fmt: skip
    assert not wrong, f"{module} imports from above: {sorted(wrong)}"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("minidnn.models.")))
def test_models_use_the_public_api_alone(module: str) -> None:
    own = {name for name in imports(MODULES[module]) if name.startswith("minidnn.")}
    assert all(name in ("minidnn.nn", "minidnn.errors") or name.startswith("minidnn.models.") for name in own)


def test_only_the_cuda_files_import_cuda() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES.values()
        if {name.split(".")[0] for name in imports(path)} & {"cupy", "cupyx", "cudnn", "cuda"}
    }
    assert users <= CUDA_FILES


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in MODULES.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that are loaded in a fresh interpreter after `code`."""
    tail = "import json, sys; sys.stderr.write(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tail}"], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(done.stderr))


HELP = "from minidnn.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"


@pytest.mark.parametrize("code", ["import minidnn", HELP])
def test_start_and_help_load_no_library(code: str) -> None:
    assert not loaded_by(code) & (HEAVY | {"numpy", "ml_dtypes", "safetensors"})


def test_public_names_load_nothing_heavy() -> None:
    assert not loaded_by("import minidnn\nfor name in minidnn.__all__: getattr(minidnn, name)") & HEAVY


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import minidnn

    with pytest.raises(AttributeError, match="'minidnn' has no attribute 'nonsense'"):
        _ = minidnn.nonsense
