"""Synthetic data, the built-in digits, arrays, and what `--data` accepts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.data import Arrays, Data, Dataset, digits, from_arrays, open_data, synthetic
from minidnn.data.randomness import Use, holdout, random_words
from minidnn.errors import ArgumentError, DataError

Array = np.ndarray[Any, Any]


def read_all(dataset: Dataset) -> tuple[Array, Array]:
    x = np.full((len(dataset), *dataset.input_shape), np.nan, np.float32)
    y = np.full(len(dataset), -1)
    dataset.read(np.arange(len(dataset)), x, y)
    return x, y


def nearest_mean_accuracy(data: Data) -> float:
    """How well the mean image of each class, taken from the training set, tells the test set's classes apart."""
    x, y = read_all(data.train)
    means = np.stack([x[y == label].mean(axis=0).ravel() for label in range(data.classes or 0)])
    x, y = read_all(data.split("test"))
    distances = ((x.reshape(len(x), 1, -1) - means) ** 2).sum(axis=2)
    return float((distances.argmin(axis=1) == y).mean())


def digest(*arrays: Array) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def test_digits_are_the_same_1437_and_360_images_everywhere() -> None:
    data = digits()
    assert (len(data.train), len(data.split("test")), data.input_shape, data.classes) == (1437, 360, (1, 8, 8), 10)
    assert np.bincount(read_all(data.split("test"))[1]).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    # Published accuracies depend on the split: labels and ink (the rank of a pixel's value) pin it.
    x, y = read_all(data.split("test"))
    ink = np.unique(x.ravel(), return_inverse=True)[1]
    assert digest(y.astype(np.uint8), ink.astype(np.uint8)) == "9c621aba161f012f"


def test_digits_are_normalized_and_belong_to_their_labels() -> None:
    data = digits()
    x, _ = read_all(data.train)
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-5
    assert nearest_mean_accuracy(data) > 0.85


def test_synthetic_images_can_be_learned() -> None:
    data = synthetic((3, 12, 10), classes=7, length=210)
    assert (len(data.train), len(data.split("test")), data.classes) == (210, 53, 7)
    assert np.bincount(read_all(data.train)[1]).tolist() == [30] * 7
    assert nearest_mean_accuracy(data) > 0.95


def test_synthetic_images_have_a_sane_scale() -> None:
    x, _ = read_all(synthetic((3, 16, 16), length=500).train)
    assert abs(x.mean()) < 0.1
    assert 1.2 < x.std() < 1.6


def test_synthetic_images_follow_from_the_seed() -> None:
    first, again, other = (read_all(synthetic((2, 5, 3), length=9, seed=seed).train)[0] for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert not np.array_equal(first, other)


def test_synthetic_training_and_test_images_differ() -> None:
    data = synthetic((1, 8, 8), length=40)
    assert not np.array_equal(read_all(data.train)[0][:10], read_all(data.split("test"))[0])


def test_large_synthetic_data_repeat_a_bounded_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minidnn.data.builtin._POOL_BYTES", 4 * 64 * 20)
    x, y = read_all(synthetic((1, 8, 8), classes=3, length=1000).train)
    assert len(np.unique(x.reshape(1000, -1), axis=0)) == 20
    assert np.array_equal(x[:20], x[20:40])
    assert np.array_equal(y[:20], y[20:40])


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), share=st.floats(0, 1))
def test_a_holdout_takes_each_class_in_proportion(sizes: list[int], share: float) -> None:
    labels = np.repeat(np.arange(len(sizes)) * 3, sizes)
    count = int(share * len(labels))
    kept, held_out = holdout(labels, count)
    assert len(held_out) == count
    assert sorted([*kept, *held_out]) == list(range(len(labels)))
    for label, size in enumerate(sizes):
        taken = int((labels[held_out] == 3 * label).sum())
        assert abs(taken - size * count / len(labels)) <= 1


def test_random_words_never_depend_on_what_else_was_drawn() -> None:
    words = random_words(Use.AUGMENT, 4, seed=5, epoch=6, index=7)
    assert words[:2].tolist() == random_words(Use.AUGMENT, 2, seed=5, epoch=6, index=7).tolist()
    neighbours = [(4, 6, 7), (5, 7, 7), (5, 6, 8), (6, 5, 7)]
    others = [random_words(Use.AUGMENT, 4, seed=s, epoch=e, index=i) for s, e, i in neighbours]
    others += [random_words(use, 4, seed=5, epoch=6, index=7) for use in Use if use is not Use.AUGMENT]
    assert not any(set(words.tolist()) & set(other.tolist()) for other in others)


