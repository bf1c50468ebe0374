"""Networks small enough to train on a CPU while one waits."""

from __future__ import annotations

from math import prod

from minidnn import nn


def smallnet(num_classes: int = 10, input_shape: tuple[int, int, int] = (1, 8, 8), width: int = 32) -> nn.Sequential:
    """Three convolutions with batch normalization and one linear layer, made for 8x8 digits.

    X [N,C,H,W], H and W 4 or more -> logits [N,num_classes].
    """
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    classifier = nn.Linear(prod(nn.Sequential({"features": features}).infer((1, *input_shape))), num_classes)
    children = {"features": features, "flatten": nn.Flatten(), "classifier": classifier}
    net = nn.Sequential(children, input_shape=input_shape)
    nn.init.he(net)
    return net


def smallvgg(num_classes: int = 10, input_shape: tuple[int, int, int] = (1, 8, 8), width: int = 16) -> nn.Sequential:
    """VGG's pattern in three groups (2, 2, 3 convolutions, doubling widths), to compare memory modes on 8x8 digits.

    X [N,C,H,W], H and W 8 or more -> logits [N,num_classes].
    """
    layers: list[nn.Layer] = []
    channels = input_shape[0]
    for group, count in enumerate((2, 2, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width << group, 3, padding=1), nn.ReLU()]
            channels = width << group
        layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    flat = prod(nn.Sequential({"features": features}).infer((1, *input_shape)))
    classifier = nn.Sequential(nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, num_classes))
    children = {"features": features, "flatten": nn.Flatten(), "classifier": classifier}
    net = nn.Sequential(children, input_shape=input_shape)
    nn.init.he(net)
    return net
