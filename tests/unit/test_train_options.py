"""Every option of `minidnn train` reaches the object that it is about."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from minidnn import nn, optim
from minidnn.cli import train
from minidnn.cli.options import Parser
from minidnn.errors import ArgumentError


def parse(*options: str) -> argparse.Namespace:
    parser = Parser(prog="train")
    train.add_arguments(parser)
    return parser.parse_args(["smallnet", "--data", "digits", "--device", "host", *options])


def test_sgd_options() -> None:
    options = ("--lr", "0.3", "--momentum", "0.8", "--nesterov", "--weight-decay", "0.01")
    assert train.optimizer(parse(*options), 10) == optim.SGD(0.3, 0.01, momentum=0.8, nesterov=True)
    assert train.optimizer(parse("--lr", "0"), 10) == optim.SGD(0.0, momentum=0.9)
    assert train.optimizer(parse(), 10) == optim.SGD(0.01, momentum=0.9)


def test_adam_options() -> None:
    assert train.optimizer(parse("--optimizer", "adam", "--lr", "0.3"), 10) == optim.Adam(0.3)
    assert train.optimizer(parse("--optimizer", "adam"), 10) == optim.Adam(0.001)
    found = train.optimizer(parse("--optimizer", "adamw", "--weight-decay", "0.1"), 10)
    assert found == optim.AdamW(0.001, weight_decay=0.1)


def test_schedules() -> None:
    assert train.learning_rate_schedule("constant", 10) is None
    assert train.learning_rate_schedule("cosine", 10) == optim.CosineLR(10)
    assert train.learning_rate_schedule("30:.5", 10) == optim.StepLR(30, 0.5)
    warm = train.optimizer(parse("--warmup", "4", "--schedule", "cosine"), 10).schedule
    assert warm == optim.WarmUp(4, optim.CosineLR(6))
    for text in ("linear", "10", "10:", "x:0.1", "10:x", "10:0.1:2"):
        with pytest.raises(ArgumentError, match="--schedule"):
            train.learning_rate_schedule(text, 10)


def test_trainer_options() -> None:
    args = parse(
        "--batch", "32", "--micro-batch", "8", "--seed", "5", "--clip", "2", "--label-smoothing", "0.1",
        "--memory", "vdnn:conv(m)", "--budget", "64MiB", "--precision", "bf16", "--target", "native",
        "--order", "derivative-first", "--fit", "first-fit",
    )  # fmt: skip
    net, data = train.network_and_data(args)
    with train.trainer_for(args, net, data) as trainer:
        recipe = trainer.programs.recipe
        assert (trainer.batch, trainer.micro_batch, trainer.seed) == (32, 8, 5)
        assert recipe.max_norm == 2
        assert isinstance(recipe.loss, nn.CrossEntropyLoss)
        assert recipe.loss.label_smoothing == 0.1
        assert str(recipe.mode) == "vdnn:conv(m)"
        assert (recipe.target.name, recipe.target.precision) == ("native", "bf16")
        options = recipe.options
        assert (options.order, options.fit, options.placement) == ("derivative-first", "first-fit", "planned")
        assert options.budget == 64 * 2**20


def test_live_placement_reaches_the_trainer() -> None:
    args = parse("--memory", "vdnn:all(m)", "--placement", "live")
    with train.trainer_for(args, *train.network_and_data(args)) as trainer:
        assert trainer.programs.recipe.options.placement == "live"


def test_length_of_a_run() -> None:
    _, data = train.network_and_data(parse())
    assert len(data.train) == 1437
    assert train.epochs_for(parse("--batch", "100", "--steps", "15"), data) == 1
    assert train.epochs_for(parse("--batch", "100", "--steps", "16"), data) == 2
    assert train.epochs_for(parse("--epochs", "3"), data) == 3
    assert train.epochs_for(parse(), data) == 1


def test_checkpoints_of_a_resumed_run_stay_together(tmp_path: Path) -> None:
    step = tmp_path / "step-00000003"
    step.mkdir()
    (step / "state.json").write_text("{}")
    assert train.checkpoint_folder(parse()) is None
    assert train.checkpoint_folder(parse("--checkpoint", "a", "--resume", "b")) == Path("a")
    assert train.checkpoint_folder(parse("--resume", str(tmp_path))) == tmp_path
    assert train.checkpoint_folder(parse("--resume", str(step))) == tmp_path


def test_network_takes_the_classes_of_the_data_and_invented_data_those_of_the_network() -> None:
    net, data = train.network_and_data(parse("--data", "synthetic", "--input", "3x16x12"))
    assert (data.classes, data.input_shape, net.infer((1, 3, 16, 12))) == (10, (3, 16, 12), (1, 10))
    net, data = train.network_and_data(parse("--data", "synthetic:classes=4,length=9"))
    assert (data.classes, len(data.train), net.infer((1, 1, 8, 8))) == (4, 9, (1, 4))
