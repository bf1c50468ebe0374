"""Convolution plans over a frontend that is played here: what is asked of cuDNN, what is kept, what is bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minidnn.device.cuda_profile import worth_their_workspace
from minidnn.errors import DeviceError
from minidnn.graph.tensor import Role, Tensor
from minidnn.ops.array import Array
from minidnn.ops.cudnn_ops import problem
from minidnn.ops.cudnn_plans import COMPILED, Plans
from minidnn.ops.plans import FORMAT, FUSED, PADDED, PREPARED, ROUNDED, PlanStore, Problem, kind_of, split_of
from minidnn.profile.profile import Algorithm, HostCosts, Link, Shares

WINDOW: dict[str, Any] = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1)}
Notes = Enum(
    "Notes", "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION NONDETERMINISTIC RUNTIME_COMPILATION"
)


class Node:
    """A tensor of a played graph. Setters chain, as the frontend's do."""

    def __init__(self) -> None:
        self.uid = -1

    def set_uid(self, uid: int) -> Node:
        self.uid = uid
        return self

    def _chain(self, *arguments: Any) -> Node:
        return self

    set_output = set_dim = set_stride = set_data_type = _chain


class Graph:
    """As strict as the frontend: a uid belongs to one tensor, and what is made must be used.

    Engines: eng0 to eng11 of the heuristics, the last one not deterministic, eng3 to eng5 compiled in 0.1 "seconds";
    and slow eng90 behind them.
    """

    built: list[tuple[str, int]]
    engines = 12

    def __init__(self, frontend: Frontend) -> None:
        self.frontend, self.inputs, self.used = frontend, list[Node](), list[Node]()
        self.output, self.fused, self.modes, self.notes = Node(), False, list[str](), {True}

    def tensor(self, *, uid: int, **options: Any) -> Node:
        self.inputs.append(Node().set_uid(uid))
        return self.inputs[-1]

    def _op(self, *nodes: Node) -> Node:
        self.used += nodes
        return self.output

    def conv_fprop(self, *, image: Node, weight: Node, **window: Any) -> Node:
        return self._op(image, weight)

    def conv_dgrad(self, *, loss: Node, filter: Node, **window: Any) -> Node:
        return self._op(loss, filter)

    def conv_wgrad(self, *, image: Node, loss: Node, **window: Any) -> Node:
        return self._op(image, loss)

    def bias(self, *, input: Node, bias: Node) -> Node:
        self.fused = True
        return self._op(bias)

    def relu(self, *, input: Node) -> Node:
        return self._op()

    def relu_backward(self, *, loss: Node, input: Node) -> Node:
        self.fused = True
        return self._op(input)

    def validate(self) -> None:
        uids = [node.uid for node in (*self.inputs, self.output)]
        if len(set(uids)) < len(uids) or any(node not in self.used for node in self.inputs):
            raise RuntimeError("uid has been already assigned to another tensor, or a tensor is not used")

    def build_operation_graph(self) -> None:
        """Nothing to do."""

    def create_execution_plans(self, modes: list[str]) -> None:
        if self.frontend.refuses:
            raise RuntimeError("no engine is good enough\nmore about it")
        self.names = [f"eng{i}" for i in range(self.engines)] if "A" in modes else []
        self.names += ["eng90"] if "FALLBACK" in modes else []

    def deselect_numeric_notes(self, notes: list[Notes]) -> None:
        self.notes = {True} if Notes.NONDETERMINISTIC in notes else self.notes

    def select_numeric_notes(self, notes: list[Notes]) -> None:
        self.notes = {False}

    def get_execution_plan_count(self) -> int:
        return len(self.names)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.names[index]

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[Notes]:
        return [Notes.RUNTIME_COMPILATION] if index in (3, 4, 5) else []

    def build_plan_at_index(self, index: int) -> None:
        deterministic = self.names[index] != f"eng{self.engines - 1}"
        if deterministic not in self.notes:
            raise RuntimeError("deselected")
        self.frontend.built.append(("fused " if self.fused else "") + self.names[index])
        if self.get_behavior_notes_for_plan_at_index(index):
            self.frontend.clock += 0.1

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 1000 * index

    def serialize(self) -> bytes:
        return b"compiled"

    def deserialize(self, handle: int, data: list[int]) -> None:
        self.frontend.restored.append(bytes(data))

    def _execute_plan_at_index(self, addresses: dict[int, int], workspace: int, index: int, *more: Any) -> None:
        self.frontend.executed.append((addresses, workspace, index))

    def _execute(self, addresses: dict[int, int], workspace: int, *more: Any) -> None:
        self.frontend.executed.append((addresses, workspace, -1))


