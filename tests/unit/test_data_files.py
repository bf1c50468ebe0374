"""IDX, CIFAR and NumPy files, whole and broken."""

from __future__ import annotations

import gzip
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from minidnn.data import open_data, read_idx
from minidnn.errors import DataError

from .test_data_sources import Array, read_all

RNG = np.random.default_rng(0)


def idx_bytes(array: Array, code: int = 0x08) -> bytes:
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def raw_difference(got: Array, x: Array) -> float:
    """How far `got` is from being x up to one scale and shift per channel, as normalization makes it."""
    worst = 0.0
    for channel in range(x.shape[1]):
        a, b = got[:, channel].astype(float), x[:, channel].astype(float)
        worst = max(worst, float(np.abs((a - a.mean()) / a.std() - (b - b.mean()) / b.std()).max()))
    return worst


@pytest.mark.parametrize(
    ("code", "dtype"), [(8, np.uint8), (9, np.int8), (11, np.int16), (12, np.int32), (13, np.float32), (14, np.float64)]
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_of_every_type_are_read(tmp_path: Path, code: int, dtype: type, suffix: str) -> None:
    array: Array = (RNG.standard_normal((3, 4, 5)) * 50).astype(dtype)
    path = tmp_path / f"array{suffix}"
    payload = idx_bytes(array, code)
    path.write_bytes(gzip.compress(payload) if suffix else payload)
    got = read_idx(path)
    assert got.dtype == dtype
    assert np.array_equal(got, array)


def write_mnist(directory: Path, *, suffix: str = "", dot: str = "-", test: str | None = "t10k") -> dict[str, Array]:
    arrays = {}
    for part, count in (("train", 20), (test, 7)):
        if part is None:
            continue
        arrays[part + "x"] = RNG.integers(0, 256, (count, 6, 5), np.uint8)
        arrays[part + "y"] = (np.arange(count) % 10).astype(np.uint8)
        for content, array, rank in (("images", arrays[part + "x"], 3), ("labels", arrays[part + "y"], 1)):
            payload = idx_bytes(array)
            path = directory / f"{part}-{content}{dot}idx{rank}-ubyte{suffix}"
            path.write_bytes(gzip.compress(payload) if suffix else payload)
    return arrays


@pytest.mark.parametrize(("suffix", "dot", "test"), [("", "-", "t10k"), (".gz", "-", "t10k"), ("", ".", "test")])
def test_a_directory_of_idx_files(tmp_path: Path, suffix: str, dot: str, test: str) -> None:
    arrays = write_mnist(tmp_path, suffix=suffix, dot=dot, test=test)
    data = open_data(str(tmp_path), input_shape=(1, 6, 5))
    assert (len(data.train), len(data.split("test")), data.classes, data.name) == (20, 7, 10, tmp_path.name)
    for part, dataset in (("train", data.train), (test, data.split("test"))):
        x, y = read_all(dataset)
        assert raw_difference(x, arrays[part + "x"][:, None]) < 1e-4
        assert y.tolist() == arrays[part + "y"].tolist()


def test_idx_files_without_a_test_set_hold_some_out(tmp_path: Path) -> None:
    write_mnist(tmp_path, test=None)
    data = open_data(str(tmp_path))
    assert (len(data.train), len(data.split("test"))) == (18, 2)


def test_idx_images_need_labels(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has t10k images but no labels; t10k-labels-idx1-ubyte"):
        open_data(str(tmp_path))


def test_idx_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(19, np.uint8)))
    with pytest.raises(DataError, match=r"labels are uint8 of shape \[19\]; .*each of the 20 images"):
        open_data(str(tmp_path))


GOOD = idx_bytes(np.zeros((4, 3, 3), np.uint8))


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (
            GOOD[:-1],
            "is truncated: its header promises 4x3x3 numbers, 52 bytes in all, and it has 51; get the file again",
        ),
        (GOOD + b"\0", "is too long: its header promises 4x3x3 numbers, 52 bytes in all, and it has 53"),
        (GOOD[:10], "is truncated: it ends within its header"),
        (b"\x89PNG\r\n", "is no IDX file: it begins with 89 50 4e 47, and images of bytes must begin with 00 00 08 03"),
        (b"\0\0\x0a\x03" + GOOD[4:], "is no IDX file: it begins with 00 00 0a 03"),
        (b"\0\0\x08\0" + GOOD[4:], "is no IDX file: it begins with 00 00 08 00"),
        (b"\0\0", "is no IDX file: it begins with 00 00,"),
        (b"", "is no IDX file: it begins with nothing"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_broken_idx_file_is_named(tmp_path: Path, payload: bytes, sentence: str, suffix: str) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(gzip.compress(payload) if suffix else payload)
    with pytest.raises(DataError, match=f"{path.name} {sentence}"):
        read_idx(path)


def corrupt(packed: bytes) -> bytes:
    return packed[:14] + bytes(byte ^ 0x55 for byte in packed[14:20]) + packed[20:]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda packed: packed[:-12], "is truncated: its compressed data end too early"),
        (corrupt, r"is no valid \.gz file"),
        (lambda packed: packed[:-8] + b"\0" * 8, r"is no valid \.gz file"),
        (lambda packed: b"plain" + packed, r"is no valid \.gz file"),
    ],
)
def test_a_broken_gz_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], sentence: str) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(damage(gzip.compress(idx_bytes(RNG.integers(0, 256, (20, 9, 9), np.uint8)))))
    with pytest.raises(DataError, match=f"broken.gz {sentence}"):
        read_idx(path)


