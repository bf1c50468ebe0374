"""minidnn trains convolutional networks that are larger than the GPU's memory.

    from minidnn import Trainer, nn, optim

    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    with Trainer(net, nn.CrossEntropyLoss(), optim.SGD(lr=0.1, momentum=0.9), batch=64) as trainer:
        trainer.step(x, y)

The names below are loaded when they are first used, so that `import minidnn` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidnn import data, errors, models, nn, optim, units
    from minidnn.errors import MiniDnnError
    from minidnn.run.trainer import Trainer

__version__ = "0.1.0"

__all__ = ["MiniDnnError", "Trainer", "__version__", "data", "errors", "models", "nn", "optim", "units"]

# Where each public name lives: a module, or a module and the name in it.
_HOMES = {
    "MiniDnnError": ("minidnn.errors", "MiniDnnError"),
    "Trainer": ("minidnn.run.trainer", "Trainer"),
    "data": ("minidnn.data", None),
    "errors": ("minidnn.errors", None),
    "models": ("minidnn.models", None),
    "nn": ("minidnn.nn", None),
    "optim": ("minidnn.optim", None),
    "units": ("minidnn.units", None),
}


def __getattr__(name: str) -> object:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'minidnn' has no attribute {name!r}") from None
    home = import_module(module)
    value = home if attribute is None else getattr(home, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
