"""What a convolution costs by algorithm: arithmetic, memory traffic and workspace, from its shape alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

from minidnn.graph.graph import Graph
from minidnn.graph.op import Op


@dataclass(frozen=True, slots=True)
class Convolution:
    """The numbers of a convolution X [n,c,h,w] * W [k,c/groups,r,s] -> Y [n,k,p,q], the same in all directions.

    `dense`: stride and dilation are 1. `operands` are the bytes of X, W and Y.
    """

    direction: str  # forward, backward_data or backward_filter
    n: int
    c: int
    h: int
    w: int
    k: int
    p: int
    q: int
    r: int
    s: int
    padding: int
    groups: int
    dense: bool
    nchw: bool
    flops: float
    operands: float

    @classmethod
    def of(cls, graph: Graph, op: Op) -> Convolution:
        """Read the numbers off an op."""
        tensors = {argument.removeprefix("d"): graph.tensors[name] for argument, name in op.bindings}
        x, w, y = tensors["x"], tensors["w"], tensors["y"]
        (n, c, high, wide), (_, k, p, q), (_, _, r, s) = x.shape, y.shape, w.shape
        attributes = dict(op.attributes)
        return cls(
            op.function.removeprefix("conv2d_"), n, c, high, wide, k, p, q, r, s,
            padding=max(max(sides) for sides in attributes["padding"]),
            groups=attributes["groups"],
            dense=attributes["stride"] == attributes["dilation"] == (1, 1),
            nchw=x.layout == "NCHW",
            flops=op.flops,
            operands=x.nbytes + y.nbytes + w.nbytes,
        )  # fmt: skip

    def shape_factor(self, depth: float, width: float) -> float:
        """What the direction's matrix product reaches of its fraction, by the length of its sums and its width."""
        sums = {
            "forward": self.c * self.r * self.s / self.groups,
            "backward_data": self.k * self.r * self.s / self.groups,
            "backward_filter": self.n * self.p * self.q,
        }[self.direction]
        channels = (self.c if self.direction == "backward_data" else self.k) / self.groups
        return sums / (sums + depth) * channels / (channels + width)

    @property
    def padded(self) -> int:
        """The longer side of the padded image."""
        return max(self.h, self.w) + 2 * self.padding

    @property
    def transformable(self) -> bool:
        """Whether transform algorithms serve it."""
        return self.dense and self.nchw and self.groups == 1 and self.r > 1 and self.s > 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic in FLOP, traffic and workspace in bytes.

    `staged`: the product and what comes before and after it are kernels of their own, so that the times of arithmetic
    and traffic add; else one kernel overlaps them. `shaped`: the direction's own product is computed, and its shape
    counts; else many deep and wide ones.
    """

    flops: float
    traffic: float
    workspace: float = 0
    staged: bool = False
    shaped: bool = True


def _implicit(conv: Convolution) -> Cost:
    """The matrix of patches is never formed (Chetlur et al. 2014, section 3)."""
    return Cost(conv.flops, conv.operands)


def _precomputed(conv: Convolution) -> Cost:
    """Implicit GEMM with the patches' offsets in a table, one int32 for each (c, r, s)."""
    return Cost(conv.flops, conv.operands, 4 * conv.c * conv.r * conv.s / conv.groups)


def _explicit(conv: Convolution) -> Cost:
    """Patches of one image at a time are written out and multiplied (Jia et al. 2014, Caffe's im2col)."""
    patches = 4 * conv.c * conv.r * conv.s * conv.p * conv.q
    return Cost(conv.flops, conv.operands + 2 * conv.n * patches, patches, staged=True)


def _fft(conv: Convolution, tile: int, at_once: int = 1) -> Cost:
    """Products of spectra of tile x tile pixels (Mathieu et al. 2014; Vasilache et al. 2015).

    The spectra of `at_once` tiles of every image and those of all filters lie in the workspace, 8 bytes a frequency.
    """
    tiles = ceil(conv.p / (tile - conv.r + 1)) * ceil(conv.q / (tile - conv.s + 1))
    frequencies = tile * (tile // 2 + 1)
    images, filters = conv.n * (conv.c + conv.k), conv.c * conv.k
    transforms = 2.5 * tile * tile * log2(tile * tile) * (tiles * images + filters)
    products = 8 * frequencies * tiles * conv.n * filters
    spectra = 8 * frequencies * (tiles * images + filters)
    workspace = 8 * frequencies * (min(tiles, at_once) * images + filters)
    return Cost(transforms + products, conv.operands + 2 * spectra, workspace, staged=True, shaped=False)


def _tiled_fft(conv: Convolution) -> Cost:
    return _fft(conv, 32, 2)


def _whole_fft(conv: Convolution) -> Cost:
    return _fft(conv, 1 << ceil(log2(conv.padded)))


def _winograd(conv: Convolution) -> Cost:
    """F(2x2, 3x3) (Lavin and Gray 2016): 16 products serve 4 outputs; transformed filters lie in the workspace."""
    points, filters = conv.n * ceil(conv.p / 2) * ceil(conv.q / 2), 4 * 16 * conv.c * conv.k
    return Cost(2 * 16 * points * conv.c * conv.k, conv.operands + 2 * filters, filters, shaped=False)


def _winograd_nonfused(conv: Convolution) -> Cost:
    """F(4x4, 3x3) or F(4x4, 5x5): the transformed tiles of X and Y lie in the workspace too."""
    points = (4 + conv.r - 1) ** 2
    tiles = conv.n * ceil(conv.p / 4) * ceil(conv.q / 4)
    space = 4 * points * (tiles * (conv.c + conv.k) + conv.c * conv.k)
    return Cost(2 * points * tiles * conv.c * conv.k, conv.operands + 2 * space, space, staged=True, shaped=False)


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm: its cost, and the convolutions that it serves (cuDNN's restrictions)."""

    cost: Callable[[Convolution], Cost]
    serves: Callable[[Convolution], bool]


WAYS: Mapping[str, Way] = {
    "implicit_gemm": Way(_implicit, lambda conv: True),
    "precomp_gemm": Way(_precomputed, lambda conv: True),
    "gemm": Way(_explicit, lambda conv: conv.nchw and conv.groups == 1),
    "fft": Way(_whole_fft, lambda conv: conv.transformable and conv.padded <= 256),
    "fft_tiling": Way(_tiled_fft, lambda conv: conv.transformable and max(conv.r, conv.s) < 32),
    "winograd": Way(_winograd, lambda conv: conv.transformable and conv.r == conv.s == 3),
    "winograd_nonfused": Way(_winograd_nonfused, lambda conv: conv.transformable and conv.r == conv.s in (3, 5)),
}
"""The convolution algorithms. The workspaces of fft_tiling and of winograd_nonfused (3x3) are cuDNN's to within 1 %."""
