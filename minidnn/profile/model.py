"""A modelled profile: what each op would take on a named GPU, from its data sheet alone.

The roofline (Williams, Waterman and Patterson 2009): an op takes the longer of its arithmetic at a fraction of the peak
and its traffic at a fraction of the memory bandwidth. What a convolution needs of both depends on its algorithm
(`convolution.WAYS`); which fractions are reached depends on the generation of kernels (`GENERATIONS`), calibrated on
published and on measured times. A model orders modes and algorithms and shows where an iteration stalls; single ops may
be off by half and more (data that is still in cache, the quirks of a kernel), and only a measured profile knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph
from minidnn.graph.op import Op
from minidnn.profile.convolution import WAYS, Convolution, Cost
from minidnn.profile.gpus import Gpu, named_gpu
from minidnn.profile.profile import Algorithm, Profile, op_key

KERNEL_MS = 0.003
"""What the shortest kernel takes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The fractions of the peaks that a generation of kernels reaches.

    `fp32`: direction -> algorithm -> fraction of the fp32 peak; what is absent does not exist. `matrix`: by precision
    and direction, fraction of the matrix units' peak; 1 where absent. Both are for deep and wide products: one of depth
    d and width w reaches d / (d + `depth`) * w / (w + `width`) of them, because each output costs an epilogue and
    narrow tiles stay part empty. `matmul`: fraction of the peak for a plain matrix product. `traffic`: fraction of the
    bandwidth by function, "" for others.
    """

    fp32: Mapping[str, Mapping[str, float]]
    matrix: Mapping[tuple[str, str], float]
    matmul: float
    depth: float
    width: float
    matrix_width: float
    traffic: Mapping[str, float]


GENERATIONS: Mapping[str, Generation] = {
    # implicit_gemm, depth, width: Table I of vDNN++ (64 channels, 1x1, 3x3, 5x5: 19, 80, 200 ms) and its section V-C
    # (AlexNet(128), all(m): 377 ms). Pooling: Table I (3 ms). The others: Table IV (VGG-116(32), fastest algorithms:
    # 2468 ms) and Table V, whose (p) rows hold the workspace of winograd_nonfused for the largest layer of VGG-16.
    "cudnn7": Generation(
        fp32={
            "forward": {
                "implicit_gemm": 0.265, "precomp_gemm": 0.6, "gemm": 0.6, "fft": 0.4, "fft_tiling": 0.4,
                "winograd": 0.65, "winograd_nonfused": 0.65,
            },
            "backward_data": {
                "implicit_gemm": 0.265, "precomp_gemm": 0.6, "fft": 0.4, "fft_tiling": 0.4,
                "winograd": 0.65, "winograd_nonfused": 0.65,
            },
            "backward_filter": {
                "implicit_gemm": 0.265, "precomp_gemm": 0.6, "fft": 0.4, "fft_tiling": 0.4, "winograd_nonfused": 0.65,
            },
        },
        matrix={}, matmul=0.7, depth=107, width=46, matrix_width=0,
        traffic={"": 0.75, "max_pool2d_forward": 0.35, "max_pool2d_backward": 0.35},
    ),
    # Measured on an H100 with cuDNN 9.19: VGG-16's convolutions at batch 64, matrix products, copies, pooling.
    "cudnn9": Generation(
        fp32={
            "forward": {"implicit_gemm": 0.68, "precomp_gemm": 0.68, "gemm": 0.6, "winograd_nonfused": 0.3},
            "backward_data": {"implicit_gemm": 0.48, "fft_tiling": 0.75},
            "backward_filter": {"implicit_gemm": 0.48, "winograd_nonfused": 0.6},
        },
        matrix={("tf32", "backward_filter"): 0.49}, matmul=0.75, depth=42, width=0, matrix_width=72,
        traffic={"": 0.88, "max_pool2d_forward": 0.72, "max_pool2d_backward": 0.45},
    ),
}  # fmt: skip

PASSES: Mapping[str, float] = {"batch_norm_forward": 1.5, "batch_norm_backward": 5 / 3}
"""Traffic as a multiple of the op's operands, where a statistic must be complete before the second pass over them."""