def forbidden(path: Path, mode: str = "r") -> None:
    """Opens no file, as for a user without permission; the superuser would have it."""
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("name", ["set.npz", "x.npy", "train-images-idx3-ubyte"])
def test_a_file_that_cannot_be_opened_is_not_to_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for file in (name, "y.npy", "train-labels-idx1-ubyte"):
        (tmp_path / file).write_bytes(b"")
    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(DataError, match=rf"^cannot read .*{name}: Permission denied; name a file that can be read$"):
        open_data(tmp_path / name if "." in name else tmp_path)


def test_a_missing_idx_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nothing: No such file or directory"):
        read_idx(tmp_path / "nothing")


def write_cifar(path: Path, count: int, labels: int) -> tuple[Array, Array]:
    x = RNG.integers(0, 256, (count, 3, 32, 32), np.uint8)
    y = RNG.integers(0, 10 if labels == 1 else 100, count)
    coarse = np.full((count, labels - 1), 255)
    path.write_bytes(np.hstack([coarse, y[:, None], x.reshape(count, -1)]).astype(np.uint8).tobytes())
    return x, y


def test_cifar_10_joins_its_training_files(tmp_path: Path) -> None:
    parts = [write_cifar(tmp_path / f"data_batch_{part}.bin", 4, 1) for part in (1, 2, 3)]
    test = write_cifar(tmp_path / "test_batch.bin", 5, 1)
    data = open_data(str(tmp_path), input_shape=(3, 32, 32))
    assert (len(data.train), len(data.split("test")), data.classes) == (12, 5, 10)
    x, y = read_all(data.train)
    assert raw_difference(x, np.concatenate([part[0] for part in parts])) < 1e-4
    assert y.tolist() == np.concatenate([part[1] for part in parts]).tolist()
    assert read_all(data.split("test"))[1].tolist() == test[1].tolist()


def test_cifar_100_takes_the_fine_labels(tmp_path: Path) -> None:
    x, y = write_cifar(tmp_path / "train.bin", 20, 2)
    write_cifar(tmp_path / "test.bin", 3, 2)
    data = open_data(str(tmp_path))
    got, labels = read_all(data.train)
    assert (data.classes, labels.tolist()) == (100, y.tolist())
    assert raw_difference(got, x) < 1e-4


@pytest.mark.parametrize("size", [0, 3072, 3 * 3073 - 1])
def test_a_broken_cifar_file_is_named(tmp_path: Path, size: int) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(size))
    with pytest.raises(
        DataError, match=rf"data_batch_1.bin is truncated .*: {size} bytes are no whole number of records"
    ):
        open_data(str(tmp_path))


def test_a_cifar_file_with_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match="label 10 of sample 0 is out of range; with 10 classes"):
        open_data(str(tmp_path))


X = RNG.standard_normal((20, 3, 4, 5)).astype(np.float32)
Y = np.arange(20) % 4


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_with_both_splits(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "set.npz", x_train=X, y_train=Y, x_test=X[:6] + 1, y_test=Y[:6, None], other=np.arange(3))
    data = open_data(str(tmp_path / "set.npz"), input_shape=(3, 4, 5))
    assert (data.name, data.classes) == ("set", 4)
    assert np.array_equal(read_all(data.train)[0], X)
    assert np.array_equal(read_all(data.split("test"))[0], X[:6] + 1)
    assert read_all(data.split("test"))[1].tolist() == Y[:6].tolist()


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_arrays_of_x_and_y_are_memory_mapped(tmp_path: Path, kind: str) -> None:
    x = X.copy()
    x[11, 2, 3, 4] = 1234.5
    if kind == "npz":
        path = tmp_path / "set.npz"
        np.savez(path, x=x, y=Y)
    else:
        path = tmp_path / "x.npy"
        np.save(path, x)
        np.save(tmp_path / "y.npy", Y)
    data = open_data(str(path))
    # A change of the file after opening is seen: nothing was copied to memory.
    at = path.read_bytes().index(np.float32(1234.5).tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.float32(4321.5).tobytes())
    values = [x for dataset in (data.train, data.split("test")) for x in read_all(dataset)[0].ravel()]
    assert len(values) == X.size
    assert 4321.5 in values
    assert 1234.5 not in values


