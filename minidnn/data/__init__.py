"""Data: where samples come from (`open_data`, `from_arrays`, any `Dataset`) and how they reach the device (`Loader`).

| `open_data(...)` of | is |
|---|---|
| `digits` | the UCI handwritten digits, 1x8x8, which come with minidnn |
| `synthetic:classes=10,length=512` | random images of the input shape that can be learned; made beforehand |
| a directory with `train-images-idx3-ubyte[.gz]` ... | IDX files: MNIST, Fashion-MNIST |
| a directory with `data_batch_1.bin` ... or `train.bin` | CIFAR-10 or CIFAR-100, binary version |
| a `.npz` file; `x.npy`, or the directory it is in | arrays `x`, `y` or `x_train`, `y_train`, `x_test`, `y_test` |
| a directory of folders, or with `train` and `val` | images, one folder per class |

Where there is no test set, a stratified tenth is held out as one, the same in every run. Images of bytes are brought to
mean 0 and deviation 1 per channel.
"""

from minidnn.data.builtin import digits, synthetic
from minidnn.data.dataset import Arrays, Augmented, Data, Dataset, Shape, from_arrays
from minidnn.data.files import read_idx
from minidnn.data.images import ImageFolder
from minidnn.data.loader import Loader, Slot, batch_count
from minidnn.data.randomness import epoch_order
from minidnn.data.source import open_data

__all__ = [
    "Arrays",
    "Augmented",
    "Data",
    "Dataset",
    "ImageFolder",
    "Loader",
    "Shape",
    "Slot",
    "batch_count",
    "digits",
    "epoch_order",
    "from_arrays",
    "open_data",
    "read_idx",
    "synthetic",
]
