"""From what a user types after `--data` to data."""

from __future__ import annotations

import os
from pathlib import Path

from minidnn.arguments import flag, image_shape, shown
from minidnn.data.builtin import digits, synthetic
from minidnn.data.dataset import Data, Shape, format_shape
from minidnn.data.files import is_cifar, is_idx, is_npy, open_cifar, open_idx, open_npy, open_npz
from minidnn.data.images import is_image_folder, open_image_folder
from minidnn.errors import ArgumentError, DataError
from minidnn.units import parse_shape, parse_whole

_WHAT_WORKS = (
    "digits, synthetic[:classes=10,length=512,shape=3x64x64], a .npz file, an x.npy file beside y.npy, "
    "or a directory of IDX files, of CIFAR .bin files, of x.npy and y.npy, or of one folder of images per class"
)


def open_data(
    spec: str | os.PathLike[str], *, input_shape: tuple[int, ...] | None = None, seed: int = 0, augment: bool = True
) -> Data:
    """The data that `spec` names: `digits`, `synthetic[:classes=C,length=N,shape=CxHxW]`, or a path.

    `minidnn.data` lists what a path may lead to. `input_shape` (C, H, W) is the shape of synthetic images, the size
    that images of a folder are cropped to, and for all other data the shape that they must have. `seed` decides
    synthetic images and augmentation.
    Raises DataError, or ArgumentError for a wrong `spec`, with one sentence that says what would work.
    """
    if not isinstance(spec, (str, os.PathLike)) or not isinstance(text := os.fspath(spec), str) or not text:
        raise ArgumentError(f"data is {shown(spec)}; give {_WHAT_WORKS}")
    shape = None if input_shape is None else image_shape(input_shape)
    augment = flag(augment, "augment")
    name, _, options = text.partition(":")
    if name == "synthetic":
        return _open_synthetic(text, options, shape, seed)
    data = digits() if text == "digits" else _open_path(text, shape, seed, augment)
    if shape is not None and data.input_shape != shape:
        raise DataError(
            f"data {shown(text)} are images of {format_shape(data.input_shape)}, not {format_shape(shape)}; "
            f"build the network for an input of {format_shape(data.input_shape)} or choose other data"
        )
    return data


def _open_path(spec: str, input_shape: Shape | None, seed: int, augment: bool) -> Data:
    try:
        path = Path(spec).expanduser()
        if not path.exists():
            raise DataError(
                f"data {shown(spec)} is no known name and no such file or directory exists; "
                f"give {_WHAT_WORKS}"
            )
        if path.suffix == ".npy" and path.stem in ("x", "x_train"):
            return open_npy(path.parent, input_shape)
        if path.suffix == ".npz":
            return open_npz(path, input_shape)
        if path.is_dir():
            path = path.resolve()  # a name for reports, even of "."
            if is_idx(path):
                return open_idx(path)
            if is_cifar(path):
                return open_cifar(path)
            if is_npy(path):
                return open_npy(path, input_shape)
            if is_image_folder(path):
                if input_shape is None:
                    raise ArgumentError(
                        f"data {shown(spec)} are images of any size; "
                        "give --input CxHxW (input_shape in Python), such as 3x224x224"
                    )
                return open_image_folder(path, input_shape, seed=seed, augment=augment)
    except OSError as error:
        raise DataError(f"cannot read data {shown(spec)}: {error.strerror or error}; name another") from None
    except RuntimeError as error:  # ~somebody, who has no home
        raise DataError(f"cannot read data {shown(spec)}: {error}; write the whole path") from None
    raise DataError(f"data {shown(spec)} is in no format that minidnn reads; give {_WHAT_WORKS}")


def _open_synthetic(spec: str, options: str, input_shape: Shape | None, seed: int) -> Data:
    numbers: dict[str, int] = {}
    shape = input_shape
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key in ("classes", "length"):
            numbers[key] = parse_whole(value, f"data {shown(spec)}: {key}")
        elif key == "shape":
            shape = parse_shape(value, f"data {shown(spec)}: shape")
        else:
            raise ArgumentError(
                f"data {shown(spec)}: {shown(option)} is no option; write classes=10, length=512 or shape=3x64x64"
            )
    if shape is None:
        raise ArgumentError(f"data {shown(spec)} needs an input shape; add one, such as synthetic:shape=3x64x64")
    if input_shape is not None and shape != input_shape:
        raise ArgumentError(
            f"data {shown(spec)} asks for {format_shape(shape)}, but the network takes {format_shape(input_shape)}; "
            "leave shape out"
        )
    return synthetic(shape, seed=seed, **numbers)
