"""Figures as printed in the vDNN++ paper, in its MB (2^20 bytes); the rows that need no GPU (memory-optimal, `m`)."""

from __future__ import annotations

POOL_COLUMNS = (
    ("prefetch-first", "best-fit"),
    ("derivative-first", "best-fit"),
    ("prefetch-first", "high-end"),
    ("derivative-first", "high-end"),
)

# (network, offload set) -> aggregate peak, then the pools of POOL_COLUMNS; parameters are part of every number
TABLE_V = {
    ("AlexNet(256)", "conv"): (1184, (1452, 1476, 1427, 1465)),
    ("AlexNet(256)", "all"): (1100, (1375, 1361, 1570, 1362)),
    ("AlexNet(256)", "aconv"): (1184, (1374, 1379, 1472, 1534)),
    ("VGG-16(64)", "conv"): (3715, (4302, 4107, 4106, 3751)),
    ("VGG-16(64)", "all"): (3715, (3812, 4795, 3812, 4795)),
    ("VGG-16(64)", "aconv"): (4010, (4155, 4073, 4302, 4106)),
}

# (network, offload set) -> expected, actual
TABLE_II = {
    ("AlexNet(128)", "conv"): (710, 1121),
    ("AlexNet(128)", "all"): (667, 987),
    ("VGG-16(16)", "conv"): (1323, 1893),
    ("VGG-16(16)", "all"): (1323, 1697),
}

# section III-C, batch 128
PINNED = {"AlexNet(128)": 453, "VGG-16(128)": 7436}
