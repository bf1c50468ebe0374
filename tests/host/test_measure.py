"""Measuring ops and the link, on the emulator: what is measured, and that everything is given back."""

from __future__ import annotations

from minidnn import models, nn, optim
from minidnn.device import measure
from minidnn.device.host import HostDevice
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.profile.profile import op_key


def test_every_op_gets_a_time_and_the_memory_comes_back() -> None:
    target = Target("native", "tf32", "NHWC")
    sgd = optim.SGD(0.1, momentum=0.9)
    graph = build(models.smallvgg(), nn.CrossEntropyLoss(), (4, 1, 8, 8), target, optimizer=sgd)
    work = {op_key(graph, op): (graph, op) for op in graph.ops if not op.function.startswith("conv2d")}
    with HostDevice() as device:
        times, launch_ms = measure.op_times(device, work, 1000)
        assert times.keys() == work.keys()
        assert all(ms >= 0 for ms in times.values())
        assert launch_ms > 0
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


def test_link_rates_are_bytes_over_time() -> None:
    with HostDevice() as device:
        link = measure.link_rates(device)
        assert min(link.d2h, link.h2d) > 1e6
        assert link.latency_ms >= 0
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)
