"""The loader: order, slots, errors and threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.data import Dataset, Loader, Slot, batch_count, epoch_order, from_arrays
from minidnn.data.dataset import Floats, Indices, Labels, Shape
from minidnn.errors import ArgumentError, DataError

# Generous: only a deadlock ever waits this long.
PATIENCE_S = 30


class Numbers:
    """Sample i is an image full of i with the label i modulo 5; `on_read` may interfere before a batch is filled."""

    input_shape: Shape = (1, 2, 2)
    classes: int | None = 5

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0
        self.third_read = threading.Event()
        self.fourth_read = threading.Event()

    def __len__(self) -> int:
        return self.length

    def on_read(self, indices: Indices) -> None:
        self.reads += 1
        if self.reads == 3:
            self.third_read.set()
        if self.reads == 4:
            self.fourth_read.set()

    def read(self, indices: Indices, x_out: Floats, y_out: Labels) -> None:
        self.on_read(indices)
        x_out[...] = indices.reshape(-1, 1, 1, 1)
        y_out[...] = indices % 5


def make_slots(batch: int, count: int = 3, shape: Shape = (1, 2, 2)) -> list[Slot]:
    return [Slot(np.full((batch, *shape), np.nan, np.float32), np.full(batch, -1)) for _ in range(count)]


def samples(dataset: Dataset, batch: int, **options: Any) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    with Loader(dataset, batch, make_slots(batch), **options) as batches:
        result = []
        for slot, rows in batches:
            assert (slot.x[:rows, 0, 1, 1].astype(int) % 5 == slot.y[:rows]).all()
            result.append(slot.x[:rows, 0, 0, 0].astype(int).tolist())
            slot.release()
        return result


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert loader_threads() == []


def test_an_unshuffled_epoch_keeps_the_order_and_ends_with_a_partial_batch() -> None:
    assert samples(Numbers(7), 3, shuffle=False) == [[0, 1, 2], [3, 4, 5], [6]]


def test_drop_last_leaves_the_partial_batch_out() -> None:
    assert samples(Numbers(7), 3, shuffle=False, drop_last=True) == [[0, 1, 2], [3, 4, 5]]


def test_a_partial_batch_leaves_the_other_rows_of_its_slot_alone() -> None:
    slots = make_slots(4)
    with Loader(Numbers(3), 4, slots, shuffle=False) as batches:
        slot, rows = next(batches)
        assert rows == 3
        assert np.isnan(slot.x[3]).all()
        assert slot.y[3] == -1


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 3),
    start=st.integers(0, 40),
    workers=st.integers(1, 3),
)
def test_a_resumed_epoch_goes_on_in_the_same_order(
    length: int, batch: int, seed: int, epoch: int, start: int, workers: int
) -> None:
    whole = samples(Numbers(length), batch, seed=seed, epoch=epoch)
    start = min(start, len(whole))
    resumed = samples(Numbers(length), batch, seed=seed, epoch=epoch, start_batch=start, workers=workers)
    assert sorted(sample for batch_samples in whole for sample in batch_samples) == list(range(length))
    assert resumed == whole[start:]


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = [samples(Numbers(50), 50, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(orders[a] != orders[b] for a in range(4) for b in range(a))


def test_the_order_is_the_same_in_every_version() -> None:
    # Checkpoints of older versions resume with these numbers.
    assert epoch_order(8, shuffle=True, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]


def test_len_counts_the_batches_to_come() -> None:
    with Loader(Numbers(7), 2, make_slots(2), start_batch=1) as batches:
        assert len(batches) == 3
        next(batches)
        assert len(batches) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_held_slot_never_changes(workers: int) -> None:
    with Loader(Numbers(60), 2, make_slots(2), shuffle=False, workers=workers) as batches:
        kept, _ = next(batches)
        for number in range(1, 30):
            slot, _ = next(batches)
            assert slot is not kept
            assert slot.x[:, 0, 0, 0].tolist() == [2 * number, 2 * number + 1]
            assert kept.x[:, 0, 0, 0].tolist() == [0, 1]
            assert kept.y.tolist() == [0, 1]
            slot.release()


def test_slots_may_be_released_in_any_order() -> None:
    rng = np.random.default_rng(0)
    held: list[tuple[int, Slot]] = []
    with Loader(Numbers(200), 2, make_slots(2, 4), shuffle=False, workers=2) as batches:
        for number in range(100):
            slot, _ = next(batches)
            held.append((number, slot))
            for expected, other in held:
                assert other.x[:, 0, 0, 0].tolist() == [2 * expected, 2 * expected + 1]
            while len(held) == 4 or (held and rng.random() < 0.5):
                held.pop(int(rng.integers(len(held))))[1].release()


def test_the_next_batches_are_filled_while_one_is_held() -> None:
    dataset = Numbers(20)
    with Loader(dataset, 2, make_slots(2)) as batches:
        next(batches)
        assert dataset.third_read.wait(PATIENCE_S)


def test_one_slot_is_enough() -> None:
    with Loader(Numbers(5), 2, make_slots(2, 1), shuffle=False) as batches:
        rows = []
        for slot, count in batches:
            rows.append(count)
            slot.release()
    assert rows == [2, 2, 1]


def test_asking_while_all_slots_are_held_is_an_error_and_no_deadlock() -> None:
    with Loader(Numbers(20), 2, make_slots(2)) as batches:
        for _ in range(3):
            next(batches)
        with pytest.raises(DataError, match="all 3 batch slots are held"):
            next(batches)


def test_a_release_from_another_thread_counts() -> None:
    with Loader(Numbers(6), 2, make_slots(2, 1), shuffle=False) as batches:
        for slot, _ in batches:
            thread = threading.Thread(target=slot.release)
            thread.start()
            thread.join(PATIENCE_S)
            assert not slot.held


def test_releasing_a_slot_that_waits_for_its_turn_does_nothing() -> None:
    dataset = Numbers(8)
    slots = make_slots(2)
    with Loader(dataset, 2, slots, shuffle=False) as batches:
        first, _ = next(batches)
        assert dataset.third_read.wait(PATIENCE_S)
        for slot in slots:
            if slot is not first:
                slot.release()
        # Only a broken loader reads a fourth batch, and it does so at once.
        assert not dataset.fourth_read.wait(0.2)
        for number in (1, 2):
            slot, _ = next(batches)
            assert slot.x[0, 0, 0, 0] == 2 * number


def test_a_slot_held_over_the_end_of_an_epoch_stays_held_in_the_next() -> None:
    slots = make_slots(2)
    with Loader(Numbers(2), 2, slots, shuffle=False) as batches:
        kept, _ = next(batches)
    with Loader(Numbers(8), 2, slots, shuffle=False) as batches:
        for number in range(3):
            slot, _ = next(batches)
            assert slot is not kept
            assert kept.x[:, 0, 0, 0].tolist() == [0, 1]
            assert slot.x[0, 0, 0, 0] == 2 * number
            slot.release()
        kept.release()
        assert next(batches)[1] == 2


def test_a_slot_serves_one_loader_at_a_time() -> None:
    slots = make_slots(2)
    with Loader(Numbers(8), 2, slots), pytest.raises(ArgumentError, match="another loader; close that one first"):
        Loader(Numbers(8), 2, slots)
    Loader(Numbers(8), 2, slots).close()


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_arrives_at_its_batch_after_those_before_it(workers: int) -> None:
    error = DataError("the third batch is bad")

    class Broken(Numbers):
        def on_read(self, indices: Indices) -> None:
            if 4 in indices:
                raise error

    slots = make_slots(2)
    with Loader(Broken(20), 2, slots, shuffle=False, workers=workers) as batches:
        for number in range(2):
            slot, _ = next(batches)
            assert slot.x[0, 0, 0, 0] == 2 * number
            slot.release()
        with pytest.raises(DataError) as caught:
            next(batches)
        assert loader_threads() == []
        Loader(Numbers(20), 2, slots).close()
    assert caught.value is error


def test_a_data_set_with_wrong_labels_is_stopped_before_a_kernel_sees_them() -> None:
    class Wrong(Numbers):
        classes = 4

    with (
        Loader(Wrong(20), 5, make_slots(5), shuffle=False) as batches,
        pytest.raises(DataError, match=r"batch 0: label 4 of sample 4 is out of range; with 4 classes it must be 0"),
    ):
        next(batches)


def test_labels_that_are_no_classes_pass() -> None:
    class Free(Numbers):
        classes = None

    assert samples(Free(7), 7, shuffle=False) == [[0, 1, 2, 3, 4, 5, 6]]


def test_nan_passes() -> None:
    data = from_arrays("nan", (np.full((4, 1, 2, 2), np.nan, np.float32), np.arange(4)), test_samples=0)
    with Loader(data.train, 4, make_slots(4)) as batches:
        slot, _ = next(batches)
        assert np.isnan(slot.x).all()


def test_a_data_set_that_varies_is_read_at_its_epoch() -> None:
    class Varying(Numbers):
        def at_epoch(self, epoch: int) -> Numbers:
            return Numbers(epoch) if epoch else self

    assert samples(Varying(3), 3, shuffle=False) == [[0, 1, 2]]
    with Loader(Varying(3), 3, make_slots(3), epoch=3) as batches:
        assert type(batches._dataset) is Numbers


def test_close_ends_threads_that_wait_for_a_slot_and_may_be_repeated() -> None:
    dataset = Numbers(20)
    slots = make_slots(2)
    batches = Loader(dataset, 2, slots, workers=2)
    assert dataset.third_read.wait(PATIENCE_S)
    assert len(loader_threads()) == 2
    batches.close()
    assert loader_threads() == []
    batches.close()
    assert list(batches) == []
    # The batches that nobody took are dropped: their slots serve again.
    dataset = Numbers(20)
    with Loader(dataset, 2, slots):
        assert dataset.third_read.wait(PATIENCE_S)


def test_leaving_the_loop_ends_the_threads() -> None:
    for _slot, _rows in Loader(Numbers(20), 2, make_slots(2)):
        break
    assert loader_threads() == []


def test_an_interrupt_in_the_loop_ends_the_threads() -> None:
    slots = make_slots(2)

    def interrupted() -> None:
        for _slot, _rows in Loader(Numbers(20), 2, slots):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert loader_threads() == []
    assert sum(slot.held for slot in slots) == 1


def test_an_interrupt_while_waiting_for_a_batch_ends_the_threads() -> None:
    asked = threading.Event()

    class Interrupting(Numbers):
        def on_read(self, indices: Indices) -> None:
            if 0 in indices:
                assert asked.wait(PATIENCE_S)
                signal.raise_signal(signal.SIGINT)  # Python lets the main thread handle it

    class Asking(Loader[Slot]):
        def _take(self) -> tuple[int, Slot | BaseException]:
            asked.set()
            super()._take()
            threading.Event().wait(PATIENCE_S)
            raise AssertionError("no interrupt came")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        batches = Asking(Interrupting(20), 2, make_slots(2), shuffle=False)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert loader_threads() == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_that_cannot_start_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    slots = make_slots(2)

    def start_one(thread: threading.Thread) -> None:
        if loader_threads():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start"):
        Loader(Numbers(20), 2, slots, workers=2)
    assert loader_threads() == []
    Loader(Numbers(20), 2, slots).close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 0}, "batch is 0; it must be a whole number of at least 1"),
        ({"batch": 21, "drop_last": True}, "batch is 21, but there are only 20 samples"),
        ({"start_batch": 6}, "start_batch is 6; it must be one of 0 to 5"),
        ({"start_batch": -1}, "start_batch is -1"),
        ({"workers": 0}, "workers is 0"),
        ({"seed": -1}, "seed is -1; it must be an int from 0"),
        ({"epoch": -1}, "epoch is -1"),
        ({"slots": []}, "slots has 0 entries"),
        ({"slots": make_slots(4, 1) * 2}, "slots has 2 entries; it must hold one or more different slots"),
        ({"slots": make_slots(3)}, "slots: x is float32 3x1x2x2 and y int64 3; a batch of 4 needs float32 4x1x2x2"),
        ({"slots": make_slots(4, 3, (1, 2, 3))}, "a batch of 4 needs float32 4x1x2x2 and int64 4"),
        ({"slots": [Slot(np.empty((4, 1, 2, 2)), np.zeros(4, int))]}, "slots: x is float64"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"batch": 4, "slots": make_slots(32 if "batch" in options else 4)} | options
    with pytest.raises(ArgumentError, match=sentence):
        Loader(Numbers(20), **arguments)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Loader(Numbers(0), 4, make_slots(4))


def test_batch_count() -> None:
    assert [batch_count(7, 3), batch_count(6, 3), batch_count(7, 3, drop_last=True), batch_count(1, 9)] == [3, 2, 2, 1]


class Ended(Numbers):
    """A data set that draws from an iterator, which ends."""

    def read(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        if 4 in indices:
            next(iter(()))
        super().read(indices, x, y)


def test_an_iterator_that_ends_inside_a_data_set_does_not_end_the_epoch() -> None:
    with pytest.raises(DataError, match="batch 2: the data set's read raised StopIteration; it must fill the batch"):
        samples(Ended(9), 2, shuffle=False)


def test_a_shape_may_be_a_list() -> None:
    dataset = Numbers(4)
    dataset.input_shape = list(dataset.input_shape)  # type: ignore[assignment]
    assert samples(dataset, 2, shuffle=False) == [[0, 1], [2, 3]]
