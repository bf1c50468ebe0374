"""Graphs and made-up profiles for tests of the simulator, timelines and reports."""

from __future__ import annotations

import random

from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.models import resolve
from minidnn.profile.profile import Algorithm, Link, Profile, op_key


def graph_of(model: str, batch: int, target: Target = Target()) -> Graph:
    net = resolve(model)()
    assert net.input_shape is not None
    loss, optimizer = nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9)
    return build(net, loss, (batch, *net.input_shape), target, optimizer=optimizer)


def random_chain(rng: random.Random) -> Graph:
    """Up to ten convolutions and poolings of any width, then up to two linear layers."""
    channels, side = rng.choice((1, 3)), rng.choice((16, 24, 32))
    layers: list[nn.Layer] = []
    shape = (rng.choice((1, 4, 16)), channels, side, side)
    for _ in range(rng.randint(1, 10)):
        if rng.random() < 0.7 or side < 4:
            width = rng.choice((1, 2, 8, 16))
            kernel = rng.choice((1, 3, 5))
            layers += [nn.Conv2d(channels, width, kernel, padding=kernel // 2)]
            layers += [nn.ReLU()] if rng.random() < 0.7 else []
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    layers.append(nn.Flatten())
    features = channels * side * side
    if rng.random() < 0.5:
        layers += [nn.Linear(features, 8), nn.ReLU()]
        features = 8
    net = nn.Sequential(*layers, nn.Linear(features, 5))
    return build(net, nn.CrossEntropyLoss(), shape, optimizer=optim.SGD(0.1))


def random_profile(graph: Graph, rng: random.Random) -> Profile:
    """Any time from 0 to 20 ms for an op, now and then some workspace, any link."""
    entries = {}
    for op in graph.ops:
        ms = rng.choice((0.0, rng.random(), 20 * rng.random()))
        entries[op_key(graph, op)] = (Algorithm("any", rng.choice((0, 0, 3000)), ms),)
    rate = 10 ** rng.uniform(4, 9)
    link = Link(rate, rate * rng.choice((1, 0.5, 2)), rng.choice((0.0, 0.01, 0.3)))
    host_ms = rng.choice((0.0, 0.005, 0.2))
    return Profile("made up", entries, link, host_ms, host_ms)
