"""Each layer in front of the first weights, where no gradient of its input is needed, behind them, and as the last one
in front of the loss, as PyTorch trains it; and what each layer says of itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minidnn import nn, optim
from tests.host.test_parity import sgd
from tests.host.torch_reference import Reference, compare_runs, random_batches

LAYERS: dict[str, nn.Layer] = {
    "ReLU()": nn.ReLU(),
    "LeakyReLU(negative_slope=0.1)": nn.LeakyReLU(0.1),
    "Sigmoid()": nn.Sigmoid(),
    "Tanh()": nn.Tanh(),
    "Softmax()": nn.Softmax(),
    "LocalResponseNorm(3, alpha=0.1, beta=0.75, k=1.0)": nn.LocalResponseNorm(3, alpha=0.1),
    "MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), ceil_mode=False)": nn.MaxPool2d(2),
    "AvgPool2d(kernel_size=(2, 2), stride=(1, 1), padding=(1, 1), ceil_mode=False)": nn.AvgPool2d(2, 1, 1),
    "AdaptiveAvgPool2d(output_size=(3, 2))": nn.AdaptiveAvgPool2d((3, 2)),
}


@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_trains_as_in_pytorch_wherever_it_stands(name: str, first: bool, target: str) -> None:
    front = [LAYERS[name], nn.Conv2d(3, 4, 2)] if first else [nn.Conv2d(3, 4, 2), LAYERS[name]]
    size = nn.Sequential(*front, nn.Flatten()).infer((1, 3, 7, 6))[1]
    net = nn.Sequential(*front, nn.Flatten(), nn.Linear(size, 5)).initialize(4)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64")
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.05), reference, sgd(reference.module, lr=0.05),
        random_batches(2, 3, (3, 7, 6), 5), target=target,
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", "MSELoss"])
@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_in_pytorch_in_front_of_the_loss(name: str, target: str, loss: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), LAYERS[name], nn.Flatten()).initialize(4)
    outputs = net.infer((1, 3, 7, 6))[1]
    reference = Reference(net, getattr(torch.nn, loss)(), "fp64")
    batches = random_batches(2, 3, (3, 7, 6), outputs)
    if loss == "MSELoss":
        batches = [(x, x.reshape(3, -1)[:, :1] + np.arange(outputs, dtype=x.dtype)) for x, _ in batches]
    compare_runs(
        net, getattr(nn, loss)(), optim.SGD(0.05), reference, sgd(reference.module, lr=0.05), batches, target=target
    )


@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("last", [nn.ReLU(), nn.Sigmoid(), nn.Softmax()])
def test_logits_may_be_what_backward_reads_again(last: nn.Layer, target: str) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), last, input_shape=(6,)).initialize(4)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64")
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.05), reference, sgd(reference.module, lr=0.05),
        random_batches(2, 3, (6,), 4), target=target,
    )  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_says_what_it_is(name: str) -> None:
    assert repr(LAYERS[name]) == name
    assert repr(nn.Sequential({"part": LAYERS[name]})) == f"Sequential(\n  (part): {name}\n)"
