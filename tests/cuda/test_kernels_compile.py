"""Every kernel file compiles for every architecture that CUDA 13 knows and we promise (needs nvcc, not a GPU); what
kernels do not count is refused before they are bound."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minidnn.errors import ShapeError
from minidnn.ops import map_ops
from minidnn.ops.array import Array
from minidnn.ops.kernels import modules, source

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", modules())
def test_a_kernel_file_compiles_without_spills(module: str, architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed here")
    text = tmp_path / f"{module}.cu"
    text.write_text(source(module))
    command = [nvcc, "-cubin", f"-arch={architecture}", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v",
               "-o", str(tmp_path / "out.cubin"), str(text)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert spills, "the compiler says nothing about its kernels"
    assert max(spills) <= 64, "a kernel keeps much of its state in local memory"


def test_there_are_kernels() -> None:
    assert {"pooling", "norm", "softmax", "dropout", "elementwise", "optimizer", "layout"} <= set(modules())


def test_more_than_an_index_counts_is_refused() -> None:
    shape = (1366, 3, 1024, 1024)  # more than 2^32 values of bfloat16, one by one since 3 channels are no vector
    y = Array(0, shape, (3 * 2**20, 1, 3 * 2**10, 3), "bfloat16")
    with pytest.raises(ShapeError, match=r"an operand of shape \[1366, 3, 1024, 1024\] is too large; use a smaller"):
        map_ops.bias_relu(None, y=y, b=Array(0, (3,), (1,), "float32"), relu=True)  # type: ignore[arg-type]
