"""Training on a real GPU: every memory mode's bits, real data, the host's losses, memory that stays what it is."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np
import pytest

from minidnn import Trainer, models, nn, optim
from minidnn.data import open_data
from minidnn.device.cuda import CudaDevice
from minidnn.device.open import open_device
from minidnn.errors import OutOfDeviceMemory
from minidnn.plan import registry
from minidnn.plan.dynamic import vdnn_family
from minidnn.plan.mode import Policy
from minidnn.plan.registry import POLICIES
from minidnn.run.choose import Options
from minidnn.run.compare import Experiment, measure
from tests.cuda.support import why_no_cuda

pytestmark = pytest.mark.cuda

MODES = (
    "base", "base(m)", "keep", "vdnn:all", "vdnn:conv(m)", "vdnn++:all", "vdnn++:all(m)", "vdnn++:conv", "vdnn++:aconv",
    "vdnn++:dyn", "vdnn-nowait:all", "vdnn-nowait:conv(m)",
)  # fmt: skip


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip with the reason where there is none."""
    reason = why_no_cuda()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vDNN sets with streams and events alone, which no mode of the papers is."""
    monkeypatch.setitem(cast("dict[str, Policy]", POLICIES), "vdnn-nowait", vdnn_family("none"))
    monkeypatch.setattr(registry, "FIXED_SETS", registry.FIXED_SETS | {"vdnn-nowait"})


def batches(shape: tuple[int, ...], classes: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random images and labels."""
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal(shape).astype(np.float32), rng.integers(0, classes, shape[0])) for _ in range(steps)
    ]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_memory_mode_computes_the_gradients_of_base(precision: str, without_waits: None) -> None:
    experiment = Experiment(
        partial(models.smallvgg, input_shape=(3, 24, 24), width=32), nn.CrossEntropyLoss(),
        optim.SGD(0.01, momentum=0.9), batches((16, 3, 24, 24), 10, 3), precision,
    )  # fmt: skip
    opener = partial(open_device, "cuda", precision=precision, deterministic=True)
    results = list(measure(experiment, MODES, opener, Options(), timed_steps=1))
    assert [r.mode for r in results if r.fits] == list(MODES)
    assert [r.mode for r in results if not r.more["matches_base"]] == []
    peaks = {r.mode: r.peak_bytes for r in results}
    assert peaks["vdnn++:all(m)"] < peaks["base(m)"]


def test_smallnet_learns_the_digits() -> None:
    data = open_data("digits")
    net = models.smallnet()
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.05, momentum=0.9), 64, device="cuda") as trainer:
        trainer.fit(data, epochs=12, evaluate_epochs=False)
        assert trainer.evaluate(data)["test_accuracy"] >= 0.98


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 2e-3), ("tf32", 2e-2), ("bf16", 5e-2)])
def test_vgg11_follows_the_host(precision: str, limit: float) -> None:
    def losses(device: str, precision: str) -> list[float]:
        net = models.create("vgg11", num_classes=10, input_shape=(3, 32, 32))
        nn.init.he(net)
        with Trainer(
            net, nn.CrossEntropyLoss(), optim.SGD(0.002, momentum=0.9), 8, device=device, precision=precision,
            target="native",
        ) as trainer:  # fmt: skip
            return [trainer.step(x, y).loss for x, y in batches((8, 3, 32, 32), 10, 2) * 10]

    wanted, found = losses("host", "fp32"), losses("cuda", precision)
    assert np.abs(np.array(found) - wanted).max() <= limit * max(wanted)


def test_a_run_takes_no_device_memory_and_gives_all_back() -> None:
    (x, y), = batches((32, 3, 32, 32), 10, 1)
    with CudaDevice(precision="bf16") as device:
        net = models.create("vgg11", num_classes=10, input_shape=(3, 32, 32))
        with Trainer(
            net, nn.CrossEntropyLoss(), optim.SGD(0.01), 32, device=device, precision="bf16", memory="vdnn++:all"
        ) as trainer:
            trainer.step(x, y)  # kernels are loaded at their first launch
            before = device.memory_info()
            assert before.used == trainer.peak_bytes
            for _ in range(20):
                trainer.step(x, y)
            assert device.memory_info() == before
        after = device.memory_info()
        assert (after.used, after.pinned) == (0, 0)
        assert after.free >= before.free + before.used - 2 * 2**20


def test_taking_device_memory_during_a_run_is_refused() -> None:
    import cupy

    with CudaDevice() as device, device.guard(), pytest.raises(OutOfDeviceMemory, match="1024 bytes of device memory"):
        cupy.empty(256, np.float32)
    assert cupy.empty(256, np.float32).nbytes == 1024
