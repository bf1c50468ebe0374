"""torchvision's VGG-16 as far as its weights go: their names and shapes, in PyTorch's own layers."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the convolutions; 0 is a max-pool."""


def vgg16(weights: str | None = None) -> nn.Module:
    """A network with torchvision's names; whatever `weights` are asked for, they are drawn."""
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    classifier = nn.Sequential(
        nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 1000),
    )  # fmt: skip
    children = {"features": nn.Sequential(*layers), "avgpool": nn.AdaptiveAvgPool2d(7), "classifier": classifier}
    return nn.Sequential(OrderedDict(children))
