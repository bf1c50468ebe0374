"""Data from files: IDX (MNIST and its kin), the CIFAR binary format, NumPy's .npy and .npz."""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.arguments import shown
from minidnn.data.dataset import Data, Shape, format_shape, from_arrays
from minidnn.errors import DataError

Pair = tuple[NDArray[Any], NDArray[Any]]

# The third byte of an IDX file names the type of its numbers, which are stored high byte first.
_IDX_MOST = 4  # dimensions
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> NDArray[Any]:
    """The array of an IDX file, plain or .gz. Raises DataError where it is missing, truncated or something else.

    Source: the format's description on the MNIST page of Y. LeCun, C. Cortes, C. Burges.
    """
    try:
        payload = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except EOFError:
        raise DataError(f"{path} is truncated: its compressed data end too early; get the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is no valid .gz file ({error}); get the file again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a file that can be read") from None
    magic = payload[:4]
    dtype = _IDX_TYPES.get(magic[2]) if len(magic) == 4 and magic[:2] == b"\0\0" else None
    if dtype is None or magic[3] == 0:
        raise DataError(
            f"{path} is no IDX file: it begins with {magic.hex(' ') or 'nothing'}, "
            "and images of bytes must begin with 00 00 08 03, labels with 00 00 08 01"
        )
    rank = magic[3]
    if rank > _IDX_MOST:
        raise DataError(f"{path} says that it has {rank} dimensions; images must have 3 or 4 and labels 1")
    header = 4 + 4 * rank
    if len(payload) < header:
        raise DataError(f"{path} is truncated: it ends within its header; get the file again")
    shape = struct.unpack(f">{rank}I", payload[4:header])
    expected = header + prod(shape) * np.dtype(dtype).itemsize
    if len(payload) != expected:
        fault = "truncated" if len(payload) < expected else "too long"
        raise DataError(
            f"{path} is {fault}: its header promises {format_shape(shape)} numbers, {expected} bytes in all, "
            f"and it has {len(payload)}; get the file again"
        )
    array = np.frombuffer(payload, dtype, offset=header).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def is_idx(directory: Path) -> bool:
    """Whether the directory has IDX training images under their usual name."""
    return _idx_file(directory, "train", "images") is not None


def open_idx(directory: Path) -> Data:
    """`train-images-idx3-ubyte[.gz]`, `train-labels-idx1-ubyte[.gz]` and, if there, the same with `t10k` or `test`."""
    test = next((part for part in ("t10k", "test") if _idx_file(directory, part, "images")), None)
    return from_arrays(directory.name, _idx_pair(directory, "train"), _idx_pair(directory, test) if test else None)


def is_cifar(directory: Path) -> bool:
    """Whether the directory has the training files of CIFAR-10 or CIFAR-100 in the binary format."""
    return any(directory.glob("data_batch_*.bin")) or (directory / "train.bin").is_file()


def open_cifar(directory: Path) -> Data:
    """`data_batch_*.bin` and `test_batch.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100, its fine labels).

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), binary version.
    """
    batches = sorted(directory.glob("data_batch_*.bin"))
    labels, classes, test = (1, 10, "test_batch.bin") if batches else (2, 100, "test.bin")
    parts = [_cifar_file(path, labels) for path in batches or [directory / "train.bin"]]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    held_out = _cifar_file(directory / test, labels) if (directory / test).is_file() else None
    return from_arrays(directory.name, (x, y), held_out, classes=classes)


def open_npz(path: Path, input_shape: Shape | None = None) -> Data:
    """A .npz file with `x_train`, `y_train` and, if there, `x_test`, `y_test`; or with `x` and `y`.

    x is [samples, C, H, W], [samples, H, W, C], [samples, H, W], or flat [samples, N] with `input_shape`; y is
    [samples]. Members of an uncompressed file are memory-mapped.
    """
    _check_readable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            train, test = _array_names(path, set(members))
            arrays = {name: _npz_member(path, archive, members[name]) for name in (*train, *test)}
    except DataError:
        raise
    except Exception as error:  # of a damaged file, whatever the first reader trips over: no list would be complete
        raise DataError(f"cannot read {path} as .npz: {_reason(error)}; write it again with numpy.savez") from None
    return _from_named(path, arrays, train, test, input_shape)


def is_npy(directory: Path) -> bool:
    """Whether the directory has `x.npy` or `x_train.npy`."""
    return any((directory / name).is_file() for name in ("x.npy", "x_train.npy"))