def test_bytes_are_normalized_per_channel_over_the_training_samples() -> None:
    x = np.zeros((40, 2, 3, 3), np.uint8)
    x[:, 0] = np.random.default_rng(0).integers(0, 256, (40, 3, 3))
    x[:, 1] = 7  # a channel that never changes must not become NaN
    data = from_arrays("bytes", (x, np.arange(40) % 2), (x, np.arange(40) % 2))
    got, _ = read_all(data.train)
    mean, std = x[:, 0].mean(), x[:, 0].std()
    np.testing.assert_allclose(got[:, 0], (x[:, 0] - mean) / std, rtol=1e-5, atol=1e-6)
    assert (got[:, 1] == 0).all()
    assert np.array_equal(read_all(data.split("test"))[0], got)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.bool_])
def test_other_images_are_taken_as_they_are(dtype: type) -> None:
    x: Array = (np.arange(2 * 3 * 2 * 2) - 7).reshape(2, 3, 2, 2).astype(dtype)
    got, labels = read_all(from_arrays("x", (x, np.array([1, 0], np.uint8))).train)
    assert np.array_equal(got, x.astype(np.float32))
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_rows_are_read_in_the_order_asked_for(layout: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 2, 2, 3)).astype(np.float32)
    images = x if layout == "contiguous" else np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    dataset = Arrays(images, np.arange(6), classes=6, rows=np.array([5, 3, 1]))
    out, labels = np.empty((2, 2, 2, 3), np.float32), np.empty(2, np.int64)
    dataset.read(np.array([2, 0]), out, labels)
    assert np.array_equal(out, x[[1, 5]])
    assert labels.tolist() == [1, 5]
    with pytest.raises(IndexError):
        dataset.read(np.array([3, 0]), out, labels)


def test_a_tenth_is_held_out_where_there_is_no_test_set() -> None:
    x = np.arange(30, dtype=np.float32).reshape(30, 1, 1, 1)
    data = from_arrays("x", (x, np.arange(30) % 3))
    train, test = read_all(data.train)[0].ravel(), read_all(data.split("test"))[0].ravel()
    assert len(test) == 3
    assert sorted([*train, *test]) == list(range(30))


def test_data_without_test_samples_say_so() -> None:
    data = from_arrays("tiny", (np.zeros((4, 1, 1, 1)), np.arange(4)))
    assert data.test is None
    with pytest.raises(DataError, match="tiny has no test samples"):
        data.split("test")
    with pytest.raises(ArgumentError, match="split is 'valid'; it must be 'train' or 'test'"):
        data.split("valid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (np.zeros((0, 1, 2, 2)), np.zeros(0, int), "x is empty; it needs at least one sample"),
        (np.zeros((3, 2, 2)), np.zeros(3, int), r"images are float64 of shape \[3, 2, 2\]; they must be real numbers"),
        (np.zeros((3, 1, 0, 2)), np.zeros(3, int), "images are float64 of shape"),
        (np.zeros((3, 1, 2, 2), complex), np.zeros(3, int), "images are complex128"),
        (np.zeros((3, 1, 2, 2)), np.zeros(4, int), r"labels are int64 of shape \[4\]; .* each of the 3 images"),
        (np.zeros((3, 1, 2, 2)), np.zeros(3), "labels are float64"),
        (np.zeros((3, 1, 2, 2)), np.array([0, 1, -1]), "label -1 of sample 2 is out of range; labels must be 0 to"),
    ],
)
def test_wrong_arrays_are_named(x: Array, y: Array, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_arrays("x", (x, y))


def test_a_pair_in_place_of_the_name_is_not_taken_for_one() -> None:
    x, y = np.zeros((4, 1, 2, 2), np.float32), np.arange(4)
    with pytest.raises(ArgumentError, match=r"name is .*; it must be a string, in front of the pairs of arrays"):
        from_arrays((x, y), (x, y))  # type: ignore[arg-type]


def test_a_label_beyond_the_classes_is_named() -> None:
    with pytest.raises(DataError, match="label 10 of sample 1 is out of range; with 10 classes it must be 0 to 9"):
        Arrays(np.zeros((2, 1, 1, 1)), np.array([9, 10]), classes=10)


def test_training_and_test_images_must_agree() -> None:
    y = np.zeros(2, int)
    with pytest.raises(DataError, match="training images are 1x2x2 and test images 1x2x3"):
        from_arrays("x", (np.zeros((2, 1, 2, 2)), y), (np.zeros((2, 1, 2, 3)), y))


def test_open_data_knows_the_built_in_names() -> None:
    assert open_data("digits", input_shape=(1, 8, 8)).name == "digits"
    data = open_data("synthetic:classes=4,length=12", input_shape=(2, 5, 6), seed=3)
    assert (data.input_shape, data.classes, len(data.train)) == ((2, 5, 6), 4, 12)
    expected = read_all(synthetic((2, 5, 6), classes=4, length=12, seed=3).train)[0]
    assert np.array_equal(read_all(data.train)[0], expected)
    assert open_data("synthetic:shape=3x4x5").input_shape == (3, 4, 5)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("synthetic", "data 'synthetic' needs an input shape"),
        ("synthetic:size=3", "'size=3' is no option; write classes=10, length=512 or shape=3x64x64"),
        ("synthetic:classes=ten", "classes is 'ten'; it must be a whole number of at least 1"),
        ("synthetic:shape=3x4x5,length=0", "length is '0'; it must be a whole number of at least 1"),
        ("synthetic:shape=3x4x5,classes=0", "classes is '0'"),
        ("synthetic:shape=3x0x5", "shape is '3x0x5'"),
    ],
)
def test_a_wrong_synthetic_option_is_named(spec: str, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        open_data(spec)


def test_a_shape_that_contradicts_the_network_is_refused() -> None:
    with pytest.raises(ArgumentError, match="asks for 3x4x5, but the network takes 3x8x8; leave shape out"):
        open_data("synthetic:shape=3x4x5", input_shape=(3, 8, 8))
    with pytest.raises(DataError, match="data 'digits' are images of 1x8x8, not 3x224x224"):
        open_data("digits", input_shape=(3, 224, 224))


def test_unknown_data_list_what_works(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data 'mnist' is no known name and no such file .*give digits, synth"):
        open_data("mnist")
    (tmp_path / "notes.txt").write_text("no data")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match="is in no format that minidnn reads; give digits, synthetic"):
            open_data(str(path))


@pytest.mark.parametrize("spec", [None, 5, b"digits", ["digits"], ""])
def test_data_that_are_no_name_and_no_path_are_refused(spec: Any) -> None:
    with pytest.raises(ArgumentError, match=r"data is .*; give digits") as refused:
        open_data(spec)
    assert repr(spec) in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("~nobody-of-this-name/x", "home directory"),
        ("x" * 5000, "File name too long"),
        ("synthetic:shape=1x8x8,length=" + "9" * 5000, "must be a whole number of at least 1 and at most"),
        ("synthetic:shape=1x8x8,classes=99999999999", "must be a whole number of at least 1 and at most"),
        ("synthetic:shape=1x00x8", "shape is '1x00x8'"),
    ],
)
def test_a_path_or_number_beyond_reason_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=sentence):
        open_data(spec)


