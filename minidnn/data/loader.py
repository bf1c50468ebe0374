"""The loader: threads that fill the next batches' buffers while the current batch trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from minidnn.data.dataset import Augmented, Dataset, Floats, Indices, Labels, check_labels, format_shape
from minidnn.data.randomness import epoch_order
from minidnn.errors import ArgumentError, DataError


class _State(Enum):
    FREE = "free"
    LOADED = "being filled, or filled and waiting for its turn"
    HELD = "held by the consumer"


class Slot:
    """Host buffers of one batch: x float32 [batch, C, H, W] and y int64 [batch].

    A loader hands a slot to its consumer, who holds it until `release`; until then nobody writes to it. A slot serves
    one loader at a time: the next epoch's when this one's is closed. A slot still held then stays held.
    """

    def __init__(self, x: Floats, y: Labels) -> None:
        self.x = x
        self.y = y
        self._state = _State.FREE
        self._lock = threading.Lock()
        self._loader: Loader[Any] | None = None

    @property
    def held(self) -> bool:
        """Whether the consumer holds the slot."""
        return self._state is _State.HELD

    def release(self) -> None:
        """Let the slot be filled again: the last copy from it is done. Does nothing where it is not held."""
        # The lock orders a release against the slot's move to the next loader, so that the new one hears of it.
        with self._lock:
            if self.held:
                self._state = _State.FREE
            loader = self._loader
        if loader is not None:
            loader._notify()


S = TypeVar("S", bound=Slot)


class Loader(Generic[S]):
    """The batches of one epoch, in order: an iterator of (slot, rows), rows being the batch's number of samples.

        with Loader(data.train, 64, slots, shuffle=True, seed=0, epoch=3) as batches:
            for slot, rows in batches:
                ...  # slot.x[:rows], slot.y[:rows]
                slot.release()

    The order of the samples is a function of (seed, epoch) alone; `start_batch` begins later in that order. The last
    batch has the rows that remain, unless `drop_last`. `workers` threads fill up to as many slots at once.

    An error while filling reaches the consumer at the batch where it happened. The threads end with the epoch, with
    `close`, or when a `for` loop over the loader is left in any way. Asking for a batch while all slots are held raises
    DataError, because it would never come.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        slots: Sequence[S],
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        start_batch: int = 0,
        *,
        workers: int = 1,
    ) -> None:
        self._batch = batch
        self._end = batch_count(len(dataset), batch, drop_last=drop_last)
        if not 0 <= start_batch <= self._end:
            raise ArgumentError(f"start_batch is {start_batch}; it must be one of 0 to {self._end}")
        if workers < 1:
            raise ArgumentError(f"workers is {workers}; at least one thread must fill the batches")
        _check_slots(dataset, batch, slots)
        self._dataset = dataset.at_epoch(epoch) if isinstance(dataset, Augmented) else dataset
        self._order = epoch_order(len(dataset), shuffle=shuffle, seed=seed, epoch=epoch)
        self._slots = tuple(slots)
        # Taken by itself: between the condition's own __enter__ and its lock an interrupt could leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Guarded by the lock: the next batch to fill, the next to hand out, and the filled ones (or what went wrong).
        self._next_fill = self._next_take = start_batch
        self._filled: dict[int, S | BaseException] = {}
        self._closed = False
        for slot in self._slots:
            with slot._lock:
                slot._loader = self
        self._threads: list[threading.Thread] = []
        try:
            for number in range(workers):
                # A daemon: a loader that its owner forgot to close must not keep the process alive.
                thread = threading.Thread(target=self._work, name=f"loader-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of batches that are still to come."""
        return self._end - self._next_take

    def __enter__(self) -> Loader[S]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[S, int]]:
        # A generator rather than self: it is closed, and the threads with it, as soon as the loop over it is left.
        try:
            while True:
                try:
                    item = next(self)
                except StopIteration:
                    return
                yield item
        finally:
            self.close()

    def __next__(self) -> tuple[S, int]:
        """The next batch: a slot, now held by the caller, and its number of rows."""
        try:
            number, outcome = self._take()
        except BaseException:
            # The end of the epoch, an interrupt or a misuse: none may leave a thread behind.
            self.close()
            raise
        if isinstance(outcome, BaseException):
            self.close()
            raise outcome
        return outcome, len(self._indices(number))

    def close(self) -> None:
        """End the threads and wait for them; batches that nobody took are dropped. May be called again."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for slot in self._slots:
            with slot._lock:
                if slot._loader is self:
                    slot._loader = None
                    if slot._state is _State.LOADED:
                        slot._state = _State.FREE

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _indices(self, number: int) -> Indices:
        return self._order[number * self._batch : (number + 1) * self._batch]

    def _take(self) -> tuple[int, S | BaseException]:
        with self._lock:
            if self._closed or self._next_take == self._end:
                raise StopIteration
            number = self._next_take
            while number not in self._filled:
                if all(slot.held for slot in self._slots):
                    raise DataError(f"all {len(self._slots)} batch slots are held; give one back before the next batch")
                self._changed.wait()
            outcome = self._filled.pop(number)
            if isinstance(outcome, Slot):
                outcome._state = _State.HELD
            self._next_take += 1
            return number, outcome

    def _work(self) -> None:
        """A thread: fill free slots, in the order of the batches, until there is nothing left to fill."""
        while (claim := self._claim()) is not None:
            number, slot = claim
            outcome: S | BaseException = slot
            try:
                self._fill(number, slot)
            except StopIteration:  # at the consumer's it would end the epoch
                outcome = DataError(f"batch {number}: the data set's read raised StopIteration; it must fill the batch")
            except BaseException as error:  # whatever it is, the consumer waits for it
                outcome = error
            with self._lock:
                if outcome is not slot:
                    slot._state = _State.FREE
                    self._next_fill = self._end  # nothing after the failed batch will be asked for
                self._filled[number] = outcome
                self._changed.notify_all()

    def _claim(self) -> tuple[int, S] | None:
        """The next batch to fill and a slot for it, once there is one; None when this thread's work is done."""
        with self._lock:
            while not self._closed and self._next_fill < self._end:
                for slot in self._slots:
                    if slot._state is _State.FREE:
                        slot._state = _State.LOADED
                        self._next_fill += 1
                        return self._next_fill - 1, slot
                self._changed.wait()
            return None

    def _fill(self, number: int, slot: S) -> None:
        indices = self._indices(number)
        rows = len(indices)
        self._dataset.read(indices, slot.x[:rows], slot.y[:rows])
        if self._dataset.classes is not None:
            # A kernel would read outside its arrays where a data set of the user's own breaks its promise.
            check_labels(f"batch {number}", slot.y[:rows], self._dataset.classes)