class Frontend:
    """The module."""

    numerical_note = behavior_note = Notes
    data_type = Enum("data_type", "FLOAT BFLOAT16")
    heur_mode = type("heur_mode", (), {"A": "A", "FALLBACK": "FALLBACK"})

    def __init__(self) -> None:
        self.built: list[str] = []
        self.restored: list[bytes] = []
        self.executed: list[tuple[dict[int, int], int, int]] = []
        self.clock, self.refuses = 0.0, False

    def create_handle(self) -> int:
        return 7

    def set_stream(self, *, handle: int, stream: int) -> None:
        """Nothing to do."""

    def backend_version_string(self) -> str:
        return "9.0.0"

    def pygraph(self, **options: Any) -> Graph:
        return Graph(self)


@pytest.fixture
def cudnn() -> Iterator[Frontend]:
    """The frontend, and a clock that building moves."""
    frontend = Frontend()
    with (
        patch("minidnn.ops.cudnn_plans.load_cudnn", lambda: frontend),
        patch("minidnn.ops.cudnn_plans.time.perf_counter", lambda: frontend.clock),
    ):
        yield frontend


def array(shape: tuple[int, ...], dtype: str, address: int) -> Array:
    return Array.of(Tensor("t", shape, dtype, Role.ACTIVATION, "NHWC"), address)


def forward(size: int = 16) -> Problem:
    """Convolution, bias, ReLU."""
    x, y = array((8, 16, size, size), "bfloat16", 100), array((8, 32, size, size), "bfloat16", 400)
    arrays = {"x": x, "w": array((32, 16, 3, 3), "bfloat16", 200), "b": array((32,), "float32", 300), "y": y}
    return problem("conv2d_forward", "bf16", arrays, **WINDOW, relu=True)


def filter_gradient(dtype: str) -> Problem:
    x, dy = array((8, 16, 16, 16), dtype, 100), array((8, 32, 16, 16), dtype, 200)
    arrays = {"x": x, "dy": dy, "dw": array((32, 16, 3, 3), "float32", 300)}
    return problem("conv2d_backward_filter", "bf16", arrays, **WINDOW)


def test_flops_of_a_convolution() -> None:
    assert forward().flops == filter_gradient("bfloat16").flops == 2 * (8 * 32 * 16 * 16) * (16 * 9)


def test_plans_of_all_kinds_are_found_and_few_are_compiled(cudnn: Frontend) -> None:
    names = [a.name for a in Plans(0, PlanStore(None)).explore(forward(), 2)]
    assert [n for n in names if n.startswith(FUSED)] == [f"fused eng{i}" for i in (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11)]
    assert [n for n in names if not n.startswith(FUSED)] == [f"eng{i}" for i in (0, 1, 2, 6, 7, 8, 9, 10, 11)]
    assert "eng90" not in cudnn.built


def test_only_large_convolutions_compile_plans_unasked(cudnn: Frontend) -> None:
    plans = Plans(0, PlanStore(None))
    assert "fused eng3" not in [a.name for a in plans.explore(forward())]
    names = [a.name for a in plans.explore(forward(size=512))]
    compiled = ["fused eng3", "fused eng4", "fused eng5"]
    assert [n for n in names if n in compiled] == compiled[:COMPILED]


def test_few_plans_of_a_graph_are_tried(cudnn: Frontend) -> None:
    names = [a.name for a in Plans(0, PlanStore(None), tried=2).explore(forward(), 2)]
    assert names == [f"fused eng{i}" for i in (0, 1, 3, 4, 11)] + ["eng0", "eng1", "eng11"]


