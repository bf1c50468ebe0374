"""Named GPUs: what their data sheets say, and what a copy over their host link reaches. Every number has its source.

`peak` holds the multiply-add rate of the plain units ("fp32") and, where the card has matrix units for a precision that
minidnn trains in ("tf32", "bf16"), theirs without sparsity. Volta's and Turing's matrix units take fp16 alone, so tf32
and bf16 run on such a card at its fp32 rate. Clocks are boost clocks. `generation` says which kernels such a card was,
or is, used with (`model.GENERATIONS`). All of these cards have two copy engines or more: the link is duplex.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minidnn.arguments import choice
from minidnn.profile.profile import Link
from minidnn.units import GiB, MiB


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: rates in FLOP/s and bytes per second, memory in bytes; `sources` names the origin of each field."""

    name: str
    title: str
    peak: Mapping[str, float]
    memory_bytes: int
    bandwidth: float
    link: Link
    generation: str
    sources: Mapping[str, str]

    def rate(self, precision: str) -> float:
        """FLOP/s for arithmetic in that precision; where no matrix unit serves it, the fp32 rate."""
        return self.peak.get(precision, self.peak["fp32"])

    def has_matrix_units(self, precision: str) -> bool:
        """Whether the precision runs on matrix units."""
        return precision != "fp32" and precision in self.peak


_PCIE3 = "PCIe 3.0 x16, pinned memory: 12.2 to, 12.9 GB/s from a P100 (bandwidthTest, gearshifft pull request 82)"
_PCIE3_LINK = Link(d2h=12.9e9, h2d=12.2e9)
_PCIE4 = "PCIe 4.0 x16, measured peak with an A100 (BaM, Qureshi et al. 2023)"
_PCIE4_LINK = Link(d2h=25e9, h2d=25e9)
_PCIE5_LINK = Link(d2h=55e9, h2d=55e9)
_HOPPER = {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12}

