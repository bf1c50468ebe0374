"""The network that the vDNN++ paper constructs to show its gain (table III)."""

from __future__ import annotations

from minidnn import nn
from minidnn.errors import ArgumentError

MOST_REPEATS = 1000
"""Far more than the paper's; nothing would stop the building of a network of billions of layers."""


def table3(
    num_classes: int = 2, input_shape: tuple[int, int, int] = (3, 224, 224), repeats: int = 5
) -> nn.Sequential:
    """vDNN++'s constructed network: fast 1x1 convolutions between slow 5x5 ones, all on 64 full-size channels.

    X [N,3,H,W] -> logits [N,num_classes]. ReLU follows each convolution; the max-pool covers the whole image.
    """
    if repeats not in range(MOST_REPEATS + 1):
        raise ArgumentError(f"repeats is {repeats!r}; it must be 0 to {MOST_REPEATS} pairs of convolutions")
    layers: list[nn.Layer] = [nn.Conv2d(input_shape[0], 64, 3, padding=1), nn.ReLU()]
    for _ in range(repeats):
        layers += [nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 5, padding=2), nn.ReLU()]
    layers += [nn.MaxPool2d(input_shape[1:]), nn.Conv2d(64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3, num_classes)]
    return nn.Sequential(*layers, input_shape=input_shape)