@pytest.mark.parametrize("relu", [True, False])
def test_a_plan_whose_relu_swallows_nan_is_none(cudnn: Frontend, relu: bool) -> None:
    with patch("minidnn.ops.cudnn_plans.SWALLOWS_NAN", {FUSED + "eng1"}):
        names = {a.name for a in Plans(0, PlanStore(None)).explore(replace(forward(), relu=relu))}
    assert {FUSED + "eng0", FUSED + "eng2", "eng1"} <= names
    assert (FUSED + "eng1" in names) is not relu


def test_slow_builds_end_the_compiling(cudnn: Frontend) -> None:
    names = [a.name for a in Plans(0, PlanStore(None), build_seconds=0.05).explore(forward(), 3)]
    assert "fused eng3" in names
    assert "fused eng4" not in names


def test_general_engines_serve_where_the_heuristics_know_none(cudnn: Frontend) -> None:
    with patch.object(Graph, "engines", 0):
        assert [a.name for a in Plans(0, PlanStore(None)).explore(filter_gradient("float32"))] == ["eng90"]


def test_a_refusal_says_why_in_one_line(cudnn: Frontend) -> None:
    cudnn.refuses = True
    with pytest.raises(DeviceError, match=r"cuDNN 9\.0\.0 has no plan for conv2d_forw.* \(no engine is good enough\)"):
        Plans(0, PlanStore(None)).algorithms(forward())


def test_a_deterministic_device_gets_deterministic_plans(cudnn: Frontend) -> None:
    store = PlanStore(None)
    everything = Plans(0, store).algorithms(filter_gradient("float32"))
    repeatable = Plans(0, store, deterministic=True).algorithms(filter_gradient("float32"))
    assert {a.name for a in everything} - {a.name for a in repeatable} == {"eng11"}


def test_a_filter_gradient_from_bf16_is_rounded_in_the_workspace(cudnn: Frontend) -> None:
    plans, p = Plans(0, PlanStore(None)), filter_gradient("bfloat16")
    found = plans.explore(p)
    assert all(a.name.startswith(ROUNDED) for a in found)
    nbytes = 2 * 32 * 16 * 9
    assert [a.workspace for a in found[:3]] == [nbytes, 1024 + nbytes, 2048 + nbytes]
    plans.bind(p, "rounded eng1", 10_000)()
    assert cudnn.executed == [({1: 100, 2: 200, 3: 11_024}, 10_000, 1)]
    rounded = plans.rounded(p, "rounded eng1", 10_000)
    assert (rounded.address, rounded.dtype, rounded.shape) == (11_024, "bfloat16", (32, 16, 3, 3))


def image(channels: int) -> Problem:
    """The first convolution of a network: few channels."""
    x, y = array((8, channels, 16, 16), "bfloat16", 100), array((8, 32, 16, 16), "bfloat16", 400)
    arrays = {"x": x, "w": array((32, channels, 3, 3), "bfloat16", 200), "y": y}
    return problem("conv2d_forward", "bf16", arrays, **WINDOW)


def test_a_convolution_of_few_channels_has_plans_for_more_too(cudnn: Frontend) -> None:
    plans, p = Plans(0, PlanStore(None)), image(3)
    found = {a.name: a.workspace for a in plans.explore(p)}
    more = 2 * (8 * 16 * 16 * 8 + 32 * 9 * 8)
    assert p.prepared_bytes(PADDED) == more
    plain = [n for n in found if not kind_of(n)]
    assert list(found) == plain + [kind + n for kind in PREPARED for n in plain]
    assert found["padded eng2"] == found["eng2"] + more
    assert found["unfolded eng2"] == found["eng2"] + 2 * (8 * 16 * 16 * 32 + 32 * 32)
    assert not any(kind_of(a.name) for a in plans.explore(image(8)))


def test_plans_over_other_operands_come_last_until_they_are_measured(cudnn: Frontend) -> None:
    plans, p = Plans(0, PlanStore(None)), image(3)
    names = [a.name for a in plans.algorithms(p)]
    assert names == sorted(names, key=lambda name: ["", *PREPARED].index(kind_of(name)))
    plans.record(p, {"padded eng2": 0.25, "eng0": 0.5})
    assert [a.name for a in plans.algorithms(p)][:2] == ["padded eng2", "eng0"]