@pytest.mark.parametrize("shape", ["1x8x8", (1, 8), (0, 1, 1), (1, 8.0, 8), 5])
def test_an_input_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(ArgumentError, match=r"input_shape is .*; it must be \(C, H, W\), each 1 or more"):
        open_data("synthetic", input_shape=shape)


def test_a_path_object_names_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "sét 数.npz", x=np.ones((4, 1, 2, 2)), y=np.zeros(4, int))
    assert len(open_data(tmp_path / "sét 数.npz").train) == 4


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.array([0, 10**12]), "label 1000000000000 of sample 1 is out of range; labels must be 0 to"),
        (np.array([0, 2**64 - 1], np.uint64), "label 18446744073709551615 of sample 1 is out of range"),
        (np.array([-3, -1]), "label -3 of sample 0 is out of range"),
        ([0, 1], "labels are a list; they must be a NumPy array"),
    ],
)
def test_labels_that_are_no_classes_are_named(labels: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_arrays("set", (np.ones((2, 1, 2, 2)), labels))


X, Y = np.ones((4, 2, 3, 3)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("call", "arguments", "options", "sentence"),
    [
        (from_arrays, ("set", None), {}, "train is NoneType; it must be a pair of arrays"),
        (from_arrays, ("set", (X, Y)), {"test": X}, "test is ndarray; it must be a pair of arrays"),
        (from_arrays, ("set", (X, Y)), {"classes": "2"}, "classes is '2'; it must be an int"),
        (from_arrays, ("set", (X, Y)), {"test_samples": 4}, "test_samples is 4; it must be an int from 0 to 3"),
        (from_arrays, ("set", (X, Y)), {"test_samples": -1}, "test_samples is -1"),
        (Arrays, (X, Y), {"mean": np.ones(3)}, r"mean has shape \[3\]; it must be a finite number for each channel"),
        (Arrays, (X, Y), {"std": np.zeros(2)}, r"std is \[0.0, 0.0\]; each must be above 0"),
        (Arrays, (X, Y), {"rows": np.array([0, 4])}, "rows go from 0 to 4; they must be 0 to 3"),
        (synthetic, ((1, 2, 2),), {"seed": 1.5}, "seed is 1.5; it must be an int"),
        (synthetic, ((1, 2),), {}, r"shape is \(1, 2\)"),
    ],
)
def test_a_wrong_argument_of_arrays_is_named(call: Any, arguments: Any, options: Any, sentence: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=sentence):
        call(*arguments, **options)


def test_numbers_beyond_float32_become_infinite_without_a_warning() -> None:
    data = from_arrays("set", (np.full((4, 1, 2, 2), 1e300), np.zeros(4, int)), test_samples=0)
    assert np.isinf(read_all(data.train)[0]).all()
