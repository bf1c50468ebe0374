"""Convolutions on CUDA, through cuDNN: the plans that there are for a problem, and binding one of them.

This is the only file that knows the cuDNN frontend. A plan is one engine of cuDNN, with or without the epilogue (bias
and ReLU, or the ReLU's backward) fused; where it is not, one of our kernels follows. A plan's name is the algorithm's
name in profiles and schedules.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minidnn.errors import DeviceError, ShapeError
from minidnn.ops import map_ops
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Launcher, load_library, sequence
from minidnn.ops.plans import Padding, Pair, PlanStore, Problem
from minidnn.profile.profile import Algorithm

SLOW_BUILD = 0.05
"""Seconds from which on building a plan counts as slow: it was compiled at run time and is worth keeping."""
BUILD_SECONDS = 2.0
"""Time for slow builds per graph; heuristics list the best plans first, so later ones are passed over."""
COMPILED = 3
"""Plans per graph that are compiled at run time, at most, for the same reason."""
EPILOGUE = ("b", "mask")
"""Operands of what follows a convolution."""
FUSED = "fused "
"""Prefix of the names of plans whose epilogue is fused."""


@dataclass(frozen=True)
class Built:
    """A plan ready to run: the frontend's graph, the plan's index in it (-1: the graph holds this plan alone)."""

    algorithm: Algorithm
    graph: Any
    index: int
    build_seconds: float
    compiled: bool = False


def load_cudnn() -> Any:
    """The frontend's module. CUDA's libraries are loaded first: cuDNN's run-time compiled engines need them."""
    for library in ("cudart", "nvrtc", "cublasLt", "cublas"):
        load_library(library)
    import cudnn

    return cudnn


