"""VGG (Simonyan and Zisserman 2015), as published and as the memory papers deepen it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from minidnn import nn
from minidnn.errors import ArgumentError

Shape = tuple[int, int, int]

WIDTHS = (64, 128, 256, 512, 512)
"""Channels of the five groups of convolutions; a 2x2 max-pool ends each group."""
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions per group by the number of weighted layers: configurations A, B, D, E of the paper."""
MOST_EXTRA = 1000
"""Thirty times what the papers have; nothing would stop the building of a network of billions of layers."""


def vgg(
    depth: int = 16, extra: int = 0, batch_norm: bool = False, num_classes: int = 1000,
    input_shape: Shape = (3, 224, 224), tv: bool = False, dropout: float = 0.5,
) -> nn.Sequential:  # fmt: skip
    """VGG with `depth` 11, 13, 16 or 19 weighted layers, and `extra` more convolutions in each of the five groups.

    X [N,3,H,W], H and W 32 or more -> logits [N,num_classes]. As in the vDNN papers there is neither adaptive pooling
    nor dropout; `tv=True` adds torchvision's. Children bear torchvision's names and take its weights either way.
    """
    if depth not in DEPTHS:
        raise ArgumentError(f"depth is {depth!r}; VGG has 11, 13, 16 or 19 (see extra for deeper ones)")
    if extra not in range(MOST_EXTRA + 1):
        raise ArgumentError(f"extra is {extra!r}; it must be 0 to {MOST_EXTRA} more convolutions per group")
    counts = tuple(count + extra for count in DEPTHS[depth])
    return _vgg(counts, batch_norm, num_classes, input_shape, tv, dropout)


def vgg101(
    num_classes: int = 1000, input_shape: Shape = (3, 224, 224), tv: bool = False, dropout: float = 0.5
) -> nn.Sequential:
    """moDNN's VGG-101: VGG-19 with more convolutions, 98 instead of 16, in the same proportion.

    The moDNN paper (section 7) gives the number of layers and, at batch 128, nearly 100 GB of data; of the two natural
    readings only the proportional one needs that much (the same number more in every group needs a fifth more).
    """
    return _vgg((12, 12, 24, 25, 25), False, num_classes, input_shape, tv, dropout)


def _vgg(
    counts: tuple[int, ...], batch_norm: bool, num_classes: int, input_shape: Shape, tv: bool, dropout: float
) -> nn.Sequential:
    layers: list[nn.Layer] = []
    channels = input_shape[0]
    for count, width in zip(counts, WIDTHS, strict=True):
        for _ in range(count):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.MaxPool2d(2))
    children: dict[str, nn.Layer] = {"features": nn.Sequential(*layers)}
    if tv:
        children["avgpool"] = nn.AdaptiveAvgPool2d((7, 7))
    features = prod(nn.Sequential(children).infer((1, *input_shape)))
    children |= {"flatten": nn.Flatten(), "classifier": _classifier(features, num_classes, dropout if tv else None)}
    net = nn.Sequential(children, input_shape=input_shape)
    nn.init.vgg(net)
    return net


def _classifier(features: int, num_classes: int, dropout: float | None) -> nn.Sequential:
    """Three linear layers under torchvision's numbers, which count the dropout layers whether or not they are there."""
    layers = {
        "0": nn.Linear(features, 4096), "1": nn.ReLU(), "2": None if dropout is None else nn.Dropout(dropout),
        "3": nn.Linear(4096, 4096), "4": nn.ReLU(), "5": None if dropout is None else nn.Dropout(dropout),
        "6": nn.Linear(4096, num_classes),
    }  # fmt: skip
    return nn.Sequential({name: layer for name, layer in layers.items() if layer is not None})


def _variant(about: str, depth: int, extra: int = 0, batch_norm: bool = False) -> Callable[..., nn.Sequential]:
    factory = partial(vgg, depth, extra, batch_norm)
    factory.__doc__ = about
    return factory


VARIANTS: dict[str, Callable[..., nn.Sequential]] = {
    "vgg": vgg,
    **{f"vgg{depth}": _variant(f"VGG with {depth} weighted layers.", depth) for depth in DEPTHS},
    **{
        f"vgg{depth}_bn": _variant(f"VGG with {depth} weighted layers and batch normalization.", depth, batch_norm=True)
        for depth in DEPTHS
    },
    "vgg101": vgg101,
    "vgg116": _variant("VGG-16 with 20 more convolutions in each group (vDNN++, section V-A).", 16, 20),
    "vgg191": _variant("VGG-16 with 35 more convolutions in each group (vDNN++, section V-A).", 16, 35),
}