_CARDS = (
    Gpu(
        "gtx970", "GeForce GTX 970", {"fp32": 3.92e12}, 4 * GiB, 224.4e9, _PCIE3_LINK, "cudnn7",
        {
            "peak": "1664 cores x 2 x 1.178 GHz (NVIDIA product page, GTX 970)",
            "memory_bytes": "NVIDIA product page, GTX 970 (the last 0.5 GiB are behind a slower path)",
            "bandwidth": "256 bit x 7.01 Gb/s (NVIDIA product page, GTX 970)",
            "link": _PCIE3,
        },
    ),
    Gpu(
        "gtx1080ti", "GeForce GTX 1080 Ti", {"fp32": 11.34e12}, 11264 * MiB, 484.4e9,
        _PCIE3_LINK, "cudnn7",
        {
            "peak": "3584 cores x 2 x 1.582 GHz (NVIDIA product page, GTX 1080 Ti)",
            "memory_bytes": "NVIDIA product page, GTX 1080 Ti",
            "bandwidth": "352 bit x 11.01 Gb/s (NVIDIA product page, GTX 1080 Ti)",
            "link": _PCIE3,
        },
    ),
    Gpu(
        "k40", "Tesla K40", {"fp32": 5.04e12}, 12 * GiB, 288e9, Link(d2h=10e9, h2d=10e9), "cudnn7",
        {
            "peak": "2880 cores x 2 x 0.875 GHz, GPU Boost (NVIDIA Tesla K40 board specification)",
            "memory_bytes": "NVIDIA Tesla K40 board specification",
            "bandwidth": "384 bit x 6 Gb/s (NVIDIA Tesla K40 board specification)",
            "link": "assumed: 63 % of PCIe 3.0 x16, as hosts of that time gave",
        },
    ),
    Gpu(
        "p100", "Tesla P100 SXM2", {"fp32": 10.6e12}, 16 * GiB, 732e9, _PCIE3_LINK, "cudnn7",
        {
            "peak": "NVIDIA Tesla P100 whitepaper, table 1",
            "memory_bytes": "NVIDIA Tesla P100 whitepaper, table 1",
            "bandwidth": "NVIDIA Tesla P100 data sheet",
            "link": _PCIE3,
        },
    ),
    Gpu(
        "v100", "Tesla V100 PCIe", {"fp32": 14e12}, 16 * GiB, 900e9, Link(d2h=12.5e9, h2d=12.5e9), "cudnn7",
        {
            "peak": "NVIDIA Tesla V100 data sheet (its matrix units take fp16 alone)",
            "memory_bytes": "NVIDIA Tesla V100 data sheet",
            "bandwidth": "NVIDIA Tesla V100 data sheet",
            "link": "measured with PyTorch on this card (Beaumont et al. 2020, experimental setting)",
        },
    ),
    Gpu(
        "rtx2080ti", "GeForce RTX 2080 Ti", {"fp32": 13.45e12}, 11264 * MiB, 616e9, Link(d2h=13e9, h2d=13e9), "cudnn7",
        {
            "peak": "4352 cores x 2 x 1.545 GHz (NVIDIA Turing whitepaper; its matrix units take fp16 alone)",
            "memory_bytes": "NVIDIA Turing whitepaper, table 1",
            "bandwidth": "NVIDIA Turing whitepaper, table 1",
            "link": "measured on this card (Chen 2020, AutoVM, hardware setup)",
        },
    ),
    Gpu(
        "t4", "T4", {"fp32": 8.1e12}, 16 * GiB, 320e9, _PCIE3_LINK, "cudnn7",
        {
            "peak": "NVIDIA T4 data sheet (its matrix units take fp16 alone)",
            "memory_bytes": "NVIDIA T4 data sheet",
            "bandwidth": "NVIDIA T4 data sheet",
            "link": _PCIE3,
        },
    ),
    Gpu(
        "a100", "A100 SXM4 40GB", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}, 40 * GiB, 1555e9,
        _PCIE4_LINK, "cudnn9",
        {
            "peak": "NVIDIA A100 data sheet, without sparsity",
            "memory_bytes": "NVIDIA A100 data sheet",
            "bandwidth": "NVIDIA A100 data sheet",
            "link": _PCIE4,
        },
    ),
    Gpu(
        "rtx3090", "GeForce RTX 3090", {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12}, 24 * GiB, 936e9,
        _PCIE4_LINK, "cudnn9",
        {
            "peak": "NVIDIA Ampere GA102 whitepaper, without sparsity, fp32 accumulators",
            "memory_bytes": "NVIDIA Ampere GA102 whitepaper",
            "bandwidth": "NVIDIA Ampere GA102 whitepaper",
            "link": _PCIE4,
        },
    ),
    Gpu(
        "rtx4090", "GeForce RTX 4090", {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12}, 24 * GiB, 1008e9,
        _PCIE4_LINK, "cudnn9",
        {
            "peak": "NVIDIA Ada GPU architecture whitepaper, without sparsity, fp32 accumulators",
            "memory_bytes": "NVIDIA Ada GPU architecture whitepaper",
            "bandwidth": "NVIDIA Ada GPU architecture whitepaper",
            "link": _PCIE4,
        },
    ),
    Gpu(
        "l4", "L4", {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12}, 24 * GiB, 300e9, _PCIE4_LINK, "cudnn9",
        {
            "peak": "NVIDIA L4 data sheet, half of what it has with sparsity",
            "memory_bytes": "NVIDIA L4 data sheet",
            "bandwidth": "NVIDIA L4 data sheet",
            "link": _PCIE4,
        },
    ),
    Gpu(
        "h100", "H100 SXM5 80GB", _HOPPER, 80 * GiB, 3350e9, _PCIE5_LINK, "cudnn9",
        {
            "peak": "NVIDIA H100 architecture whitepaper, without sparsity",
            "memory_bytes": "NVIDIA H100 data sheet",
            "bandwidth": "NVIDIA H100 data sheet",
            "link": "measured: 55 GB/s one way (both ways at once 45 GB/s each, which the model does not know)",
        },
    ),
    Gpu(
        "h200", "H200 SXM5 141GB", _HOPPER, 139 * GiB, 4800e9, _PCIE5_LINK, "cudnn9",
        {
            "peak": "as the H100, whose chip it has (NVIDIA H200 data sheet)",
            "memory_bytes": "NVIDIA H200 data sheet (141 GB, of 2^30 bytes), less what the driver keeps",
            "bandwidth": "NVIDIA H200 data sheet",
            "link": "measured: bench/results/modes-NVIDIA-H200.json, bytes over `out_ms` and `back_ms`",
        },
    ),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = MappingProxyType({card.name: card for card in _CARDS})
"""The cards by name."""


def named_gpu(name: str) -> Gpu:
    """The card called `name`. Raises ArgumentError with the names that exist."""
    return GPUS[choice(name, "gpu", GPUS)]
