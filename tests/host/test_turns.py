"""A trainer does one thing at a time: what would use it inside an iteration, or beside one, is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.data.dataset import Dataset
from minidnn.errors import ArgumentError, MiniDnnError
from tests.host.saved import BATCH, data, network, state

X, Y = np.zeros((BATCH, 1, 6, 6), np.float32), np.zeros(BATCH, np.int64)
REFUSED = "trainer is in an iteration; use it between steps or in on_epoch"
USES: dict[str, Callable[[Trainer], object]] = {
    "step": lambda t: t.step(X, Y),
    "predict": lambda t: t.predict(X),
    "evaluate": lambda t: t.evaluate(data()),
    "fit": lambda t: t.fit(data(), 1),
    "close": lambda t: t.close(),
}


class Scheduled:
    """A trainer whose schedule calls `do`, once, in the step of that number."""

    def __init__(self, do: Callable[[Trainer], object] | None = None, at: int = 2) -> None:
        self.do, self.at, self.errors = do, at, list[ArgumentError]()
        optimizer = optim.SGD(0.1, momentum=0.9, schedule=self)
        self.trainer = Trainer(network(), nn.CrossEntropyLoss(), optimizer, BATCH, device="host", seed=5)

    def __call__(self, step: int) -> float:
        if self.do is not None and step == self.at:
            do, self.do = self.do, None
            do(self.trainer)
        return 1.0

    def caught(self, do: Callable[[Trainer], object]) -> Callable[[Trainer], None]:
        """`do`, whose refusal is kept."""

        def tried(trainer: Trainer) -> None:
            try:
                do(trainer)
            except ArgumentError as error:
                self.errors.append(error)

        return tried


def fitted(run: Scheduled) -> dict[str, bytes]:
    """Weights and state after a fit."""
    with run.trainer as trainer:
        trainer.fit(data(), 2)
        return state(trainer)


@pytest.mark.parametrize("name", USES)
def test_a_schedule_that_uses_the_trainer_is_refused_and_the_trainer_goes_on(name: str) -> None:
    run = Scheduled(USES[name])
    with run.trainer as trainer:
        with pytest.raises(ArgumentError, match=REFUSED):
            trainer.fit(data(), 1)
        trainer.step(X, Y)
        run.do, run.at = USES[name], trainer.step_count
        with pytest.raises(ArgumentError, match=REFUSED):
            trainer.step(X, Y)
        slot = trainer._slots[0].batch
        run.do = USES[name]
        with pytest.raises(ArgumentError, match=REFUSED):
            trainer.issue(slot, BATCH)
        trainer.fit(data(), 1)


@pytest.mark.parametrize("name", USES)
def test_a_refused_use_trains_on_no_other_images(name: str) -> None:
    run = Scheduled()
    run.do = run.caught(USES[name])
    assert fitted(run) == fitted(Scheduled())
    assert [REFUSED in str(error) for error in run.errors] == [True]


@pytest.mark.parametrize("name", [*USES, "pull", "push", "optimizer_state"])
def test_another_thread_is_refused_while_an_iteration_runs(name: str) -> None:
    run = Scheduled()
    use = run.caught(USES.get(name, lambda t: getattr(t, name)()))

    def elsewhere(trainer: Trainer) -> None:
        thread = threading.Thread(target=use, args=(trainer,))
        thread.start()
        thread.join()

    run.do = elsewhere
    assert fitted(run) == fitted(Scheduled())
    assert [REFUSED in str(error) for error in run.errors] == [True]


def test_steps_from_several_threads_are_done_one_at_a_time_or_refused() -> None:
    run = Scheduled()
    x = np.random.default_rng(0).standard_normal(X.shape).astype(np.float32)
    done: list[str] = []

    def step() -> str:
        try:
            run.trainer.step(x, Y)
        except MiniDnnError as error:
            return str(error)
        return ""

    def steps() -> None:
        done.extend(step() for _ in range(30))

    with run.trainer as trainer:
        threads = [threading.Thread(target=steps) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert trainer.step_count == done.count("") > 0
        assert all(text == "" or text.startswith(REFUSED) for text in done)
        trainer.step(x, Y)


class Asking(Dataset):
    """Images whose reader asks the trainer, in the loader's thread."""

    input_shape, classes = (1, 6, 6), 3

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return 3 * BATCH

    def read(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        x[:], y[:] = self.trainer.predict(X).sum(), 0


def test_a_data_set_s_reader_cannot_use_the_trainer() -> None:
    with Scheduled().trainer as trainer:
        for use in (trainer.fit, trainer.evaluate):
            with pytest.raises(ArgumentError, match=REFUSED):
                use(Asking(trainer))
        trainer.fit(data(), 1)


def test_between_steps_and_in_on_epoch_the_trainer_may_be_used() -> None:
    with Scheduled().trainer as trainer:

        def on_begin() -> None:
            trainer.predict(X)

        def on_epoch(epoch: int, metrics: dict[str, float]) -> None:
            trainer.predict(X)
            trainer.evaluate(data())
            trainer.step(X, Y)
            state(trainer)

        trainer.fit(data(), 2, on_begin=on_begin, on_epoch=on_epoch)
        assert trainer.step_count == 2 * 4 + 2
        trainer.predict(X)


def test_a_schedule_may_read_and_set_weights() -> None:
    def again(trainer: Trainer) -> None:
        trainer.net.load_state_dict(trainer.state_dict())
        trainer.load_optimizer_state(trainer.optimizer_state())

    run = Scheduled(again)
    assert fitted(run) == fitted(Scheduled())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_iteration_that_was_interrupted_is_over(error: type[BaseException]) -> None:
    def stop(trainer: Trainer) -> None:
        raise error

    for name in ("fit", "step"):
        run = Scheduled(stop, at=0)
        with run.trainer as trainer:
            with pytest.raises(error):
                USES[name](trainer)
            trainer.step(X, Y)
            trainer.predict(X)


def test_a_turn_that_an_interrupt_left_taken_ends_with_the_with_statement() -> None:
    """Between a context manager's last line and the first of its block an interrupt may strike."""
    trainer = Scheduled().trainer
    held = trainer.turn.taken()

    def interrupted() -> None:
        with trainer:
            held.__enter__()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert trainer.device.memory_info().used == 0
