"""What a wrong use is, and the files and names that those in wrong_uses.py need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidnn import Trainer, nn, optim
from minidnn.codec.zvc import pack, unpack
from minidnn.data import from_arrays, open_data
from minidnn.device.host import HostDevice
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.memory.pinned import check_host_limits
from minidnn.memory.pool import Pool
from minidnn.models import create
from minidnn.profile.gpus import named_gpu
from minidnn.profile.model import modelled
from minidnn.schedule.check import verify


@dataclass(frozen=True)
class Use:
    """A wrong use as it is typed, the class of the error, and its sentence."""

    typed: str
    kind: str
    sentence: str

    @property
    def command(self) -> bool:
        """Whether it is a command line."""
        return self.typed.startswith("minidnn ")


MODEL_FILE = '''
from minidnn import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), input_shape=(1, 8, 8))

def parts():
    return [nn.Flatten(), nn.Linear(64, 10)]

def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), input_shape=(1, 8, 8))

def empty():
    return nn.Sequential(nn.Flatten(), nn.ReLU(), input_shape=(1, 8, 8))

def fickle():  # not the same network each time
    import numpy
    made = net()
    made[1].parameters["weight"].init = lambda rng, shape: numpy.random.standard_normal(shape)
    return made
'''


def prepare(folder: Path) -> None:
    """The files that the commands name."""
    (folder / "net.py").write_text(MODEL_FILE)
    (folder / "broken.py").write_text("def net(:\n")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "empty.json").write_text("")
    images, labels = np.ones((8, 1, 8, 8), np.float32), np.arange(8)
    np.savez(folder / "few.npz", x=images, y=labels[:3])
    np.savez(folder / "nan.npz", x=images * np.nan, y=labels)
    np.savez(folder / "signed.npz", x=images, y=labels - 5)
    (folder / "cut.npz").write_bytes((folder / "few.npz").read_bytes()[:200])
    (folder / "weights.safetensors").write_bytes(b"\0" * 4)
    (folder / "trace.jsonl").write_text('{"allocate": "a", "nbytes": 512}\n{"free": "b"}\n')
    graph = build(
        create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), Target(), optimizer=optim.SGD(0.01, momentum=0.9)
    )
    modelled(graph, named_gpu("k40")).save(folder / "smallvgg.json")
    digits = open_data("digits")
    with Trainer(create("smallnet"), nn.CrossEntropyLoss(), optim.SGD(0.01), 64, device="host") as trainer:
        trainer.fit(digits, steps=1, checkpoint=folder / "run", evaluate_epochs=False)


def names() -> dict[str, Any]:
    """What the Python uses refer to. The caller closes `trainer`."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3), input_shape=(1, 6, 6))

    x, y = np.ones((4, 1, 6, 6), np.float32), np.array([0, 1, 2, 0])
    loss, sgd = nn.CrossEntropyLoss(), optim.SGD(0.1)
    block = (pool := Pool(4096)).allocate(512)
    pool.free(block)
    packed = pack(np.zeros(64, np.float32))
    packed.release()
    return {
        "np": np, "nn": nn, "optim": optim, "Trainer": Trainer, "open_data": open_data, "from_arrays": from_arrays,
        "HostDevice": HostDevice, "check_host_limits": check_host_limits, "Pool": Pool, "verify": verify,
        "unpack": unpack, "replace": replace, "net": network(), "loss": loss, "sgd": sgd, "x": x, "y": y,
        "data": from_arrays("digits", (x, y), test_samples=0), "pool": pool, "freed": block, "released": packed,
        "trainer": Trainer(network(), loss, sgd, batch=4, device="host", memory="vdnn:all(m)"),
    }  # fmt: skip