def open_npy(directory: Path, input_shape: Shape | None = None) -> Data:
    """A directory with the arrays of `open_npz`, each in its own .npy file, memory-mapped."""
    train, test = _array_names(directory, {path.stem for path in directory.glob("*.npy")})
    arrays = {}
    for name in (*train, *test):
        path = directory / f"{name}.npy"
        _check_readable(path)
        try:
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # as above
            raise DataError(f"cannot read {path} as .npy: {_reason(error)}; write it again with numpy.save") from None
    return _from_named(directory, arrays, train, test, input_shape)


def _check_readable(path: Path) -> None:
    """Raises DataError for a file that cannot be opened: to write it again would be no help."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a file that can be read") from None


def _reason(error: Exception) -> str:
    """What a library says of a file, without its advice on further lines."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(said.splitlines()), "") or type(error).__name__


def _idx_file(directory: Path, part: str, content: str) -> Path | None:
    name = re.compile(rf"{part}-{content}[-.]idx\d-ubyte(\.gz)?")
    return next((path for path in sorted(directory.iterdir()) if name.fullmatch(path.name)), None)


def _idx_pair(directory: Path, part: str) -> Pair:
    paths = [_idx_file(directory, part, content) for content in ("images", "labels")]
    if paths[0] is None or paths[1] is None:
        raise DataError(
            f"{directory} has {part} images but no labels; {part}-labels-idx1-ubyte (or .gz) must lie beside them"
        )
    return _nchw(paths[0], read_idx(paths[0]), None), read_idx(paths[1])


def _cifar_file(path: Path, labels: int) -> Pair:
    """Images [records, 3, 32, 32] and labels [records] of one file.

    `labels` bytes precede each image; the last of them is the label to learn (CIFAR-100 has the coarse one first).
    """
    record = labels + 3 * 32 * 32
    try:
        payload = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a file that can be read") from None
    if len(payload) == 0 or len(payload) % record:
        raise DataError(
            f"{path} is truncated or no CIFAR file: {len(payload)} bytes are no whole number of records "
            f"of {record} bytes; get the file again"
        )
    records = payload.reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def _array_names(path: Path, present: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the training arrays and of the test arrays (none: empty)."""
    train = ("x_train", "y_train") if "x_train" in present else ("x", "y")
    test = ("x_test", "y_test") if "x_test" in present else ()
    missing = [name for name in (*train, *test) if name not in present]
    if missing:
        raise DataError(
            f"{path.resolve()} has no array {shown(missing[0])} (it has {', '.join(sorted(present)) or 'none'}); "
            "name the arrays x and y, or x_train, y_train, x_test and y_test"
        )
    return train, test


def _npz_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """One array of the archive: memory-mapped where its bytes lie in the file as they are, otherwise read."""
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if info.compress_type != zipfile.ZIP_STORED or version not in ((1, 0), (2, 0)):
            with archive.open(info) as whole:
                return np.asarray(np.lib.format.read_array(whole, allow_pickle=False))
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(member)
        header = member.tell()
    if dtype.hasobject or 0 in shape:
        with archive.open(info) as whole:
            return np.asarray(np.lib.format.read_array(whole, allow_pickle=False))
    with path.open("rb") as file:
        # A member's data follow its local header: 30 bytes, which end in two lengths, a name and an extra field.
        file.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<2H", file.read(4))
    start = info.header_offset + 30 + name_length + extra_length + header
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _from_named(
    path: Path,
    arrays: dict[str, NDArray[Any]],
    train: tuple[str, ...],
    test: tuple[str, ...],
    input_shape: Shape | None,
) -> Data:
    def pair(names: tuple[str, ...]) -> Pair:
        x, y = (arrays[name] for name in names)
        return _nchw(path, x, input_shape), y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y

    return from_arrays(path.stem, pair(train), pair(test) if test else None)


def _nchw(path: Path, x: NDArray[Any], input_shape: Shape | None) -> NDArray[Any]:
    """x as a view [samples, C, H, W]; the colours may come last, one channel may have no axis, samples may be flat."""
    if input_shape is not None and x.shape[1:] != input_shape:
        if x.ndim == 4 and (x.shape[3], x.shape[1], x.shape[2]) == input_shape:
            return np.moveaxis(x, 3, 1)
        if x.ndim == 2 and x.shape[1] == prod(input_shape):
            return x.reshape(-1, *input_shape)
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        return np.moveaxis(x, 3, 1)
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        return x
    raise DataError(
        f"{path}: images have shape {list(x.shape)}; they must be [samples, channels, height, width], "
        "[samples, height, width], or flat with an input shape of as many numbers"
    )