class Plans:
    """cuDNN plans on one stream."""

    def __init__(
        self, stream: int, store: PlanStore, deterministic: bool = False, build_seconds: float = BUILD_SECONDS
    ) -> None:
        cudnn = load_cudnn()

        self._cudnn = cudnn
        self.store = store
        self.deterministic = deterministic
        self.build_seconds = build_seconds
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=stream)
        self._types = {"float32": cudnn.data_type.FLOAT, "bfloat16": cudnn.data_type.BFLOAT16}
        self._built: dict[tuple[str, str], Built] = {}
        self._refusal = "no engine is offered"

    def close(self) -> None:
        """Give the handle back."""
        if self._handle is not None:
            self._built.clear()
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    # -- what there is -------------------------------------------------------------------------------------------------

    def algorithms(self, problem: Problem) -> tuple[Algorithm, ...]:
        """The plans for a problem, fastest first where they were measured, else in the order of cuDNN's heuristics."""
        known = self.store.algorithms(problem.key)
        if not known:
            known = self.explore(problem)
        if self.deterministic:
            known = tuple(a for a in known if a.deterministic)
        if not known:
            version = self._cudnn.backend_version_string()
            raise DeviceError(f"cuDNN {version} has no plan for {problem.key}: {self._refusal}")
        return known

    def explore(self, problem: Problem) -> tuple[Algorithm, ...]:
        """Build the plans that there are, once; slow ones only within `build_seconds`."""
        blobs: dict[str, bytes] = {}
        found: dict[str, Algorithm] = {}
        for built in self._candidates(problem):
            name = built.algorithm.name
            found.setdefault(name, built.algorithm)
            self._built.setdefault((problem.key, name), built)
            if built.build_seconds >= SLOW_BUILD:
                with suppress(Exception):  # not every engine can be written down; it is built again then
                    blobs[name] = bytes(built.graph.serialize())
        algorithms = tuple(found.values())
        self.store.put(problem.key, algorithms, blobs)
        return algorithms

    def record(self, problem: Problem, times: Mapping[str, float]) -> None:
        """Keep measured times (ms by plan name)."""
        key = problem.key
        known = self.store.algorithms(key)
        blobs = {a.name: blob for a in known if (blob := self.store.blob(key, a.name))}
        self.store.put(key, tuple(replace(a, ms=times.get(a.name, a.ms)) for a in known), blobs)

    def _candidates(self, problem: Problem, only: str | None = None) -> Iterator[Built]:
        """Plans as they get built; of a plan that is known by name, none but that."""
        for fused in (True, False) if problem.has_epilogue else (False,):
            if only is None or fused == only.startswith(FUSED):
                for deterministic in (True, False):  # the store keeps both kinds, whoever asks
                    yield from self._graph_plans(problem, fused, deterministic, only)

    def _graph_plans(self, problem: Problem, fused: bool, deterministic: bool, only: str | None) -> Iterator[Built]:
        """The plans of one graph. Those that are deterministic and those that are not are disjoint by selection."""
        try:
            graph = self._graph(problem, fused, deterministic)
            count = graph.get_execution_plan_count()
        except Exception as error:  # the frontend raises several types; all mean that this graph is not supported
            self._refusal = str(error)
            return
        slow, compiled = 0.0, 0
        for index in range(count):
            name = (FUSED if fused else "") + graph.get_plan_name_at_index(index)
            compiles = self._compiles(graph, index)
            if only is not None and name != only:
                continue
            if only is None and compiles and (compiled == COMPILED or slow > self.build_seconds):
                continue
            begin = time.perf_counter()
            try:
                graph.build_plan_at_index(index)
            except Exception as error:  # deselected, or not possible on this card: the next one may be
                self._refusal = str(error)
                continue
            seconds = time.perf_counter() - begin
            compiled += compiles
            slow += seconds if seconds >= SLOW_BUILD else 0.0
            workspace = int(graph.get_workspace_size_plan_at_index(index))
            yield Built(Algorithm(name, workspace, None, deterministic), graph, index, seconds, compiles)

    def _compiles(self, graph: Any, index: int) -> bool:
        """Whether building the plan compiles code (seconds)."""
        try:
            notes = graph.get_behavior_notes_for_plan_at_index(index)
        except Exception:  # a plan that was deselected has none, and costs nothing to try
            return False
        return self._cudnn.behavior_note.RUNTIME_COMPILATION in notes

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _graph(self, problem: Problem, fused: bool, deterministic: bool) -> Any:
        cudnn, arrays = self._cudnn, problem.arrays
        float32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=self._types[problem.operands[0][1].dtype], intermediate_data_type=float32,
            compute_data_type=float32, handle=self._handle,
        )  # fmt: skip
        window = {
            "pre_padding": [p[0] for p in problem.padding], "post_padding": [p[1] for p in problem.padding],
            "stride": list(problem.stride), "dilation": list(problem.dilation),
        }  # fmt: skip
        tensors = {  # the graph makes its output itself, and must not know of what it does not use
            name: self._tensor(graph, name, a, uid)
            for uid, (name, a) in enumerate(problem.operands[:-1], 1)
            if fused or name not in EPILOGUE
        }
        if problem.function == "conv2d_forward":
            output = graph.conv_fprop(image=tensors["x"], weight=tensors["w"], **window)
            if fused and "b" in arrays:
                output = graph.bias(input=output, bias=tensors["b"])
            if fused and problem.relu:
                output = graph.relu(input=output)
        elif problem.function == "conv2d_backward_data":
            output = graph.conv_dgrad(loss=tensors["dy"], filter=tensors["w"], **window)
            if fused:
                output.set_dim(list(arrays["dx"].shape))
                output.set_stride(list(arrays["dx"].strides))
                output = graph.relu_backward(loss=output, input=tensors["mask"])
        else:
            output = graph.conv_wgrad(image=tensors["x"], loss=tensors["dy"], **window)
        target = problem.operands[-1][1]
        output.set_output(True).set_dim(list(target.shape)).set_stride(list(target.strides))
        output.set_data_type(self._types[target.dtype]).set_uid(len(problem.operands))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        note = cudnn.numerical_note
        if problem.precision == "fp32":  # the first plan for fp32 data would round its inputs to TF32
            graph.deselect_numeric_notes([note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS, note.REDUCED_PRECISION_REDUCTION])
        if deterministic:
            graph.deselect_numeric_notes([note.NONDETERMINISTIC])
        else:
            graph.select_numeric_notes([note.NONDETERMINISTIC])
        return graph

    def _tensor(self, graph: Any, name: str, array: Array, uid: int) -> Any:
        shape, strides = array.shape, array.strides
        if name == "b":
            shape, strides = (1, *shape, 1, 1), (shape[0], 1, shape[0], shape[0])
        return graph.tensor(
            dim=list(shape), stride=list(strides), data_type=self._types[array.dtype], name=name, uid=uid
        )

    # -- running one ---------------------------------------------------------------------------------------------------

    def bind(self, problem: Problem, algorithm: str, workspace: int) -> Launcher:
        """The convolution alone (with its epilogue if the plan fuses it), on the problem's addresses."""
        built = self._find(problem, algorithm)
        fused = algorithm.startswith(FUSED)
        unused = () if fused else EPILOGUE
        addresses = {uid: a.address for uid, (n, a) in enumerate(problem.operands, 1) if n not in unused}
        if built.index < 0:
            return partial(built.graph._execute, addresses, workspace, self._handle, None, None, None)
        execute = built.graph._execute_plan_at_index
        return partial(execute, addresses, workspace, built.index, self._handle, None, None, None)

    def _find(self, problem: Problem, algorithm: str) -> Built:
        key = (problem.key, algorithm)
        if key not in self._built:
            built = self._restore(problem, algorithm)
            if built is None:
                built = next(self._candidates(problem, only=algorithm), None)
            if built is None:
                raise DeviceError(f"cuDNN has no plan {algorithm!r} for {problem.key}; profile this card again")
            self._built[key] = built
        return self._built[key]

    def _restore(self, problem: Problem, algorithm: str) -> Built | None:
        blob = self.store.blob(problem.key, algorithm)
        if blob is None:
            return None
        graph = self._cudnn.pygraph(handle=self._handle)
        try:
            graph.deserialize(self._handle, list(blob))
        except Exception:  # written by another build of the library: build it anew
            return None
        known = next(a for a in self.store.algorithms(problem.key) if a.name == algorithm)
        return Built(known, graph, -1, 0.0)