def batch_count(samples: int, batch: int, *, drop_last: bool = False) -> int:
    """Number of batches in an epoch; the last one may be partial, unless `drop_last`. It is never 0."""
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; it must be a whole number of at least 1")
    if samples < 1:
        raise DataError("the data set is empty; it needs at least one sample")
    if drop_last and samples < batch:
        raise ArgumentError(
            f"batch is {batch}, but there are only {samples} samples; take a smaller batch or the partial one"
        )
    return samples // batch if drop_last else -(-samples // batch)


def _check_slots(dataset: Dataset, batch: int, slots: Sequence[Slot]) -> None:
    if not slots or len({id(slot) for slot in slots}) < len(slots):
        raise ArgumentError(f"slots has {len(slots)} entries; it must hold one or more different slots, best three")
    for slot in slots:
        if slot._loader is not None:
            raise ArgumentError("slots: one belongs to another loader; close that one first")
        x, y = slot.x, slot.y
        fits = len(x) >= batch and len(y) >= batch and x.shape[1:] == tuple(dataset.input_shape) and y.ndim == 1
        if not fits or x.dtype != np.float32 or y.dtype != np.int64:
            raise ArgumentError(
                f"slots: x is {x.dtype} {format_shape(x.shape)} and y {y.dtype} {format_shape(y.shape)}; "
                f"a batch of {batch} needs float32 {format_shape((batch, *dataset.input_shape))} and int64 {batch}"
            )