def test_a_batch_is_split_into_parts_that_begin_at_sixteen_bytes() -> None:
    assert filter_gradient("bfloat16").part_counts == (4, 8)
    first, second = filter_gradient("bfloat16").parts(4, 5000)[:2]
    assert [a.shape for a in first.arrays.values()] == [(2, 16, 16, 16), (2, 32, 16, 16), (32, 16, 3, 3)]
    assert [a.address for a in first.arrays.values()] == [100, 200, 300]
    assert [a.address for a in second.arrays.values()] == [100 + 2 * 16**3 * 2, 200 + 2 * 32 * 16**2 * 2, 5000]
    odd = {"x": array((8, 3, 5, 5), "bfloat16", 0), "w": array((8, 3, 3, 3), "bfloat16", 0)}
    odd["y"] = array((8, 8, 5, 5), "bfloat16", 0)
    assert problem("conv2d_forward", "bf16", odd, **WINDOW).part_counts == ()  # 150 bytes an image
    assert split_of("split 16 padded eng4_k2=1") == (16, "padded eng4_k2=1")
    assert split_of("padded eng4") is None


def test_plans_with_large_workspaces_are_offered_for_parts_of_the_batch_too(cudnn: Frontend) -> None:
    plans, p = Plans(0, PlanStore(None)), filter_gradient("float32")
    plans.explore(p)
    assert plans.in_parts(p) == ()
    with patch("minidnn.ops.cudnn_plans.LARGE", 5000):  # eng5 is slow to build, eng6 has 6000 bytes
        plans.record(p, {"eng2": 1.0, "eng6": 1.2, "eng7": 9.0, "eng8": None, "eng9": 1.6, "eng10": 1.6, "eng11": 1.6})
        found = plans.in_parts(p)
        assert [(a.name, a.workspace, a.ms) for a in found] == [
            (f"split {count} eng6", 6000 + 4 * 32 * 16 * 9, None) for count in (4, 8)
        ]
        assert plans.in_parts(p) == ()
    assert [a.name for a in plans.algorithms(p)][-2:] == ["split 4 eng6", "split 8 eng6"]
    plans.record(p, {"split 8 eng6": 0.5})
    assert plans.algorithms(p)[0].name == "split 8 eng6"


def test_a_part_of_a_batch_is_not_split_again(cudnn: Frontend) -> None:
    """Nor where as many images have been a batch of their own."""
    arrays = {"x": array((16, 16, 16, 16), "float32", 0), "w": array((32, 16, 3, 3), "float32", 0)}
    whole = problem("conv2d_forward", "fp32", arrays | {"y": array((16, 32, 16, 16), "float32", 0)}, **WINDOW)
    quarter, plans = whole.parts(4)[0], Plans(0, PlanStore(None))
    with patch("minidnn.ops.cudnn_plans.LARGE", 5000):
        for batch in (quarter, whole, whole):
            plans.algorithms(batch)
            plans.in_parts(batch)
    assert "split 4 eng6" in [a.name for a in plans.algorithms(quarter)]
    assert not [a.name for a in plans.algorithms(whole) if a.name.count("split") > 1]


def test_a_large_workspace_must_buy_time() -> None:
    mib = 2**20
    ways = (
        Algorithm("whole", 800 * mib, 1.0), Algorithm("split 4 whole", 200 * mib, 1.01),
        Algorithm("split 16 whole", 150 * mib, 1.015), Algorithm("other", 0, 1.2), Algorithm("slow", 900 * mib, 1.5),
    )  # fmt: skip
    found = worth_their_workspace(ways)
    assert [a.name for a in found] == ["split 4 whole", "split 16 whole", "other", "slow"]
    assert worth_their_workspace(ways[:1]) == ways[:1]
    assert worth_their_workspace(()) == ()


