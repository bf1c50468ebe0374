"""Iterations as CUDA graphs: the bits of the same iterations step by step, for every slot and every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.base import Event, Launcher, Stream
from minidnn.device.cuda import CudaDevice
from minidnn.errors import ArgumentError
from tests.cuda.fake import fake_cuda
from tests.cuda.support import why_no_cuda, why_no_emulator
from tests.cuda.test_device import network

BOTH = pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["fake", "cuda"])


@pytest.fixture
def captures() -> list[int]:
    """Grows with each capture."""
    return []


def closed(faked: CudaDevice, issue: Callable[[], None]) -> None:
    """Issue what CUDA would have captured; as CUDA does, refuse waits for what is recorded outside."""
    record, wait, inside = faked.record, faked.wait, []

    def recorded(stream: Stream) -> Event:
        inside.append(record(stream))
        return inside[-1]

    def waited(stream: Stream, event: Event) -> None:
        assert any(event is known for known in inside), "a captured wait for an event outside the graph"
        wait(stream, event)

    with patch.object(faked, "record", recorded), patch.object(faked, "wait", waited):
        issue()


@pytest.fixture
def device(real: bool, captures: list[int]) -> Iterator[CudaDevice]:
    """An open device that counts captures; the fake one issues everything again instead of a graph."""
    reason = why_no_cuda() if real else why_no_emulator()
    if reason:
        pytest.skip(reason)
    if real:
        with CudaDevice(deterministic=True) as opened:
            capture = opened.capture

            def counted(streams: Sequence[Stream], issue: Callable[[], None]) -> Launcher:
                captures.append(1)
                return capture(streams, issue)

            with patch.object(opened, "capture", counted):
                yield opened
        return
    with fake_cuda(deterministic=True) as (faked, _):

        def again(streams: Sequence[Stream], issue: Callable[[], None]) -> Launcher:
            captures.append(1)
            return partial(closed, faked, issue)

        with patch.object(faked, "capture", again):
            yield faked


def losses(device: CudaDevice, graph: bool, **options: object) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train with a schedule of learning rates, dropout and batches of several slots, all of which change by step."""
    rng = np.random.default_rng(0)
    net = network(0.25)
    found = []
    optimizer = optim.SGD(0.05, momentum=0.9, schedule=optim.CosineLR(8))
    with Trainer(
        net, nn.CrossEntropyLoss(), optimizer, 4, device=device, target="native", graph=graph, **options  # type: ignore[arg-type]
    ) as trainer:
        for step in range(8):
            slot = trainer._slots[step % 3]
            x, y = rng.standard_normal((4, 3, 12, 12)), rng.integers(0, 5, 4)
            trainer._fill(slot.batch, x.astype(np.float32), y)
            found.append(trainer.settle(trainer.issue(slot.batch, 4)).loss)
    return found, net.state_dict()


@BOTH
@pytest.mark.parametrize(
    ("options", "graphs"), [({}, 3), ({"memory": "keep"}, 3), ({"micro_batch": 2}, 6), ({"precision": "bf16"}, 3)]
)
def test_graphs_give_the_bits_of_single_steps(
    device: CudaDevice, captures: list[int], options: dict[str, object], graphs: int, real: bool
) -> None:
    wanted, weights = losses(device, False, **options)
    assert not captures
    found, trained = losses(device, True, **options)
    assert found == wanted
    assert all((trained[name] == weights[name]).all() for name in weights)
    assert len(captures) == graphs  # one for each slot, and for each part of a batch in it


@BOTH
def test_steps_that_are_watched_are_issued_singly(device: CudaDevice, captures: list[int], real: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 3, 12, 12)).astype(np.float32), rng.integers(0, 5, 4)
    with Trainer(
        network(), nn.CrossEntropyLoss(), optim.SGD(0.05), 4, device=device, target="native", graph=True
    ) as trainer:
        trainer.step(x, y)
        observer = trainer.observe_gradients()
        trainer.step(x, y)
        assert not captures
        assert all(np.isfinite(g).all() for g in observer.gradients.values())
        trainer.programs.forget(observer)
        trainer.step(x, y)
        trainer.step(x, y)
        assert len(captures) == 1


def test_modes_that_need_the_host_are_refused() -> None:
    with fake_cuda() as (device, _), pytest.raises(ArgumentError, match=r"vdnn:all\(m\) needs the host"):
        Trainer(
            network(), nn.CrossEntropyLoss(), optim.SGD(0.1), 4, device=device, target="native", graph=True,
            memory="vdnn:all(m)",
        )  # fmt: skip
    with pytest.raises(ArgumentError, match="graph is True; device host"):
        Trainer(network(), nn.CrossEntropyLoss(), optim.SGD(0.1), 4, device="host", graph=True)
