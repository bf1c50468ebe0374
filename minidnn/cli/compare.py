"""`minidnn compare MODEL`: run every mode for real, and verify that all compute the same gradients, bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidnn import nn, optim
from minidnn.cli.comparing import (
    add_outputs,
    check_schedules,
    check_sets,
    modes_of,
    options_of,
    refusal,
    rows,
    say_table,
    write_files,
)
from minidnn.cli.options import Console, add_model, add_planning, count, seed, source
from minidnn.data import Data, open_data
from minidnn.device.base import Device
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, BudgetError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph
from minidnn.models import create
from minidnn.run.bound import iteration_bound
from minidnn.run.compare import Experiment, GradientMismatch, measure, mismatches, unverified

EXAMPLE = "minidnn compare vgg11 --input 3x32x32 --batch 8 --device host --html report.html"

DISTINCT = 64
"""Batches of invented data after which they repeat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, modes, data and device."""
    add_model(parser)
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--data", type=source, default="synthetic", metavar="D",
                           help="as for train (default: synthetic)")  # fmt: skip
    run_group.add_argument("--batch", type=count, default=16, metavar="N", help="images in a batch (default: 16)")
    run_group.add_argument("--steps", type=count, default=2, metavar="S", help="steps to verify (default: 2)")
    run_group.add_argument("--device", default="auto", metavar="D", help="auto, host, cuda or cuda:1 (default: auto)")
    run_group.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and data (default: 0)")
    run_group.add_argument("--interleaving", default="eager", choices=("eager", "lazy", "random", "threads"),
                           help="how the host emulator orders its lanes (default: eager)")  # fmt: skip
    add_planning(parser)
    add_outputs(parser)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return one row per mode. Raises GradientMismatch (exit code 2) when a mode computed something else."""
    modes, options = modes_of(args), options_of(args)
    network, data = _network_and_data(args)
    if len(data.train) < args.batch:
        raise ArgumentError(f"--batch is {args.batch}; {data.name} has {len(data.train)} images: take a smaller batch")
    experiment = Experiment(
        network, nn.CrossEntropyLoss(), optim.SGD(0.01, momentum=0.9), Batches(data, args.batch, args.steps),
        args.precision, args.target, args.seed,
    )  # fmt: skip
    opener = _opener(args)
    with opener() as device:
        name, profile_source = device.name, device.kind
        check_sets(modes, _graph(args, experiment, device, (args.batch, *data.input_shape)))
    title = f"{args.model}, batch {args.batch}, {args.precision}, device {name}"
    results, unsaid = [], [title]  # until a mode fits, the budget may be what is wrong
    for result in measure(experiment, modes, opener, options):
        results.append(result)
        unsaid.append(f"  {result.mode}: {'done' if result.fits else 'does not fit'}")
        if any(found.fits for found in results):
            console.say("\n".join(unsaid))
            unsaid.clear()
        if result.schedule is not None:
            with opener() as device:
                profile = device.profile(result.schedule.graph)
            known = profile.link is not None
            bound = iteration_bound(result.schedule.graph, profile, args.budget) if known else None
            result.more["lower_bound_ms"] = bound.ms(2) if bound else None
    if not any(result.fits for result in results):
        raise BudgetError(refusal(args, results))
    say_table(results, console)
    if args.check:
        check_schedules(results, console)
    wrong, unknown = mismatches(results), unverified(results)
    if unknown:
        console.say(f"gradients of {', '.join(unknown)}: not compared, base with their algorithms does not fit {name}")
    if not wrong and len(unknown) < sum(result.fits for result in results):
        modes_ = "all other modes" if unknown else "all modes"
        console.say(f"gradients of {modes_}: bit-equal to base with the same algorithms")
    write_files(args, title, results)
    if wrong:
        raise GradientMismatch(f"gradients differ from base with the same algorithms in {', '.join(wrong)}")
    return {
        "model": args.model, "batch": args.batch, "steps": args.steps, "data": args.data, "device": name,
        "kind": profile_source, "precision": args.precision, "budget": args.budget, "order": args.order,
        "fit": args.fit, "placement": args.placement, "compress": args.compress, "seed": args.seed,
        "modes": rows(results),
    }  # fmt: skip


def _network_and_data(args: argparse.Namespace) -> tuple[Callable[[], nn.Sequential], Data]:
    shape = args.input or create(args.model).input_shape
    spec = args.data
    if spec == "synthetic" and shape is not None:
        classes = create(args.model, input_shape=shape).infer((1, *shape))[-1]
        spec = f"synthetic:classes={classes},length={args.batch * min(args.steps, DISTINCT)}"
    data = open_data(spec, input_shape=shape, seed=args.seed)
    return partial(create, args.model, num_classes=data.classes, input_shape=args.input or data.input_shape), data


def _graph(args: argparse.Namespace, experiment: Experiment, device: Device, shape: tuple[int, ...]) -> Graph:
    """The iteration that the device would run: what is wrong with the network comes up before anything is printed."""
    target = device.target_for(args.precision, args.target)
    return build(experiment.network(), experiment.loss, shape, target, optimizer=experiment.optimizer)


class Batches(Sequence[tuple[np.ndarray, np.ndarray]]):
    """The first batches, starting over where the data end; each is read when it is asked for."""

    def __init__(self, data: Data, batch: int, steps: int) -> None:
        self._data, self._batch, self._steps = data, batch, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: Any) -> Any:
        """Batch `step`: x [batch, C, H, W] and y [batch]."""
        if not 0 <= step < self._steps:
            raise IndexError(step)
        indices = np.arange(step * self._batch, (step + 1) * self._batch) % len(self._data.train)
        x, y = np.empty((self._batch, *self._data.input_shape), np.float32), np.empty(self._batch, np.int64)
        self._data.train.read(indices, x, y)
        return x, y


def _opener(args: argparse.Namespace) -> Callable[[], Device]:
    if args.interleaving != "eager":
        if args.device not in ("host", "auto"):
            raise ArgumentError(
                f"--interleaving is {args.interleaving!r}; only the host emulator has it: "
                "add --device host"
            )
        from minidnn.device.host import HostDevice

        return partial(HostDevice, args.interleaving, args.seed)
    return partial(open_device, args.device, precision=args.precision, deterministic=True)