def test_a_plan_that_is_known_is_built_alone(cudnn: Frontend, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    store = PlanStore(path)
    Plans(0, store).explore(forward())
    store.save()
    cudnn.built.clear()
    plans = Plans(0, PlanStore(path))
    plans.bind(forward(), "fused eng7", 0)()
    plans.bind(forward(), "eng2", 50)()
    assert cudnn.built == ["fused eng7", "eng2"]
    assert cudnn.executed == [({1: 100, 2: 200, 3: 300, 4: 400}, 0, 7), ({1: 100, 2: 200, 4: 400}, 50, 2)]
    with pytest.raises(DeviceError, match="has no plan 'eng77'"):
        plans.bind(forward(), "eng77", 0)


def test_compiled_plans_come_back_from_disk(cudnn: Frontend, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    store = PlanStore(path)
    Plans(0, store).explore(forward(), 1)
    store.save()
    cudnn.built.clear()
    Plans(0, PlanStore(path)).bind(forward(), "fused eng3", 0)()
    assert (cudnn.built, cudnn.restored, cudnn.executed[0][2]) == ([], [b"compiled"], -1)


def test_measured_times_are_kept_and_failures_forgotten(cudnn: Frontend) -> None:
    plans, p = Plans(0, PlanStore(None)), filter_gradient("float32")
    count = len(plans.explore(p))
    plans.record(p, {"eng6": 0.5, "eng2": 0.25, "eng0": None})
    assert [(a.name, a.ms) for a in plans.algorithms(p)][:3] == [("eng2", 0.25), ("eng6", 0.5), ("eng1", None)]
    assert len(plans.algorithms(p)) == count - 1
    assert {a.name: a.ms for a in plans.explore(p)}["eng2"] == 0.25


def test_times_of_other_kernels_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    store = PlanStore(path, "old")
    store.add_times({"max_pool2d_forward": 0.5})
    store.add_host("net", HostCosts(0.01, 0.005, 0.02))
    store.add_shares({"max_pool2d_forward default": Shares(0.5, 0.75)})
    store.put("conv", (Algorithm("eng0", 0, 1.0),), {})
    store.save()
    older = PlanStore(path, "old")
    assert older.times == {"max_pool2d_forward": 0.5}
    assert older.shares == {"max_pool2d_forward default": (0.5, 0.75)}
    newer = PlanStore(path, "new")
    assert newer.shares == {}
    assert (newer.times, newer.host, newer.algorithms("conv")[0].ms) == ({}, {"net": (0.01, 0.005, 0.02)}, 1.0)


def test_a_link_is_as_fast_as_it_was_ever_seen(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans.json")
    store.add_link(Link(5e10, 2e10, 0.002, duplex=False))
    store.add_link(Link(4e10, 6e10, 0.009, duplex=True))
    store.add_link(Link(2e10, 2e10, 0.01, duplex=False))  # a busy link may look like anything
    store.save()
    assert PlanStore(store.path).link == Link(5e10, 6e10, 0.002, duplex=True)


def test_a_damaged_store_counts_as_empty_and_so_does_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    rest = '"host": {"a": [1, 1, 1]}, "times": {"a": 1}, "slowdown": {}, "shares": {}, "plans": {"b": []}}'
    rates = ('{"up": 1}', '{"d2h": "fast", "h2d": 1}', '{"d2h": Infinity, "h2d": 1}', '{"d2h": 1, "h2d": 0}',
             '{"d2h": 1, "h2d": 1, "latency_ms": -3}', '{"d2h": 1, "h2d": 1, "duplex": "no"}')  # fmt: skip
    wrong_links = [f'{{"format": {FORMAT}, "link": {link}, {rest}' for link in rates]
    older = f'{{"format": {FORMAT - 1}, "link": null, {rest}'
    whole = f'{{"format": {FORMAT}, "link": null, {rest}'
    path.write_text(whole)
    assert (PlanStore(path).entries, PlanStore(path).times) == ({"b": []}, {"a": 1})
    wrong = (("{}, \"plans", "[], \"plans"), ("{}, \"plans", '{"a": [0, 0]}, "plans'),
             ("{}, \"plans", '{"a": [NaN, 1]}, "plans'), ('"shares": {}, ', ""), ('{"a": 1}', "[]"))  # fmt: skip
    damaged = [whole.replace(old, new) for old, new in wrong]
    assert whole not in damaged
    for text in ("{", "[]", '{"plans": {}}', *wrong_links, older, *damaged):
        path.write_text(text)
        store = PlanStore(path)
        assert (store.entries, store.times, store.link) == ({}, {}, None)
        assert (store.host, store.slowdown, store.shares) == ({}, {}, {})
