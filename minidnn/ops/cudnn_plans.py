"""cuDNN's plans for a convolution: which there are, and binding one of them.

This is the only file that knows the cuDNN frontend. A plan is one engine of cuDNN, with or without the epilogue (bias
and ReLU, or the ReLU's backward) fused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from minidnn.errors import DeviceError
from minidnn.ops.array import Array
from minidnn.ops.kernels import Launcher, load_library
from minidnn.ops.plans import FUSED, PREPARED, ROUNDED, SPLIT, PlanStore, Problem, engine_of, split_of, variant_of
from minidnn.profile.profile import Algorithm
from minidnn.units import MiB, round_up

SLOW_BUILD = 0.05
"""Seconds from which on building a plan counts as slow: it was compiled at run time and is worth keeping."""
BUILD_SECONDS = 2.0
"""Time for slow builds per graph."""
COMPILED = 2
"""Plans per graph that are compiled at run time, at most."""
COMPILE_FLOPS = 10**10
"""What a convolution must have to do before any are: they take seconds to build and save a tenth of its time."""
TRIED = 10
"""Plans per graph that are measured: heuristics list the best ones first."""
FEW = 3
"""So many plans of the heuristics are enough. Behind them cuDNN lists engines that do anything, some of them a thousand
times slower than the best: they are looked at only where the others are fewer."""
MODES = (HEURISTICS, FALLBACK) = ("A", "FALLBACK")
"""Where cuDNN's lists of plans come from."""
LARGE = 64 * MiB
"""Bytes of a workspace that are worth doing something about."""
HOPELESS = 1.5
"""A plan that takes so many times as long as the best one is no choice."""
SWALLOWS_NAN = frozenset({FUSED + "eng39_k25=0"})
"""Plans whose ReLU makes 0 of NaN (cuDNN 9.19, TF32): a run would go on with dead units and a loss that looks sound."""
EPILOGUE = ("b", "mask")
"""Operands of what follows a convolution."""


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
        self, stream: int, store: PlanStore, deterministic: bool = False, build_seconds: float = BUILD_SECONDS,
        tried: int = TRIED,
    ) -> None:  # fmt: skip
        cudnn = load_cudnn()

        self._cudnn = cudnn
        self.store = store
        self.deterministic = deterministic
        self.build_seconds, self.tried = build_seconds, tried
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
            raise DeviceError(
                f"cuDNN {version} has no plan for {problem.key} ({self._refusal}); "
                "use another precision or a newer cuDNN"
            )
        return known

    def explore(self, problem: Problem, compiled: int | None = None) -> tuple[Algorithm, ...]:
        """Build the promising plans. Of those that are compiled at run time, which takes seconds, the first `compiled`
        of each fused graph, and only within `build_seconds`. Times that are known are kept."""
        if compiled is None:
            compiled = COMPILED if problem.flops >= COMPILE_FLOPS else 0
        known = {a.name: a.ms for a in self.store.algorithms(problem.key)}
        found: dict[str, Built] = {}
        for variant in problem.variants:
            if variant == "" and any(variant_of(name) == ROUNDED for name in found):
                break  # engines that write dW in float32 from bf16 can take seconds for one launch
            for deterministic in (True, False):  # the store keeps both kinds, whoever asks
                plans = list(self._graph_plans(problem, variant, deterministic, (HEURISTICS,), compiled))
                if len(plans) + len(found) < FEW:
                    plans = list(self._graph_plans(problem, variant, deterministic, MODES, compiled))
                for i, built in enumerate(plans):
                    if i < self.tried or built.compiled:
                        found.setdefault(built.algorithm.name, built)
            # Where the epilogue is fused at no cost, the same convolution without it need not be compiled too.
            compiled = 0 if found else compiled
        if not found and compiled == 0:
            return self.explore(problem, COMPILED)
        blobs: dict[str, bytes] = {}
        for name, built in found.items():
            self._built.setdefault((problem.key, name), built)
            if built.build_seconds >= SLOW_BUILD:
                with suppress(Exception):  # not every engine can be written down; it is built again then
                    blobs[name] = bytes(built.graph.serialize())
        algorithms = [built.algorithm for built in found.values()]
        for kind in PREPARED:
            wide, more = problem.prepared(kind), problem.prepared_bytes(kind)
            others = self.explore(wide) if wide is not None else ()
            algorithms += [replace(a, name=kind + a.name, workspace=more + a.workspace) for a in others]
        self.store.put(problem.key, tuple(replace(a, ms=known.get(a.name)) for a in algorithms), blobs)
        return self.store.algorithms(problem.key)

    def in_parts(self, problem: Problem) -> tuple[Algorithm, ...]:
        """Add plans that run over parts of the batch: with the engines whose plans are among the fast ones, or were
        not measured, and want a LARGE workspace. Those that are new."""
        known = self.store.algorithms(problem.key)
        best = min((a.ms for a in known if a.ms is not None), default=inf)
        engines = {engine_of(a.name) for a in known if a.workspace >= LARGE and (a.ms or best) <= HOPELESS * best}
        engines = {engine for engine in engines if split_of(engine) is None}  # a part is not split again
        names = {a.name for a in known}
        found: list[Algorithm] = []
        for count in problem.part_counts if engines else ():
            part, more = problem.parts(count)[0], problem.split_bytes
            for a in self.store.algorithms(part.key) or self.explore(part):
                name = f"{SPLIT}{count} {a.name}"
                if engine_of(a.name) in engines and name not in names:
                    found.append(replace(a, name=name, workspace=more + a.workspace, ms=None))
        if found:
            self.store.extend(problem.key, found)
        return tuple(found)

    def record(self, problem: Problem, times: Mapping[str, float | None]) -> None:
        """Keep measured times (ms by plan name; None: the plan does not run, and is forgotten)."""
        key = problem.key
        known = [a for a in self.store.algorithms(key) if times.get(a.name, 0.0) is not None]
        blobs = {a.name: blob for a in known if (blob := self.store.blob(key, a.name))}
        self.store.put(key, tuple(replace(a, ms=times.get(a.name, a.ms)) for a in known), blobs)

    def _graph_plans(
        self, problem: Problem, variant: str, deterministic: bool, modes: tuple[str, ...] = MODES, compiled: int = 0,
        only: str | None = None,
    ) -> Iterator[Built]:  # fmt: skip
        """The plans of one graph as they get built; of a plan that is known by name, none but that. Those that are
        deterministic and those that are not are disjoint by selection."""
        try:
            graph = self._graph(problem, variant, deterministic, modes)
            count = graph.get_execution_plan_count()
        except Exception as error:  # the frontend raises several types; all mean that this graph is not supported
            self._refusal = str(error).partition("\n")[0]
            return
        slow = 0.0
        for index in range(count):
            name = variant + graph.get_plan_name_at_index(index)
            if problem.relu and name in SWALLOWS_NAN:
                continue
            compiles = self._compiles(graph, index)
            wanted = name == only if only is not None else not compiles or (compiled > 0 and slow <= self.build_seconds)
            if not wanted:
                continue
            begin = time.perf_counter()
            try:
                graph.build_plan_at_index(index)
            except Exception as error:  # deselected, or not possible on this card: the next one may be
                self._refusal = str(error).partition("\n")[0]
                continue
            seconds = time.perf_counter() - begin
            compiled -= compiles
            slow += seconds if seconds >= SLOW_BUILD else 0.0
            workspace = int(graph.get_workspace_size_plan_at_index(index))
            if variant == ROUNDED:
                workspace = round_up(workspace, 256) + problem.rounded_bytes
            yield Built(Algorithm(name, workspace, None, deterministic), graph, index, seconds, compiles)

    def _compiles(self, graph: Any, index: int) -> bool:
        """Whether building the plan compiles code (seconds)."""
        try:
            notes = graph.get_behavior_notes_for_plan_at_index(index)
        except Exception:  # a plan that was deselected has none, and costs nothing to try
            return False
        return self._cudnn.behavior_note.RUNTIME_COMPILATION in notes

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _graph(self, problem: Problem, variant: str, deterministic: bool, modes: tuple[str, ...]) -> Any:
        cudnn, arrays, fused = self._cudnn, problem.arrays, variant == FUSED
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
        output.set_data_type(self._types["bfloat16" if variant == ROUNDED else target.dtype])
        output.set_uid(len(problem.operands))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
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
        unused = () if variant_of(algorithm) == FUSED else EPILOGUE
        addresses = {uid: a.address for uid, (n, a) in enumerate(problem.operands, 1) if n not in unused}
        if variant_of(algorithm) == ROUNDED:
            addresses[len(problem.operands)] = self.rounded(problem, algorithm, workspace).address
        if built.index < 0:
            return partial(built.graph._execute, addresses, workspace, self._handle, None, None, None)
        execute = built.graph._execute_plan_at_index
        return partial(execute, addresses, workspace, built.index, self._handle, None, None, None)

    def rounded(self, problem: Problem, algorithm: str, workspace: int) -> Array:
        """Where in the workspace a ROUNDED plan leaves dW."""
        place = workspace + self._find(problem, algorithm).algorithm.workspace - problem.rounded_bytes
        return replace(problem.operands[-1][1], address=place, dtype="bfloat16")

    def _find(self, problem: Problem, algorithm: str) -> Built:
        key = (problem.key, algorithm)
        if key not in self._built:
            built = self._restore(problem, algorithm)
            if built is None:
                kinds = (deterministic for deterministic in (True, False))
                variant = variant_of(algorithm)
                found = (next(self._graph_plans(problem, variant, d, only=algorithm), None) for d in kinds)
                built = next(filter(None, found), None)
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
