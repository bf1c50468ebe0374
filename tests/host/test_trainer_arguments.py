"""Wrong arguments of the trainer and of fit: one sentence each, which names the argument, its value and what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.data import Data, from_arrays
from minidnn.device.host import HostDevice
from minidnn.errors import ArgumentError, DataError, MiniDnnError, NonFiniteLoss, OutOfDeviceMemory, ShapeError

X, Y = np.ones((4, 1, 6, 6), np.float32), np.array([0, 1, 2, 0])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3), input_shape=(1, 6, 6))


def open_with(**changes: Any) -> Trainer:
    """A trainer with some arguments changed."""
    arguments = {
        "net": network(), "loss": nn.CrossEntropyLoss(), "optimizer": optim.SGD(0.1), "batch": 4, "device": "host",
    }  # fmt: skip
    return Trainer(**{**arguments, **changes})


def one_sentence(error: BaseException) -> None:
    """No line breaks, no second sentence, not too long to read."""
    text = str(error)
    assert "\n" not in text
    assert ". " not in text
    assert len(text) < 300


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"net": [1]}, "net is [1]; it must be an object such as nn.Sequential(...)"),
        ({"loss": "mse"}, "loss is 'mse'; it must be an object such as nn.CrossEntropyLoss()"),
        ({"optimizer": 0.1}, "optimizer is 0.1; it must be an object such as optim.SGD(lr=0.1)"),
        ({"device": None}, "device is None; it must be an object such as 'host'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be 'auto', 'host', 'cuda' or 'cuda:0'"),
        ({"net": np.ones((40, 40))}, "net is array([[1., 1., 1."),
        ({"batch": np.ones((40, 40))}, "batch is array([[1., 1., 1."),
        ({"batch": 2**31}, f"batch is {2**31}; it must be an int of 1 or more, at most {2**31 - 1}"),
        ({"seed": np.ones(2)}, "seed is array([1., 1.]); it must be an int"),
        ({"batch": 0}, "batch is 0; it must be an int of 1 or more"),
        ({"batch": -3}, "batch is -3; it must be"),
        ({"batch": 2.5}, "batch is 2.5; it must be"),
        ({"batch": True}, "batch is True; it must be"),
        ({"batch": "8"}, "batch is '8'; it must be"),
        ({"micro_batch": 5}, "micro_batch is 5; it must be an int from 1 to the batch, 4"),
        ({"micro_batch": 0}, "micro_batch is 0; it must be"),
        ({"max_norm": 0}, "max_norm is 0; it must be a number above 0"),
        ({"max_norm": "1"}, "max_norm is '1'; it must be a number above 0"),
        ({"max_norm": float("nan")}, "max_norm is nan; it must be a number above 0"),
        ({"seed": -1}, "seed is -1; it must be an int from 0 to 2^64 - 1"),
        ({"seed": 1.5}, "seed is 1.5; it must be"),
        ({"memory": "vdn"}, "memory mode is 'vdn'; write one of base, keep"),
        ({"memory": "vdnn:all(x)"}, "memory mode is 'vdnn:all(x)'"),
        ({"memory": "base:all"}, "memory mode is 'base:all'; base takes no offload set"),
        ({"memory": None}, "memory mode is None"),
        ({"memory": "vdnn:features.7"}, "there is no layer 'features.7'"),
        ({"budget": "much"}, "budget is 'much'; write a number and a unit, such as 8GiB"),
        ({"budget": -1}, "budget is -1; it must be 0 or more bytes"),
        ({"budget": 1.5}, "budget is 1.5; write a number and a unit, such as 8GiB"),
        ({"budget": True}, "budget is True; write a number and a unit"),
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp32, tf32, bf16, fp64"),
        ({"target": "fast"}, "target is 'fast'; it must be one of paper, native"),
        ({"order": "random"}, "order is 'random'; it must be one of prefetch-first, derivative-first"),
        ({"fit": "tight"}, "fit is 'tight'; it must be one of best-fit"),
        ({"placement": "later"}, "placement is 'later'; it must be one of planned, live"),
        ({"precision": ["fp32"]}, "precision is ['fp32']; it must be one of fp32, tf32, bf16, fp64"),
        ({"fit": ["best-fit"]}, "fit is ['best-fit']; it must be one of best-fit"),
        ({"order": np.ones(2)}, "order is array([1., 1.]); it must be one of prefetch-first"),
        ({"memory": 10**5000}, "memory mode is an unshowable int; write one of base"),
        ({"compress": 5}, "compress is 5; it must be one of off, all, auto"),
        ({"compress": (1,)}, "compress is (1,); it must be one of off, all, auto"),
        ({"compress": ["0.y"]}, "compress is ['0.y']; it must be one of off, all, auto, or a tuple of tensors' names"),
        ({"compress": "0.y"}, "compress is '0.y'; it must be one of off, all, auto, or a tuple of tensors' names"),
        ({"deterministic": "no"}, "deterministic is 'no'; it must be True or False"),
        ({"deterministic": 1}, "deterministic is 1; it must be True or False"),
        ({"graph": "no"}, "graph is 'no'; it must be True or False"),
        ({"graph": None}, "graph is None; it must be True or False"),
        ({"algorithms": True}, "algorithms is True; it must be a dict of Algorithm by op"),
        ({"input_shape": (1, 6)}, "input_shape is (1, 6); it must be (C, H, W), or (features,), each 1 or more"),
        ({"input_shape": "1x6x6"}, "input_shape is '1x6x6'; it must be (C, H, W)"),
        ({"input_shape": (1, 0, 6)}, "input_shape is (1, 0, 6); it must be (C, H, W)"),
        ({"net": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}, "input_shape is None; give the network or the"),
        ({"net": nn.Sequential(nn.ReLU(), nn.Flatten(), input_shape=(1, 6, 6))}, "net has no weights"),
        ({"graph": True}, "graph is True; device host has no CUDA graphs"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_the_trainer_gets_one_sentence(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        open_with(**changes)
    assert fragment in str(refused.value)
    one_sentence(refused.value)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"input_shape": (2, 6, 6)}, "layer 0 (Conv2d): input has shape [4, 2, 6, 6]; expected 1 channels, got 2"),
        ({"input_shape": (1, 7, 6)}, "layer 3 (Linear): input has shape [4, 40]; expected 32 features, got 40"),
        ({"input_shape": (1, 2, 6)}, "layer 0 (Conv2d): input has shape [4, 1, 2, 6]; kernel (3, 3)"),
        ({"loss": nn.CrossEntropyLoss([1.0, 2.0])}, "layer loss (CrossEntropyLoss): logits have 3 classes; weight"),
        ({"net": network()[:2]}, "layer loss (CrossEntropyLoss): logits have shape [4, 2, 4, 4]; expected [N"),
    ],
)
def test_a_shape_that_does_not_fit_names_the_layer(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ShapeError) as refused:
        open_with(**changes)
    assert fragment in str(refused.value)
    one_sentence(refused.value)


@pytest.mark.parametrize(
    ("x", "y", "kind", "fragment"),
    [
        (X[:, :, :5], Y, ArgumentError, "x has shape [4, 1, 5, 6]; expected 1 to 4 rows of [1, 6, 6]"),
        (np.ones((5, 1, 6, 6)), np.zeros(5, int), ArgumentError, "x has shape [5, 1, 6, 6]; expected 1 to 4 rows"),
        (X[:0], Y[:0], ArgumentError, "x has shape [0, 1, 6, 6]; expected 1 to 4 rows"),
        (np.float32(1), Y, ArgumentError, "x has shape []; expected 1 to 4 rows"),
        (X.astype(str), Y, ArgumentError, "it must be real numbers"),
        (X, Y[:3], ArgumentError, "y has shape [3]; expected [4]"),
        (X, Y[:, None], ArgumentError, "y has shape [4, 1]; expected [4]"),
        (X, Y.astype(np.float32), DataError, "y has labels of float32 from 0.0 to 2.0; expected integers 0 to 2"),
        (X, Y + 1, DataError, "y has labels of int64 from 1 to 3; expected integers 0 to 2"),
        (X, Y - 1, DataError, "y has labels of int64 from -1 to 1; expected integers 0 to 2"),
        (X, Y.astype(str), ArgumentError, "it must be real numbers"),
        ([[1], [2, 3]], Y, ArgumentError, "x is [[1], [2, 3]]; it must be an array of numbers"),
        (X, [[1], [2, 3]], ArgumentError, "y is [[1], [2, 3]]; it must be an array of numbers"),
        (X, None, ArgumentError, "y is object; it must be real numbers"),
    ],
)
def test_a_wrong_batch_is_refused_and_the_trainer_goes_on(
    x: np.ndarray, y: np.ndarray, kind: type[MiniDnnError], fragment: str
) -> None:
    with open_with() as trainer:
        with pytest.raises(kind) as refused:
            trainer.step(x, y)
        assert fragment in str(refused.value)
        one_sentence(refused.value)
        assert trainer.step(X, Y).rows == 4


def labelled(classes: int = 3, shape: tuple[int, int, int] = (1, 6, 6), samples: int = 8) -> Data:
    """Some data."""
    return from_arrays("d", (np.ones((samples, *shape), np.float32), np.arange(samples) % classes), test_samples=0)


FLAGS = ("shuffle", "evaluate_epochs", "progress")


class Described:
    """A data set that describes itself as it likes."""

    def __init__(self, input_shape: Any, classes: Any) -> None:
        self.input_shape, self.classes = input_shape, classes

    def __len__(self) -> int:
        return 8

    def read(self, *arguments: Any) -> None:
        """Never asked."""


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"epochs": 0}, "epochs is 0; it must be an int of 1 or more"),
        ({"epochs": 1.5}, "epochs is 1.5; it must be"),
        ({"epochs": None}, "epochs is None; it must be"),
        ({"steps": 0}, "steps is 0; it must be"),
        ({"steps": "9"}, "steps is '9'; it must be"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1; it must be"),
        ({"data": [1, 2]}, "data is [1, 2]; give what open_data or from_arrays return, or a Dataset"),
        ({"data": labelled(shape=(1, 5, 6))}, "data have images of [1, 5, 6]; expected [1, 6, 6], which the network"),
        ({"data": labelled(4)}, "data have 4 classes; the network needs as many outputs, and has 3"),
        ({"data": [np.ones((40, 40))]}, "data is [array([[1., 1., 1."),
        ({"data": Described((1, 6, 6), "x")}, "data's classes is 'x'; it must be an int"),
        ({"data": Described(5, 3)}, "data's input_shape is 5; it must be (C, H, W)"),
        ({"on_epoch": 5}, "on_epoch is 5; it must be a function of an epoch and its metrics"),
        ({"on_begin": 5}, "on_begin is 5; it must be a function without arguments"),
        ({"checkpoint": "a\0b"}, "checkpoint is 'a\\x00b'; it must be a path"),
        ({"checkpoint": 5}, "checkpoint is 5; it must be a path"),
        ({"resume": ""}, "resume is ''; it must be a path"),
        ({"log": 3}, "log is 3; it must be a path"),
        *(({name: "no"}, f"{name} is 'no'; it must be True or False") for name in FLAGS),
        *(({name: 0}, f"{name} is 0; it must be True or False") for name in FLAGS),
        ({"log": "/nowhere/log.jsonl"}, "log /nowhere/log.jsonl cannot be written: No such file or directory"),
    ],
)
def test_a_wrong_argument_of_fit_gets_one_sentence_before_the_first_step(
    options: dict[str, Any], fragment: str
) -> None:
    with open_with() as trainer:
        with pytest.raises(ArgumentError) as refused:
            trainer.fit(**{"data": labelled(), **options})
        assert fragment in str(refused.value)
        one_sentence(refused.value)
        assert trainer.step_count == 0


def test_wrong_test_data_are_refused_before_the_first_step() -> None:
    with open_with() as trainer, pytest.raises(ArgumentError, match="data have 5 classes; the network needs as many"):
        trainer.fit(Data("mixed", labelled().train, labelled(5).train))
    assert trainer.step_count == 0


def test_data_sets_have_labels_and_other_targets_go_to_step() -> None:
    with open_with(net=network()[:2], loss=nn.MSELoss()) as trainer:
        with pytest.raises(ArgumentError, match="loss is not CrossEntropyLoss"):
            trainer.fit(labelled())
        assert trainer.step(X, np.zeros((4, 2, 4, 4))).correct == 0


def test_a_single_value_per_channel_cannot_be_normalized_and_is_refused_before_the_first_step() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 6), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3), input_shape=(1, 6, 6)
    )  # fmt: skip
    with open_with(net=net) as trainer:
        with pytest.raises(ShapeError, match=r"layer 1 \(BatchNorm2d\): .*needs more than one value per channel"):
            trainer.fit(labelled(samples=9))  # the last batch is a single sample
        assert trainer.step_count == 0
        trainer.fit(labelled())


def test_a_batch_of_classes_without_weight_has_no_mean_loss_and_the_trainer_goes_on() -> None:
    with open_with(loss=nn.CrossEntropyLoss(weight=[0.0, 1.0, 1.0])) as trainer:
        with pytest.raises(ArgumentError, match=r"weight gives all 4 labels .* above 0"):
            trainer.step(X, np.zeros(4, int))
        assert trainer.step(X, np.array([0, 0, 1, 2])).step == 0


def test_a_network_belongs_to_one_open_trainer() -> None:
    net = network()
    with open_with(net=net), pytest.raises(ArgumentError, match="in another trainer that is still open; close"):
        open_with(net=net)
    open_with(net=net).close()


def test_a_log_that_cannot_be_written_any_more_is_named(tmp_path: Path) -> None:
    full = tmp_path / "log"
    full.symlink_to("/dev/full")
    with open_with() as trainer, pytest.raises(ArgumentError, match="log cannot be written: No space left on device"):
        trainer.fit(labelled(), log=full)


def test_what_failed_to_open_leaves_no_memory_taken() -> None:
    with HostDevice() as device:
        for changes in ({"fit": "tight"}, {"input_shape": (2, 6, 6)}, {"memory": "vdnn:nothing"}, {"budget": 10}):
            with pytest.raises(MiniDnnError):
                open_with(device=device, **changes)
            assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


def test_numpy_s_ints_are_ints_and_a_closed_trainer_says_so() -> None:
    numbers = {"batch": np.int64(4), "micro_batch": np.int32(2), "seed": np.uint64(2**63), "max_norm": np.float32(1)}
    with open_with(**numbers) as trainer:
        assert trainer.step(X, Y).rows == 4
    with pytest.raises(ArgumentError, match="trainer is closed; open a new one"):
        trainer.push()
    for call in (trainer.compression, lambda: trainer.announce(4, True), lambda: trainer.executor(4)):
        with pytest.raises(ArgumentError, match="trainer is closed; open a new one"):
            call()


def test_numpy_s_bools_are_bools() -> None:
    with open_with(deterministic=np.True_, graph=np.False_) as trainer:
        trainer.fit(labelled(), shuffle=np.bool_(0), evaluate_epochs=np.False_, progress=np.False_)
        assert trainer.step_count == 2


def test_numbers_beyond_float32_are_infinite_and_end_the_run_without_a_warning() -> None:
    with open_with() as trainer, pytest.raises(NonFiniteLoss):
        trainer.step(np.full(X.shape, 1e300), Y)


def test_a_network_too_large_to_fit_is_refused_before_its_weights_are_drawn() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2**31 - 1), nn.Linear(2**31 - 1, 3), input_shape=(1, 6, 6))
    with pytest.raises(OutOfDeviceMemory, match="the arena needs"):
        open_with(net=net)
    assert not any(parameter.materialized for _, parameter in net.named_parameters())
