"""Whole networks against PyTorch: the same names, logits, losses, gradients and weights after some steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minidnn import Trainer, nn, optim
from minidnn.models import resolve
from tests.host.torch_reference import Reference, compare_runs, difference, random_batches, to_torch

TARGETS = ("paper", "native")


def mixed(classes: int = 5) -> nn.Sequential:
    """One of each layer that the large networks lack, on 2x13x11 images."""
    return nn.Sequential(
        {
            "stem": nn.Sequential(
                nn.Conv2d(2, 6, (3, 5), padding="same", bias=False), nn.BatchNorm2d(6), nn.ReLU(),
                nn.Conv2d(6, 9, 3, stride=2, padding=2, dilation=2, groups=3), nn.LocalResponseNorm(4, 0.1, 0.6, 1.5),
                nn.LeakyReLU(0.2), nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            ),
            "head": nn.Sequential(
                nn.Conv2d(9, 8, 1), nn.Tanh(), nn.AvgPool2d(2, 1, 1, count_include_pad=False), nn.Conv2d(8, 8, 2),
                nn.BatchNorm2d(8), nn.Sigmoid(), nn.AdaptiveAvgPool2d((3, 2)),
            ),
            "flatten": nn.Flatten(),
            "out": nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, classes)),
        },
        input_shape=(2, 13, 11),
    )  # fmt: skip


def plain(classes: int = 5) -> nn.Sequential:
    """Without batch normalization: a batch is the sum of its parts."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(12 * 2 * 3, classes), input_shape=(3, 8, 10),
    )  # fmt: skip


def sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), **options)


@pytest.mark.parametrize(
    ("model", "shape", "target", "precision"),
    [
        ("alexnet", (3, 67, 67), "paper", "fp32"), ("vgg11", (3, 32, 32), "native", "fp32"),
        ("vgg11_bn", (3, 32, 32), "paper", "fp64"), ("vgg11_bn", (3, 32, 32), "native", "fp64"),
    ],
)  # fmt: skip
def test_a_large_network_trains_as_in_pytorch(
    model: str, shape: tuple[int, ...], target: str, precision: str
) -> None:
    """Many batch-norms in a row make the sign of a value near zero a matter of rounding, and with it which way a ReLU
    or a window's maximum goes: on some processors the gradients of fp32 then differ by a percent. In fp64 they do not.
    """
    net = resolve(model)(num_classes=7, input_shape=shape).initialize(3)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), precision)
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.01, momentum=0.9, weight_decay=5e-4), reference,
        sgd(reference.module, lr=0.01, momentum=0.9, weight_decay=5e-4), random_batches(3, 3, shape, 7), target=target,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "shape"), [("alexnet", (3, 67, 67)), ("vgg11", (3, 32, 32))])
def test_adam_in_double_precision_agrees_over_whole_networks(model: str, shape: tuple[int, ...]) -> None:
    net = resolve(model)(num_classes=6, input_shape=shape).initialize(1)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64")
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.Adam(lr=1e-3, weight_decay=0.01), reference,
        torch.optim.Adam(reference.module.parameters(), lr=1e-3, weight_decay=0.01),
        random_batches(2, 2, shape, 6),
    )  # fmt: skip