# -- the ops -----------------------------------------------------------------------------------------------------------


def problem(
    function: str, precision: str, arrays: Mapping[str, Array | None], *,
    stride: Pair, padding: Padding, dilation: Pair, groups: int = 1, relu: bool = False,
) -> Problem:  # fmt: skip
    """The plans' view of a convolution: operands in the order of the graph's uids, output last."""
    order = {
        "conv2d_forward": ("x", "w", "b", "y"),
        "conv2d_backward_data": ("dy", "w", "mask", "dx"),
        "conv2d_backward_filter": ("x", "dy", "dw"),
    }[function]
    given = [(name, arrays.get(name)) for name in order]
    operands = tuple((name, array) for name, array in given if array is not None)
    for name, array in operands:
        if name != "b" and len(array.shape) != 4:
            raise ShapeError(f"{function}: {name} has shape {list(array.shape)}; expected four axes")
    return Problem(function, operands, stride, padding, dilation, groups, relu, precision)


def _bind(on: Context, p: Problem, algorithm: str, workspace: int) -> tuple[Launcher, bool]:
    """The convolution, and whether its epilogue is still to do."""
    assert on.plans is not None
    if algorithm == "default":
        algorithm = on.plans.algorithms(p)[0].name
    return on.plans.bind(p, algorithm, workspace), p.has_epilogue and not algorithm.startswith(FUSED)


def conv2d_forward(
    on: Context, *, x: Array, w: Array, y: Array, b: Array | None = None, relu: bool = False, stride: Pair,
    padding: Padding, dilation: Pair, groups: int = 1, algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """Y [N,K,P,Q] = conv(X [N,C,H,W], W [K,C/groups,R,S]) + b, then ReLU."""
    p = problem(
        "conv2d_forward", on.precision, {"x": x, "w": w, "b": b, "y": y},
        stride=stride, padding=padding, dilation=dilation, groups=groups, relu=relu,
    )  # fmt: skip
    launch, more = _bind(on, p, algorithm, workspace)
    if not more:
        return launch
    if b is None:
        return sequence(launch, map_ops.relu_backward(on, y=y, dy=y, dx=y))
    return sequence(launch, map_ops.bias_relu(on, y=y, b=b, relu=relu))


def conv2d_backward_data(
    on: Context, *, dy: Array, w: Array, dx: Array, mask: Array | None = None, stride: Pair, padding: Padding,
    dilation: Pair, groups: int = 1, algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """dX from dY and W, zero where mask <= 0."""
    p = problem(
        "conv2d_backward_data", on.precision, {"dy": dy, "w": w, "mask": mask, "dx": dx},
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    launch, more = _bind(on, p, algorithm, workspace)
    if not more or mask is None:
        return launch
    return sequence(launch, map_ops.relu_backward(on, y=mask, dy=dx, dx=dx))


def conv2d_backward_filter(
    on: Context, *, x: Array, dy: Array, dw: Array, stride: Pair, padding: Padding, dilation: Pair, groups: int = 1,
    algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """dW (float32) from X and dY."""
    p = problem(
        "conv2d_backward_filter", on.precision, {"x": x, "dy": dy, "dw": dw},
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    return _bind(on, p, algorithm, workspace)[0]
