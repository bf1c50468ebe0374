"""Where kernel tests run: emulated on the CPU, and on a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minidnn.ops.kernels import Library
from tests.cuda.support import Cuda, Emulated, Place, why_no_cuda, why_no_emulator


@pytest.fixture(scope="session")
def cuda_kernels() -> Library:
    """The kernels, compiled once for all tests."""
    from minidnn.ops.kernels import Kernels

    return Kernels()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Memory and kernels."""
    reason = why_no_cuda() if request.param == "cuda" else why_no_emulator()
    if reason:
        pytest.skip(reason)
    if request.param == "emulated":
        yield Emulated()
        return
    device = Cuda(request.getfixturevalue("cuda_kernels"))
    yield device
    device.close()


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Iterator[Cuda]:
    """A CUDA device in the precision that the test's `precision` parameter names, else fp32."""
    reason = why_no_cuda()
    if reason:
        pytest.skip(reason)
    precision = request.getfixturevalue("precision") if "precision" in request.fixturenames else "fp32"
    device = Cuda(request.getfixturevalue("cuda_kernels"), precision, libraries=True)
    yield device
    device.close()