OPTIMIZERS = {
    "sgd": (optim.SGD(0.05), {"cls": torch.optim.SGD, "lr": 0.05}),
    "nesterov": (
        optim.SGD(0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        {"cls": torch.optim.SGD, "lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    "dampening": (
        optim.SGD(0.05, momentum=0.8, dampening=0.3),
        {"cls": torch.optim.SGD, "lr": 0.05, "momentum": 0.8, "dampening": 0.3},
    ),
    "adamw": (
        optim.AdamW(0.01, betas=(0.8, 0.95), eps=1e-6),
        {"cls": torch.optim.AdamW, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_and_optimizer_agrees_in_double_precision(name: str, target: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    net = mixed().initialize(2)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64")
    options = dict(options)
    compare_runs(
        net, nn.CrossEntropyLoss(), optimizer, reference, options.pop("cls")(reference.module.parameters(), **options),
        random_batches(4, 6, (2, 13, 11), 5), target=target,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_agrees_in_single_precision(target: str) -> None:
    net = mixed().initialize(5)
    reference = Reference(net, torch.nn.CrossEntropyLoss())
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.02, momentum=0.9), reference,
        sgd(reference.module, lr=0.02, momentum=0.9), random_batches(3, 6, (2, 13, 11), 5), target=target,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_weights_and_smoothing_agrees(smoothing: float, weighted: bool) -> None:
    weight = np.array([0.5, 2.0, 0.0, 1.0, 3.0], np.float32) if weighted else None
    torch_weight = None if weight is None else torch.from_numpy(weight)
    net = plain().initialize(4)
    reference = Reference(net, torch.nn.CrossEntropyLoss(torch_weight, label_smoothing=smoothing), "fp64")
    compare_runs(
        net, nn.CrossEntropyLoss(weight, smoothing), optim.SGD(0.05), reference, sgd(reference.module, lr=0.05),
        random_batches(3, 8, (3, 8, 10), 5),
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_a_network_may_end_in_flatten(size: int) -> None:
    layers = [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(size), nn.Flatten()]
    net = nn.Sequential(*layers, input_shape=(3, 8, 10)).initialize(4)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64")
    batches = random_batches(3, 5, (3, 8, 10), 5 * size**2)
    compare_runs(net, nn.CrossEntropyLoss(), optim.SGD(0.05), reference, sgd(reference.module, lr=0.05), batches)
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.05), 4, device="host") as trainer:
        assert trainer.predict(batches[0][0]).shape == (5, 5 * size**2)


def test_a_network_that_ends_in_dropout_predicts() -> None:
    """Its last op of training is none of inference."""
    net = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), input_shape=(5,)).initialize(1)
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    w, b = (net.state_dict()[f"0.{name}"] for name in ("weight", "bias"))
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1), 3, device="host") as trainer:
        np.testing.assert_allclose(trainer.predict(x), x @ w.T + b, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_mean_squared_error_agrees(precision: str) -> None:
    net = nn.Sequential(plain(4)[:-2], nn.Tanh(), nn.Conv2d(12, 3, 1), input_shape=(3, 8, 10)).initialize(0)
    rng = np.random.default_rng(0)
    batches = [
        tuple(rng.standard_normal((4, 3, *size)).astype(np.float32) for size in ((8, 10), (2, 3))) for _ in range(3)
    ]
    reference = Reference(net, torch.nn.MSELoss(), precision)
    compare_runs(net, nn.MSELoss(), optim.SGD(0.1), reference, sgd(reference.module, lr=0.1), batches)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_is_that_of_clip_grad_norm(max_norm: float) -> None:
    net = plain().initialize(4)
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64", max_norm)
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.5, momentum=0.9), reference,
        sgd(reference.module, lr=0.5, momentum=0.9), random_batches(3, 8, (3, 8, 10), 5),
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "micro"), [(8, 4), (8, 2), (7, 3), (5, 1)])
def test_micro_batches_accumulate_as_in_pytorch(rows: int, micro: int, target: str) -> None:
    net = plain().initialize(4)
    parts = [slice(start, start + micro) for start in range(0, rows, micro)]
    reference = Reference(net, torch.nn.CrossEntropyLoss(), "fp64", 0.5, parts)
    compare_runs(
        net, nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9), reference,
        sgd(reference.module, lr=0.1, momentum=0.9), random_batches(3, rows, (3, 8, 10), 5),
        micro_batch=micro, target=target,
    )  # fmt: skip


def test_micro_batches_with_class_weights_give_the_whole_batch_s_gradient() -> None:
    """PyTorch's usual accumulation would weigh each part's mean alike; here the parts add up to the whole batch."""
    loss = nn.CrossEntropyLoss([0.5, 2.0, 0.0, 1.0, 3.0])
    ((x, y),) = random_batches(1, 8, (3, 8, 10), 5)
    found = {}
    for micro in (8, 3, 2):
        with Trainer(
            plain().initialize(4), loss, optim.SGD(0.1), 8, micro_batch=micro, device="host", precision="fp64"
        ) as trainer:
            observer = trainer.observe_gradients()
            found[micro] = (trainer.step(x, y).loss, observer.gradients)
    for micro in (3, 2):
        assert abs(found[micro][0] - found[8][0]) < 1e-12
        for name, gradient in found[8][1].items():
            assert difference(found[micro][1][name], gradient) < 1e-12


@pytest.mark.parametrize(("model", "shape"), [("vgg11_bn:tv=true", (3, 32, 32)), ("alexnet_tv", (3, 64, 79))])
def test_pytorch_weights_load_by_name_and_give_the_same_logits(model: str, shape: tuple[int, ...]) -> None:
    net = resolve(model)(num_classes=6, input_shape=shape)
    module = to_torch(net)
    with torch.no_grad():
        for name, value in module.state_dict().items():  # statistics too, so that their names matter
            value.copy_(value + 0.1 if "running" in name else value)
    net.load_state_dict(module.state_dict())
    ((x, _),) = random_batches(1, 5, shape, 6)
    module.eval()
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(0.1), 2, device="host") as trainer, torch.no_grad():
        assert difference(trainer.predict(x), module(torch.from_numpy(x))) < 1e-5
