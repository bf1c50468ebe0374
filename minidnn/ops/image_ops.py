"""What makes the first convolution's images fit for tensor cores: more channels, or their windows laid out as channels.

Every function binds one op and returns the launch.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32
from dataclasses import replace

from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import BLOCK, THREADS, FastDiv, Launcher, Split, Strides, blocks, image_grid, u32
from minidnn.ops.map_ops import layout
from minidnn.ops.plans import Padding, Pair

IMAGES = 4
"""So many images share the arithmetic of where a window's values lie."""


class Taps(ctypes.Structure):
    """Geometry of the windows, as in image.cu."""

    _fields_ = (
        *((name, c_int32) for name in ("H", "W", "taps", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
                                       "dilation_w")),
        ("C", FastDiv), ("S", FastDiv),
    )  # fmt: skip


def unfold(
    on: Context, *, x: Array, y: Array, kernel: Pair, stride: Pair, padding: Padding, dilation: Pair
) -> Launcher:
    """Y [N,channels,P,Q], channels innermost: each window of X [N,C,H,W], its R * S * C values in the order of a weight
    that has its channels innermost, and zeros behind them."""
    n, c, h, w = x.shape4
    _, channels, p, q = y.shape4
    width = 16 // x.itemsize
    (r, s), packs = kernel, channels // width
    geometry = Taps(
        h, w, r * s * c, *stride, padding[0][0], padding[1][0], *dilation, FastDiv(c), FastDiv(s)
    )  # fmt: skip
    count = packs * p * q
    return on.bind(
        "image", f"unfold_{x.code}", image_grid(count, blocks(n, IMAGES)), BLOCK,
        x, y, n, geometry, Split(packs, q), u32(count), Strides(x),
    )  # fmt: skip


def pad_channels(on: Context, *, x: Array, y: Array) -> Launcher:
    """Y = X and zeros behind its channels; Y has as many as 16 bytes hold, both have them innermost."""
    pixels = y.size // y.shape4[1]
    grid = (blocks(pixels, 4 * THREADS), 1, 1)
    return on.bind("image", f"pad_channels_{x.code}", grid, BLOCK, x, y, u32(pixels), x.shape4[1])


def cut_channels(on: Context, *, x: Array, y: Array) -> Launcher:
    """Y = the first channels of X, as many as Y has."""
    return layout(on, x=replace(x, shape=y.shape), y=y)
