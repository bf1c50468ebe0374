"""`minidnn train MODEL`: train on a data set, evaluate, save."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from minidnn import checkpoint, nn, optim
from minidnn.cli.options import (
    Console,
    add_model,
    add_planning,
    appended,
    count,
    natural,
    number,
    path,
    seed,
    source,
)
from minidnn.data import Data, batch_count, open_data
from minidnn.errors import ArgumentError
from minidnn.models import create
from minidnn.run.loop import FitResult
from minidnn.run.trainer import Trainer
from minidnn.units import format_size

EXAMPLE = "minidnn train smallnet --data digits --batch 32 --epochs 10 --lr 0.05 --schedule cosine"

DATA_HELP = """digits, synthetic[:classes=10,length=512], a .npz file, or a directory of images by class, of IDX, CIFAR
    or .npy files (default: synthetic, with the model's own number of classes)"""
MICRO_BATCH_HELP = """compute so many images at a time, sum the gradients and update once a batch (default: the whole
    batch)"""
MODE_HELP = """memory mode: base, keep, best (plans for the budget) or another planner, or vdnn or vdnn++ with an
    offload set and (p), (m) or (g), such as 'vdnn++:conv(p)' (default: base)"""
SCHEDULE_HELP = """of the learning rate: constant, cosine (to 0 at the end of the run), or EVERY:FACTOR, such as
    1000:0.1 for a tenth each 1000 steps (default: constant)"""
WEIGHTS_HELP = "start from a safetensors file, such as torchvision's"
RESUME_HELP = """go on from the newest checkpoint in DIR, exactly where the other options are the same; further ones
    are saved there too, unless --checkpoint says otherwise"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and what decides data, length, optimizer, memory and files of a run."""
    add_model(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--data", type=source, default="synthetic", metavar="D", help=DATA_HELP)
    run.add_argument("--batch", type=count, default=64, metavar="N", help="images in a batch (default: 64)")
    run.add_argument("--micro-batch", type=count, metavar="N", help=MICRO_BATCH_HELP)
    length = run.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=count, metavar="E", help="passes over the data (default: 1)")
    length.add_argument("--steps", type=count, metavar="S", help="updates in all, instead of epochs")
    run.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, order, dropout (default: 0)")
    run.add_argument("--device", default="auto", metavar="D", help="auto, host, cuda or cuda:1 (default: auto)")
    run.add_argument("--deterministic", action="store_true", help="use deterministic CUDA algorithms alone")
    run.add_argument("--graph", action="store_true", help="issue iterations as CUDA graphs (base, keep and planners)")
    add_optimizer(parser.add_argument_group("optimizer"))
    memory = add_planning(parser)
    memory.add_argument("--memory", default="base", metavar="MODE", help=MODE_HELP)
    files = parser.add_argument_group("files")
    files.add_argument("--weights", type=path, metavar="FILE", help=WEIGHTS_HELP)
    files.add_argument("--checkpoint", type=path, metavar="DIR", help="save here after each epoch and after Ctrl-C")
    files.add_argument("--checkpoint-every", type=count, metavar="S", help="save after so many steps too")
    files.add_argument("--resume", type=path, metavar="DIR", help=RESUME_HELP)
    files.add_argument("--log", type=appended, metavar="FILE", help="append one JSON object per step and epoch")


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    """The optimizer, its learning rate and the rest of its numbers."""
    group.add_argument("--optimizer", default="sgd", choices=("sgd", "adam", "adamw"), help="(default: sgd)")
    group.add_argument("--lr", type=number(0), metavar="X", help="learning rate (default: 0.01, Adam 0.001)")
    group.add_argument("--momentum", type=number(0), metavar="X", help="of sgd (default: 0.9)")
    group.add_argument("--nesterov", action="store_true", help="Nesterov's momentum")
    group.add_argument("--weight-decay", type=number(0), default=0.0, metavar="X", help="(default: 0)")
    group.add_argument("--schedule", default="constant", metavar="S", help=SCHEDULE_HELP)
    group.add_argument("--warmup", type=natural, default=0, metavar="S", help="steps of linear warm-up (default: 0)")
    group.add_argument("--clip", type=number(0, above=True), metavar="NORM", help="limit the norm of the gradients")
    group.add_argument("--label-smoothing", type=number(0), default=0.0, metavar="X", help="(default: 0)")


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Train; print and return what came of it. The exit code is 130 after Ctrl-C."""
    net, data = network_and_data(args)
    if args.checkpoint_every is not None and args.checkpoint is None and args.resume is None:
        raise ArgumentError("--checkpoint-every needs --checkpoint DIR")
    if args.weights is not None and args.resume is not None:
        raise ArgumentError("--weights and --resume both say how the network starts; give one of them")
    if args.weights is not None:
        net.load_state_dict(checkpoint.read_weights(Path(args.weights)))
    with trainer_for(args, net, data) as trainer:
        with finishing_on_interrupt(trainer):
            result = trainer.fit(
                data, epochs_for(args, data), steps=args.steps, log=args.log, checkpoint=checkpoint_folder(args),
                checkpoint_every=args.checkpoint_every, resume=args.resume, progress=console.progress,
                on_begin=lambda: console.say(describe(args, trainer, data)),
                on_epoch=lambda epoch, metrics: console.say(f"epoch {epoch:3}  {format_metrics(metrics)}"),
            )  # fmt: skip
        metrics = dict(result.metrics)
        if "test_loss" not in metrics and data.test is not None and not result.interrupted:
            metrics |= trainer.evaluate(data)
        report = outcome(args, trainer, result, metrics)
    console.say(conclusion(report))
    console.exit_code = 130 if result.interrupted else 0
    return report


def network_and_data(args: argparse.Namespace) -> tuple[nn.Sequential, Data]:
    """The network and the data, with the data's classes and the network's (or `--input`'s) shape."""
    shape = args.input or create(args.model).input_shape
    spec = args.data
    if spec.partition(":")[0] == "synthetic" and "classes=" not in spec and shape is not None:
        # Invented data suit any network: as many classes as it tells apart by itself.
        classes = create(args.model, input_shape=args.input).infer((1, *shape))[-1]
        spec += f"{',' if ':' in spec else ':'}classes={classes}"
    data = open_data(spec, input_shape=shape, seed=args.seed)
    return create(args.model, num_classes=data.classes, input_shape=args.input), data


def trainer_for(args: argparse.Namespace, net: nn.Sequential, data: Data) -> Trainer:
    """The trainer that the options describe."""
    steps = args.steps or epochs_for(args, data) * batch_count(len(data.train), args.batch)
    return Trainer(
        net, nn.CrossEntropyLoss(label_smoothing=args.label_smoothing), optimizer(args, steps), args.batch,
        memory=args.memory, budget=args.budget, device=args.device, precision=args.precision, target=args.target,
        order=args.order, fit=args.fit, placement=args.placement, micro_batch=args.micro_batch, max_norm=args.clip,
        seed=args.seed, input_shape=data.input_shape, deterministic=args.deterministic, graph=args.graph,
        compress=args.compress,
    )  # fmt: skip


def optimizer(args: argparse.Namespace, steps: int) -> optim.Optimizer:
    """The optimizer that the options describe, for a run of so many steps."""
    if args.optimizer != "sgd" and (args.nesterov or args.momentum is not None):
        option = "--nesterov" if args.nesterov else "--momentum"
        raise ArgumentError(f"{option} goes with --optimizer sgd; --optimizer is {args.optimizer}")
    schedule = learning_rate_schedule(args.schedule, steps - args.warmup)
    if args.warmup:
        schedule = optim.WarmUp(args.warmup, schedule)
    if args.optimizer == "sgd":
        return optim.SGD(
            0.01 if args.lr is None else args.lr, momentum=0.9 if args.momentum is None else args.momentum,
            nesterov=args.nesterov, weight_decay=args.weight_decay, schedule=schedule,
        )  # fmt: skip
    kind = optim.Adam if args.optimizer == "adam" else optim.AdamW
    return kind(0.001 if args.lr is None else args.lr, weight_decay=args.weight_decay, schedule=schedule)


def learning_rate_schedule(text: str, steps: int) -> optim.Schedule | None:
    """`constant`, `cosine` or `EVERY:FACTOR` -> factor by step."""
    if text == "constant":
        return None
    if text == "cosine":
        return optim.CosineLR(max(steps, 1))
    match = re.fullmatch(r"([1-9][0-9]{0,8}):([0-9]*\.?[0-9]+)", text)
    if match is None:
        raise ArgumentError(f"--schedule is {text!r}; write constant, cosine, or EVERY:FACTOR such as 1000:0.1")
    return optim.StepLR(int(match[1]), float(match[2]))


def epochs_for(args: argparse.Namespace, data: Data) -> int:
    """Enough epochs for `--steps`, else `--epochs`."""
    if args.steps is None:
        return args.epochs or 1
    return int(-(-args.steps // batch_count(len(data.train), args.batch)))


def checkpoint_folder(args: argparse.Namespace) -> Path | None:
    """Where checkpoints go: a run that was resumed keeps saving where it was."""
    if args.checkpoint is not None or args.resume is None:
        return None if args.checkpoint is None else Path(args.checkpoint)
    return checkpoint.find(Path(args.resume)).parent


@contextmanager
def finishing_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C ends the run after the iteration; a second one, at once. More of them change nothing: what is
    saved and given back then must not be cut short. The command restores the handler when all that is done."""

    def at_once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, at_once)
        trainer.stop_requested = True
        with suppress(OSError):  # not print, which must not be entered again where a signal may have interrupted it
            os.write(2, b"minidnn: finishing this iteration; Ctrl-C again stops at once\n")

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if trainer.stop_requested else previous)


def describe(args: argparse.Namespace, trainer: Trainer, data: Data) -> str:
    """One line about the run before it starts."""
    parameters = trainer.net.summary(1, data.input_shape).total["parameters"]
    return (
        f"{args.model} ({parameters:,} parameters) on {data.name} ({len(data.train)} images), batch {args.batch}, "
        f"memory {args.memory}, {trainer.device.name}: device {format_size(trainer.peak_bytes)}, "
        f"pinned {format_size(trainer.pinned_bytes)} + batch slots {format_size(trainer.batch_slot_bytes)}"
    )


def format_metrics(metrics: dict[str, float]) -> str:
    """`train loss 0.123 accuracy 98.1 %   test loss ...`"""
    return "   ".join(
        f"{split} loss {metrics[f'{split}_loss']:.4f} accuracy {100 * metrics[f'{split}_accuracy']:.2f} %"
        for split in ("train", "test")
        if f"{split}_loss" in metrics
    )


def outcome(
    args: argparse.Namespace, trainer: Trainer, result: FitResult, metrics: dict[str, float]
) -> dict[str, Any]:
    """What `--json` prints. Sizes in bytes, times in s; null where nothing was measured."""
    choices = [choice.as_dict() for choice in trainer.adaptive.choices] if trainer.adaptive else []
    names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    return {
        "model": args.model, "data": args.data, "memory": args.memory, "batch": args.batch,
        "device": trainer.device.name, "precision": args.precision, "seed": args.seed,
        "steps": result.steps, "new_steps": result.new_steps, "epochs": result.epochs, "seconds": result.seconds,
        "images_per_s": result.images_per_s, **{name: metrics.get(name) for name in names},
        "peak_bytes": trainer.peak_bytes, "pinned_bytes": trainer.pinned_bytes,
        "batch_slot_bytes": trainer.batch_slot_bytes, "compress": args.compress,
        **trainer.compression(result.seconds or None), "choices": choices, "interrupted": result.interrupted,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }  # fmt: skip


def conclusion(report: dict[str, Any]) -> str:
    """The last line."""
    steps, new = report["steps"], report["new_steps"]
    done = f"{new} step{'s' if new != 1 else ''} in {report['seconds']:.1f} s, {report['images_per_s']:.0f} images/s"
    parts = [done if new else "nothing was left to do", *([f"{steps} in all"] if steps != new else [])]
    if report["test_accuracy"] is not None:
        parts.append(f"test accuracy {100 * report['test_accuracy']:.2f} %")
    if report["interrupted"]:
        parts.append("interrupted")
    if report["checkpoint"] is not None:
        parts.append(f"saved in {report['checkpoint']}")
    return ", ".join(parts)
