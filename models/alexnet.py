"""AlexNet, twice: as the vDNN papers run it, and as torchvision has it."""

from __future__ import annotations

from math import prod

from minidnn import nn

Shape = tuple[int, int, int]


def alexnet(num_classes: int = 1000, input_shape: Shape = (3, 227, 227)) -> nn.Sequential:
    """AlexNet as the vDNN++ paper runs it: ungrouped, without normalization and dropout.

    X [N,3,227,227] -> logits [N,num_classes]. Krizhevsky et al. 2012 without the split over two GPUs. Children bear
    torchvision's names, so the classifier's numbers leave out its dropout layers.
    """
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 96, 11, stride=4), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
    )  # fmt: skip
    flat = prod(nn.Sequential({"features": features}).infer((1, *input_shape)))
    classifier = nn.Sequential({
        "1": nn.Linear(flat, 4096), "2": nn.ReLU(),
        "4": nn.Linear(4096, 4096), "5": nn.ReLU(),
        "6": nn.Linear(4096, num_classes),
    })  # fmt: skip
    children = {"features": features, "flatten": nn.Flatten(), "classifier": classifier}
    return nn.Sequential(children, input_shape=input_shape)


def alexnet_tv(num_classes: int = 1000, input_shape: Shape = (3, 224, 224), dropout: float = 0.5) -> nn.Sequential:
    """torchvision's AlexNet: the narrower one-GPU form with adaptive pooling and dropout; takes torchvision's weights.

    X [N,3,H,W], H and W 63 or more -> logits [N,num_classes]. Krizhevsky 2014, "One weird trick".
    """
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
    )  # fmt: skip
    classifier = nn.Sequential(
        nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, num_classes),
    )  # fmt: skip
    children = {
        "features": features, "avgpool": nn.AdaptiveAvgPool2d((6, 6)), "flatten": nn.Flatten(), "classifier": classifier
    }  # fmt: skip
    return nn.Sequential(children, input_shape=input_shape)
