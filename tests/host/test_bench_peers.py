"""The out-of-core ways of PyTorch that bench/peers.py measures compute what plain PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.offload import OWN, OffloadActivations, flat, way_of
from bench.peers import OUT_OF_CORE, main


def network() -> Any:
    """A chain with in-place ReLUs, pooling and dropout, like torchvision's."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(8, 8, 3, padding=1),
        torch.nn.ReLU(inplace=True), torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 4, 3), torch.nn.ReLU(inplace=True),
        torch.nn.AdaptiveAvgPool2d(5), torch.nn.Flatten(), torch.nn.Linear(100, 50), torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(), torch.nn.Linear(50, 10),
    )  # fmt: skip


def gradients(net: Any, way: str, steps: int = 2) -> list[Any]:
    """Of the last of some steps; dropout draws the same bits every time."""
    chosen = way_of(way, net) if way else None
    for step in range(steps):
        torch.manual_seed(step)
        x, y = torch.rand(16, 3, 14, 14), torch.randint(0, 10, (16,))
        net.zero_grad()
        if chosen is None:
            torch.nn.functional.cross_entropy(net(x), y).backward()
        else:
            with chosen.around():
                loss = torch.nn.functional.cross_entropy(chosen.forward(x), y)
            loss.backward()
            chosen.after()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    "way",
    ["save_on_cpu", "save_on_cpu 50%", "OffloadActivations 1", "OffloadActivations 5", "OffloadActivations 100",
     "checkpoint 2", "checkpoint 8", "checkpoint 100"],
)  # fmt: skip
def test_gradients_are_those_of_plain_pytorch(way: str) -> None:
    wanted, found = gradients(network(), ""), gradients(network(), way)
    assert all((a == b).all() for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("keep", [1, 3, 100])
def test_each_activation_is_copied_once_and_none_is_left(keep: int) -> None:
    net = network()
    own = OffloadActivations(net.parameters(), keep)
    x = torch.rand(16, 3, 14, 14)
    with own:
        loss = net(x).sum()
    assert len(own._kept) <= keep
    # The input, two ReLUs of 8 x 14 x 14 and one of 4 x 5 x 5, the pool's output with its int64 indices, the flat
    # features (a view of what the adaptive pool made), the hidden layer, dropout's output and its mask.
    floats = 16 * (3 * 14 * 14 + 2 * 8 * 14 * 14 + 8 * 7 * 7 + 4 * 5 * 5 + 4 * 5 * 5 + 50 + 50)
    indices = 16 * 8 * 7 * 7 * 8
    assert 4 * floats + indices <= own.offloaded_bytes <= 4 * floats + indices + 4 * 16 * 50
    loss.backward()
    own.finish()
    assert not own._kept
    assert not own._leaving


def test_the_row_says_whose_offloading_it_was() -> None:
    assert way_of("OffloadActivations 5", network()).about == OWN


def test_torchvisions_networks_become_chains() -> None:
    class Net(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
            self.avgpool = torch.nn.AdaptiveAvgPool2d(2)
            self.classifier = torch.nn.Sequential(torch.nn.Linear(16, 5))

    net = Net()
    x = torch.rand(2, 3, 6, 6)
    wanted = net.classifier(torch.flatten(net.avgpool(net.features(x)), 1))
    assert (flat(net)(x) == wanted).all()


def test_every_peer_has_a_name_and_the_help_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(name in said for name in OUT_OF_CORE)
    for name in OUT_OF_CORE:
        if "compile" not in name:
            way_of(name.removeprefix("torch "), network())


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no way 'zip 3'"):
        way_of("zip 3", network())
