"""A network small enough to train on a CPU while one waits."""

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