def modelled(graph: Graph, gpu: Gpu | str) -> Profile:
    """The profile of `graph` on a named GPU: each op's algorithms, fastest first, and the link.

    Raises ArgumentError for a GPU that has no name here, and for fp64, in which none is described.
    """
    card = named_gpu(gpu) if isinstance(gpu, str) else gpu
    if graph.target.precision == "fp64":
        raise ArgumentError("precision is 'fp64'; GPUs are modelled in fp32, tf32 and bf16: choose one of them")
    model = _Model(graph, card, GENERATIONS[card.generation])
    entries: dict[str, tuple[Algorithm, ...]] = {}
    for op in graph.ops:
        key = op_key(graph, op)
        if key not in entries:
            entries[key] = model.algorithms(op)
    return Profile(f"modelled {card.title}", entries, card.link)


@dataclass(frozen=True, slots=True)
class _Model:
    graph: Graph
    gpu: Gpu
    kernels: Generation

    @property
    def rate(self) -> float:
        """FLOP/s in the graph's precision."""
        return self.gpu.rate(self.graph.target.precision)

    def algorithms(self, op: Op) -> tuple[Algorithm, ...]:
        """The ways to compute one op, fastest first; of equally fast ones the one with less workspace."""
        if not op.function.startswith("conv2d_"):
            traffic = sum(self.graph.tensors[name].nbytes for _, name in op.reads + op.writes)
            cost = Cost(op.flops, traffic * PASSES.get(op.function, 1.0))
            return (Algorithm(ms=self.ms(cost, self.kernels.matmul * self.rate, op.function)),)
        conv = Convolution.of(self.graph, op)
        found = [
            self.plain(conv, name, fraction)
            for name, fraction in self.kernels.fp32[conv.direction].items()
            if WAYS[name].serves(conv)
        ]
        if self.gpu.has_matrix_units(self.graph.target.precision):
            found.append(self.on_matrix_units(conv))
        return tuple(sorted(found, key=lambda a: (a.ms or 0.0, a.workspace)))

    def ms(self, cost: Cost, rate: float, function: str = "") -> float:
        """The roofline, in ms; the sum of both its sides for a staged computation."""
        kernels = self.kernels
        traffic = cost.traffic / (self.gpu.bandwidth * kernels.traffic.get(function, kernels.traffic[""]))
        seconds = cost.flops / rate + traffic if cost.staged else max(cost.flops / rate, traffic)
        return KERNEL_MS + 1e3 * seconds

    def plain(self, conv: Convolution, name: str, fraction: float) -> Algorithm:
        """A convolution on the fp32 units."""
        cost = WAYS[name].cost(conv)
        if cost.shaped:
            fraction *= conv.shape_factor(self.kernels.depth, self.kernels.width)
        return Algorithm(name, ceil(cost.workspace), self.ms(cost, fraction * self.gpu.peak["fp32"]))

    def on_matrix_units(self, conv: Convolution) -> Algorithm:
        """Implicit GEMM in the target's precision. Matrix units want NHWC: NCHW operands are copied, through a
        workspace of their size (cuDNN's to within 1 %)."""
        fraction = self.kernels.matrix.get((self.graph.target.precision, conv.direction), 1.0)
        fraction *= conv.shape_factor(self.kernels.depth, self.kernels.matrix_width)
        copied = conv.operands if conv.nchw else 0
        cost = Cost(conv.flops, conv.operands)
        ms = self.ms(cost, fraction * self.rate) + self.ms(Cost(0, 2 * copied), self.rate) * bool(copied)
        return Algorithm("matrix_gemm", ceil(copied), ms)