def test_a_directory_of_npy_files(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {"x_train": X, "y_train": Y, "x_test": X[:3], "y_test": Y[:3]}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    for spec in (tmp_path, tmp_path / "x_train.npy"):
        data = open_data(str(spec))
        assert np.array_equal(read_all(data.train)[0], X)
        assert np.array_equal(read_all(data.split("test"))[0], X[:3])


@pytest.mark.parametrize(
    ("stored", "input_shape", "expected"),
    [
        (X.transpose(0, 2, 3, 1), None, X),
        (X.transpose(0, 2, 3, 1), (3, 4, 5), X),
        (X.reshape(20, -1), (3, 4, 5), X),
        (X[:, 0], None, X[:, :1]),
        (np.asfortranarray(X), None, X),
        (X.transpose(0, 3, 1, 2), (5, 3, 4), X.transpose(0, 3, 1, 2)),
        (X.transpose(0, 3, 2, 1), (3, 5, 4), X.transpose(0, 1, 3, 2)),
        (X.astype(">f4"), None, X),
    ],
)
def test_npz_layouts(tmp_path: Path, stored: Array, input_shape: tuple[int, int, int] | None, expected: Array) -> None:
    np.savez(tmp_path / "set.npz", x_train=stored, y_train=Y, x_test=stored, y_test=Y)
    data = open_data(str(tmp_path / "set.npz"), input_shape=input_shape)
    assert np.array_equal(read_all(data.train)[0], expected)


def test_npz_arrays_in_a_zip_with_longer_headers(tmp_path: Path) -> None:
    # Other writers add extra fields before a member's bytes, which move where the mapping begins.
    import io
    import zipfile

    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        for name, array in (("x", X), ("y", Y)):
            info = zipfile.ZipInfo(f"{name}.npy")
            info.extra = struct.pack("<HH3s", 0x7777, 3, b"abc")
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(info, buffer.getvalue())
    data = open_data(str(tmp_path / "set.npz"))
    assert np.array_equal(
        np.unique(np.concatenate([read_all(data.train)[0], read_all(data.split("test"))[0]])), np.unique(X)
    )


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": X}, r"has no array 'y' \(it has x\); name the arrays x and y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "has no array 'y_test'"),
        ({"images": X}, r"has no array 'x' \(it has images\)"),
        ({"x": np.array([{}, {}]), "y": Y[:2]}, "cannot read .* as .npz: Object arrays cannot be loaded"),
        ({"x": X.reshape(20, -1), "y": Y}, r"images have shape \[20, 60\]; they must be"),
        ({"x": X[:0], "y": Y[:0]}, "set is empty"),
        ({"x": X, "y": Y.astype(float)}, "labels are float64"),
    ],
)
def test_a_wrong_npz_file_is_named(tmp_path: Path, arrays: dict[str, Array], sentence: str) -> None:
    np.savez(tmp_path / "set.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=sentence):
        open_data(str(tmp_path / "set.npz"))


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_a_truncated_npz_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x=X, y=Y)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cannot read .*set.npz as .npz: .*; write it again with numpy.savez"):
        open_data(str(path))


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_npy_file_is_named(tmp_path: Path, keep: int) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cannot read .*x.npy as .npy: .*; write it again with numpy.save"):
        open_data(str(tmp_path))


def npy_bytes(header: str, payload: bytes = b"\0" * 64) -> bytes:
    """A .npy file with any text as its header."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + payload


def described(shape: str) -> str:
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    "header",
    [
        described("(1000000000000000, 1, 8, 8)"), described("(99999999999999999999999, 1, 8, 8)"),
        described("(-1, 1, 8, 8)"), described("(1.5, 1)"), described("((1,), 2)"), "{'descr': ", "(" * 500,
        "garbage", "{'descr': __import__('os'), }", "{'descr': 'zz', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4'" + " " * 60000 + ", 'fortran_order': False, 'shape': (1,)}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["npy", "stored", "deflated"])
def test_a_header_that_is_no_header_is_named_in_one_sentence(tmp_path: Path, header: str, kind: str) -> None:
    members = {"x.npy": npy_bytes(header), "y.npy": npy_bytes(described("(3,)").replace("<f4", "<i8"))}
    if kind == "npy":
        for name, content in members.items():
            (tmp_path / name).write_bytes(content)
        path = tmp_path
    else:
        path = tmp_path / "set.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if kind == "stored" else zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    with pytest.raises(DataError, match="cannot read") as refused:
        read_all(open_data(str(path)).train)
    assert "\n" not in str(refused.value)


def test_an_encrypted_npz_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x=np.zeros((4, 1, 2, 2)), y=np.zeros(4, int))
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag, in the member's own header and in the directory's
    content[content.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*set.npz as .npz: .*encrypted"):
        open_data(str(path))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_damaged_byte_of_an_npz_file_gives_another_error(tmp_path: Path, save: Callable[..., None]) -> None:
    path, rng = tmp_path / "set.npz", np.random.default_rng(5)
    save(path, x=rng.random((6, 1, 3, 3), np.float32), y=np.arange(6) % 3)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        with suppress(DataError):  # a flipped bit of a pixel is none
            open_data(str(path))


def test_an_idx_file_of_many_dimensions_is_named(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(bytes([0, 0, 8, 200]) + b"\0\0\0\1" * 200 + b"x")
    with pytest.raises(DataError, match="says that it has 200 dimensions; images must have 3 or 4 and labels 1"):
        read_idx(path)
