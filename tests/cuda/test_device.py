"""The CUDA device: over a fake run-time library in every test run, and over the real one where there is a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from unittest.mock import patch

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.cuda import CudaDevice
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, DeviceError, OutOfDeviceMemory
from minidnn.profile.profile import Algorithm, HostCosts, Link, Shares, op_key
from tests.cuda.fake import LINK, TOTAL, HostPlans, RuntimeLibrary, fake_cuda
from tests.cuda.support import why_no_cuda, why_no_emulator

BOTH = pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["fake", "cuda"])


@pytest.fixture
def device(real: bool) -> Iterator[CudaDevice]:
    """An open device."""
    reason = why_no_cuda() if real else why_no_emulator()
    if reason:
        pytest.skip(reason)
    if real:
        opened = CudaDevice(deterministic=True)
        yield opened
        opened.close()
    else:
        with fake_cuda(deterministic=True) as (faked, _):
            yield faked


def network(p: float = 0.0) -> nn.Sequential:
    """Convolution, pooling, normalization, dropout, fully connected."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.LocalResponseNorm(5),
        nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Dropout(p), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5), input_shape=(3, 12, 12),
    )  # fmt: skip
    nn.init.he(net)
    return net


Trained = tuple[list[float], dict[str, np.ndarray]]


def train(device: CudaDevice | str, mode: str, precision: str, steps: int = 3) -> Trained:
    """Losses and weights after some steps."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 3, 12, 12)).astype(np.float32), rng.integers(0, 5, 4)
    net = network(0.25 if precision == "fp32" else 0.0)
    with Trainer(
        net, nn.CrossEntropyLoss(), optim.SGD(0.05, momentum=0.9), 4, memory=mode, device=device, precision=precision,
        target="native",
    ) as trainer:  # fmt: skip
        losses = [trainer.step(x, y).loss for _ in range(steps)]
    return losses, net.state_dict()


@BOTH
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 3e-2)])
def test_training_follows_the_host_device(device: CudaDevice, precision: str, limit: float, real: bool) -> None:
    wanted, weights = train("host", "base", "fp32" if precision == "fp32" else "tf32")
    found, trained = train(device, "base", precision)
    assert np.allclose(found, wanted, rtol=limit)
    for name, value in weights.items():
        gap = np.abs(trained[name] - value).max() / max(np.abs(value).max(), 1e-6)
        assert gap < 10 * limit, f"{name} differs by {gap:.1e}"


@BOTH
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 50, 64])
def test_a_block_fills_a_span_and_nothing_else(device: CudaDevice, nbytes: int, real: bool) -> None:
    arena, block = device.arena(1024), np.arange(1, 9, dtype=np.uint8)
    device.write(arena, 0, np.zeros(1024, np.uint8))
    device.repeat(arena, 100, nbytes, block)
    assert np.array_equal(device.read(arena, 100, nbytes), np.resize(block, nbytes))
    assert not device.read(arena, 0, 100).any()
    assert not device.read(arena, 100 + nbytes, 924 - nbytes).any()
    device.give_back(arena)


@BOTH
@pytest.mark.parametrize("mode", ["keep", "vdnn:all(m)", "vdnn++:conv", "vdnn++:all"])
def test_every_memory_mode_gives_the_bits_of_base(device: CudaDevice, mode: str, real: bool) -> None:
    rule = "(m)" if mode.endswith("(m)") else ""
    wanted, weights = train(device, f"base{rule}", "tf32", steps=2)
    found, trained = train(device, mode, "tf32", steps=2)
    assert found == wanted
    assert all((trained[name] == weights[name]).all() for name in weights)


@BOTH
def test_bytes_travel_through_the_arena_and_back(device: CudaDevice, real: bool) -> None:
    arena, slab = device.arena(4096), device.pinned(3 * 2**20 + 1)
    assert slab.array is not None
    assert slab.array.nbytes == 3 * 2**20 + 1
    slab.array[:4096] = np.arange(4096) % 251
    stream, other = device.stream("h2d"), device.stream("d2h")
    device.copy_in(arena, 0, slab, 0, 4096, stream)
    device.wait(other, device.record(stream))
    device.copy_out(arena, 512, slab, 2**20, 1024, other)
    device.host_sync(other)
    assert (slab.array[2**20 : 2**20 + 1024] == slab.array[512:1536]).all()
    data = np.arange(100, dtype=np.uint8)
    device.write(arena, 7, data)
    assert (device.read(arena, 7, 100) == data).all()
    info = device.memory_info()
    assert (info.used, info.pinned) == (4096, 3 * 2**20 + 1)
    device.give_back(slab)
    device.give_back(arena)
    assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


@BOTH
def test_an_arena_larger_than_the_card_is_refused_in_words(device: CudaDevice, real: bool) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"the arena needs .* GiB; device .* has .* free"):
        device.arena(2**50 if real else TOTAL + 10 * 2**30)


@BOTH
def test_a_worker_acts_after_its_event_and_in_order(device: CudaDevice, real: bool) -> None:
    seen: list[int] = []
    stream = device.stream("d2h")
    done = [device.after("release-0", device.record(stream), lambda i=i: seen.append(i)) for i in range(20)]  # type: ignore[misc]
    device.host_wait(done[-1])
    assert seen == list(range(20))


@BOTH
def test_an_error_in_a_worker_reaches_the_host(device: CudaDevice, real: bool) -> None:
    def fail() -> None:
        raise ValueError("released twice")

    done = device.after("release-0", device.record(device.stream("d2h")), fail)
    with pytest.raises(ValueError, match="released twice"):
        device.host_wait(done)
    device.host_wait(device.after("release-0", device.record(device.stream("d2h")), lambda: None))  # it goes on


def test_closing_twice_returns_everything_once() -> None:
    with fake_cuda() as (device, runtime):
        device.arena(1000), device.pinned(1000)
        device.host_wait(device.after("release-0", device.record(device.stream("d2h")), lambda: None))
        assert runtime.memory
        assert runtime.registered
        assert runtime.handles
        device.close()
        device.close()
        assert (runtime.memory, runtime.registered, runtime.handles) == ({}, set(), set())


def test_what_was_written_is_there_for_streams_that_do_not_wait() -> None:
    with fake_cuda() as (device, runtime):
        arena = device.arena(512)
        device.write(arena, 0, np.arange(100, dtype=np.uint8))
        assert not runtime.unwritten
        assert (device.read(arena, 0, 100) == np.arange(100)).all()


def test_a_trainer_s_device_is_made_current_again_where_another_is() -> None:
    reason = why_no_emulator()
    if reason:
        pytest.skip(reason)
    x, y = np.ones((4, 3, 12, 12), np.float32), np.zeros(4, int)
    with fake_cuda() as (device, runtime), Trainer(
        network(), nn.CrossEntropyLoss(), optim.SGD(0.05), 4, memory="vdnn++:all", device=device
    ) as trainer:
        for _ in range(2):
            runtime.setDevice(1)  # as another trainer does, and as a new thread has it
            trainer.step(x, y)
        runtime.setDevice(1)
        runtime.unwritten.append((arena_of(trainer), b"late"))
        device.abandon()
        assert not runtime.unwritten


def arena_of(trainer: Trainer) -> int:
    """Where its arena begins."""
    assert trainer.programs.arena is not None
    return trainer.programs.arena.address


def test_one_thing_that_cannot_be_given_back_keeps_no_other() -> None:
    with fake_cuda() as (device, runtime):
        device.arena(1000), device.pinned(1000), device.stream("compute")

        def fail(*arguments: object) -> None:
            raise RuntimeError("an error in a kernel")

        with patch.object(runtime, "hostUnregister", fail):
            device.close()
        assert (runtime.memory, runtime.handles) == ({}, set())


def test_events_are_used_again() -> None:
    with fake_cuda() as (device, runtime):
        stream = device.stream("compute")
        for _ in range(50):
            device.record(stream)
        assert len(runtime.handles) <= 3


def test_a_cuda_error_says_between_which_actions_it_happened() -> None:
    with fake_cuda() as (device, runtime):
        stream = device.stream("compute")
        device.mark("forward of features.0")
        device.host_sync(stream)
        device.mark("forward of features.3")

        def fail(handle: int) -> None:
            raise RuntimeLibrary.CUDARuntimeError("an illegal memory access was encountered")

        runtime.streamSynchronize = fail  # type: ignore[attr-defined]
        where = "after 'forward of features.0' and not later than 'forward of features.3'"
        with pytest.raises(DeviceError, match=rf"{where} \(an illegal"):
            device.host_sync(stream)


def test_measured_times_order_the_plans() -> None:
    from minidnn.graph.build import build
    from minidnn.graph.graph import Target

    net = network()
    target = Target("native", "tf32", "NHWC")
    graph = build(net, nn.CrossEntropyLoss(), (4, 3, 12, 12), target, optimizer=optim.SGD(0.1))
    times = iter([3.0, 1.0] * 20)
    with fake_cuda() as (device, runtime), patch.object(device, "milliseconds", lambda *arguments: next(times)):
        profile = device.profile(graph)
        for op in graph.ops:
            ways = [(a.name, a.ms) for a in profile.algorithms(graph, op)]
            assert ways == ([("host", 1.0), ("fused host", 3.0)] if "conv2d" in op.function else [("default", 1.0)])
        assert (profile.link, profile.target, profile.measured) == (LINK, target, True)
        assert device.profile(graph) == profile  # known now: nothing is measured again
        assert runtime.memory == {}


def test_the_link_is_measured_again_with_new_operations() -> None:
    from minidnn.graph.build import build
    from minidnn.graph.graph import Target

    target, rates = Target("native", "tf32", "NHWC"), [2e10, 5e10, 4e10]
    with fake_cuda() as (device, _), patch("minidnn.device.cuda_profile.link_rates") as link_rates:
        link_rates.side_effect = [Link(rate, rate) for rate in rates]
        for batch, seen in ((4, 2e10), (4, 2e10), (8, 5e10), (16, 5e10)):  # the second is known
            graph = build(network(), nn.CrossEntropyLoss(), (batch, 3, 12, 12), target, optimizer=optim.SGD(0.1))
            link = device.profile(graph).link
            assert link is not None
            assert link.d2h == seen
        assert link_rates.call_count == len(rates)


@pytest.mark.parametrize(("in_place", "slowdown"), [(1.5, 1.5), (0.5, 0.5)])
def test_plans_are_slower_in_the_iteration_the_more_power_they_draw(in_place: float, slowdown: float) -> None:
    """Or as fast: where the clock was slower when they were measured alone."""
    from minidnn.graph.build import build
    from minidnn.graph.graph import Graph, Target

    target = Target("native", "tf32", "NHWC")
    graph, other = (build(network(), nn.CrossEntropyLoss(), (n, 3, 12, 12), target) for n in (4, 2))
    asked: list[Graph] = []

    def times_in_place(_: CudaDevice, graph: Graph, ways: Mapping[str, Algorithm], scratch: int) -> dict[str, float]:
        asked.append(graph)
        return dict.fromkeys(ways, in_place)

    times = iter([3.0, 1.0] * 20)
    with (
        fake_cuda() as (device, _),
        patch("minidnn.device.cuda_profile.times_in_place", times_in_place),
        patch.object(device, "milliseconds", lambda *arguments: next(times)),
    ):
        for _ in range(2):
            profile = device.profile(graph)
            convolutions = [op for op in graph.ops if "conv2d" in op.function]
            for op in convolutions:
                slower = pytest.approx(3.0 + (slowdown - 1) / 3)
                assert [a.ms for a in profile.algorithms(graph, op)] == [slowdown, slower]
            others = [op for op in graph.ops if op not in convolutions]
            assert [profile.algorithms(graph, op)[0].ms for op in others] == [1.0] * len(others)
        device.profile(other)
    assert asked == [graph, other]


def test_no_plan_is_faster_in_the_iteration_than_the_fastest() -> None:
    from minidnn.device.cuda_profile import in_place

    plans = tuple(Algorithm(str(ms), 0, ms) for ms in (1.0, 1.1, 1.5, 2.5, 8.0))
    for slowdown in (0.5, 1.0, 1.2, 4.0):
        times = [a.ms or 0.0 for a in in_place(plans, slowdown)]
        assert times == sorted(times)
        assert times[0] == slowdown
    assert in_place((Algorithm(),), 2.0) == (Algorithm(),)


def test_what_copies_keep_is_measured_once_for_what_lasts_and_may_be_chosen() -> None:
    from minidnn.device.cuda_profile import LASTS, worth_choosing
    from minidnn.graph.build import build
    from minidnn.graph.graph import Graph, Target
    from minidnn.graph.op import Op

    fast, lean, slow, sure, late = (
        Algorithm("fast", 100, 1.0, deterministic=False), Algorithm("lean", 10, 2.0, deterministic=False),
        Algorithm("slow", 10, 3.0, deterministic=False), Algorithm("sure", 50, 4.0), Algorithm("late", 50, 5.0),
    )  # fmt: skip
    assert worth_choosing((fast, lean, slow, sure, late)) == (fast, lean, sure)

    graph = build(network(), nn.CrossEntropyLoss(), (4, 3, 12, 12), Target("native", "tf32", "NHWC"))
    asked: list[tuple[str, str]] = []

    def copy_shares(_: CudaDevice, graph: Graph, ways: list[tuple[Op, Algorithm]], scratch: int) -> list[Shares]:
        asked.extend((op_key(graph, op), way.name) for op, way in ways)
        return [Shares(0.5 if way.name == "host" else 0.25, 0.75) for _, way in ways]

    times = iter([3.0, 1.0, LASTS / 2, LASTS / 4] * 20)
    with (
        fake_cuda() as (device, _),
        patch("minidnn.device.cuda_profile.copy_shares", copy_shares),
        patch.object(device, "milliseconds", lambda *arguments: next(times)),
    ):
        profile = device.profile(graph)
        assert device.profile(graph) == profile
    assert len(asked) == len(set(asked)) > len(profile.entries) / 2
    for key, ways in profile.entries.items():
        for way in ways:
            expected = (0.5 if way.name == "host" else 0.25, 0.75) if (key, way.name) in asked else (1.0, 1.0)
            assert way.shares == expected
            assert way.ms is not None
            if way in worth_choosing(ways):
                assert ((key, way.name) in asked) == (way.ms >= LASTS)


def test_plans_without_room_to_measure_do_not_cost_time_again() -> None:
    from minidnn.device.cuda_profile import SPARE
    from minidnn.graph.build import build
    from minidnn.graph.graph import Target

    graph = build(network(), nn.CrossEntropyLoss(), (4, 3, 12, 12), Target("native", "tf32", "NHWC"))
    launches = []

    def milliseconds(*arguments: object) -> float:
        launches.append(arguments)
        return 1.0

    with fake_cuda() as (device, _), patch.object(device, "milliseconds", milliseconds):
        with patch.object(HostPlans, "LARGE", TOTAL - SPARE):
            for _ in range(2):
                profile = device.profile(graph)
        convolutions = [op for op in graph.ops if "conv2d" in op.function]
        assert len(launches) == len(convolutions)
        assert all(profile.algorithms(graph, op)[0].name == "host" for op in convolutions)


def test_a_machine_without_cuda_says_what_is_missing() -> None:
    reason = why_no_cuda()
    if reason is None:
        pytest.skip("this machine has CUDA")
    with pytest.raises(DeviceError, match=r"minidnn\[cuda13\]|no CUDA device"):
        open_device("cuda")
    assert "cudnn" not in sys.modules or "cupy" not in sys.modules


def test_a_card_whose_tensor_cores_take_fp16_alone_keeps_nchw_and_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda() as (device, _):
        assert device.layout("native", "tf32") == "NHWC"
    monkeypatch.setattr(RuntimeLibrary, "capability", (7, 5))
    with fake_cuda() as (device, _):
        assert device.layout("native", "tf32") == "NCHW"
    said = r"precision is 'bf16'; Fake GPU has compute capability 7\.5, and cuDNN convolves in bf16 from 8\.0 on"
    with pytest.raises(ArgumentError, match=said), fake_cuda(precision="bf16"):
        pass


def test_double_precision_is_refused() -> None:
    with pytest.raises(ArgumentError, match="precision is 'fp64'; on CUDA it must be one of fp32, tf32, bf16"):
        CudaDevice(precision="fp64")


def test_what_the_host_costs_is_measured_once_per_network_whatever_its_memory_mode() -> None:
    from minidnn.graph.build import build
    from minidnn.graph.graph import Graph, Target

    target = Target("native", "tf32", "NHWC")
    sgd = optim.SGD(0.1, momentum=0.9)
    graph, other, small = (
        build(network(), nn.CrossEntropyLoss(), (n, 3, 12, 12), target, optimizer=sgd, update=update)
        for n, update in ((4, "at-end"), (4, "per-layer"), (2, "at-end"))
    )
    asked: list[Graph] = []

    def host_times(_: CudaDevice, graph: Graph, ways: object, scratch: int) -> HostCosts:
        asked.append(graph)
        return HostCosts(0.25 * len(asked), 0.125, 0.5)

    with fake_cuda() as (device, _), patch("minidnn.device.cuda_profile.host_times", host_times):
        found = [device.profile(g) for g in (graph, other, small, graph)]
    assert asked == [graph, small]
    assert [(p.launch_ms, p.action_ms, p.wake_ms) for p in found] == [
        (launch, 0.125, 0.5) for launch in (0.25, 0.25, 0.5, 0.25)
    ]
