"""What a user writes: layers with PyTorch's names, arguments and defaults, losses and initializers. No device code."""

from minidnn.nn import init
from minidnn.nn.activation import LeakyReLU, ReLU, Sigmoid, Softmax, Tanh
from minidnn.nn.conv import Conv2d
from minidnn.nn.layer import Layer, Parameter
from minidnn.nn.linear import Flatten, Linear
from minidnn.nn.loss import CrossEntropyLoss, Loss, MSELoss
from minidnn.nn.normalization import BatchNorm2d, Dropout, LocalResponseNorm
from minidnn.nn.pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from minidnn.nn.sequential import Sequential

__all__ = [
    "AdaptiveAvgPool2d", "AvgPool2d", "BatchNorm2d", "Conv2d", "CrossEntropyLoss", "Dropout", "Flatten", "Layer",
    "LeakyReLU", "Linear", "LocalResponseNorm", "Loss", "MSELoss", "MaxPool2d", "Parameter", "ReLU", "Sequential",
    "Sigmoid", "Softmax", "Tanh", "init",
]  # fmt: skip
