"""What users do wrong, each with the sentence they get: the table that docs/errors.md shows.

A use is a command line, split as a shell splits it, or Python in which `net`, `trainer`, `x`, `y` and `data` fit
together. `...` in a sentence stands for what depends on the machine.
"""

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


USES = (
    Use("minidnn trian smallnet", "ArgumentError",
        "there is no command 'trian'; choose one of train, compare, ..."),
    Use("minidnn --jsn", "ArgumentError",
        "minidnn does not understand '--jsn' (see minidnn --help)"),
    Use("minidnn --json train smallnet", "ArgumentError",
        "--json stands in front of train; give it behind the command (see minidnn train --help)"),
    Use("minidnn --batch 8 summary smallnet", "ArgumentError",
        "--batch stands in front of summary; give it behind the command (see minidnn summary --help)"),
    Use("minidnn train resnet50", "ArgumentError",
        "there is no model 'resnet50'; the models are smallnet, smallvgg, alexnet, alexnet_tv, vgg, vgg11, "
        "vgg13, vgg16, vgg19, vgg11_bn, vgg13_bn, vgg16_bn, vgg19_bn, vgg101, vgg116, vgg191, table3, or "
        "path/to/file.py:function"),
    Use("minidnn train smallnet --batchsize 64", "ArgumentError",
        "minidnn train does not understand '--batchsize 64' (see minidnn train --help)"),
    Use("minidnn summary vgg16 --bat 3", "ArgumentError",
        "minidnn summary does not understand '--bat 3' (see minidnn summary --help)"),
    Use("minidnn train smallnet --batch 0", "ArgumentError",
        "--batch: '0' must be a whole number of at least 1 (see minidnn train --help)"),
    Use("minidnn train smallnet --batch 1e3", "ArgumentError",
        "--batch: '1e3' must be a whole number of at least 1 (see minidnn train --help)"),
    Use("minidnn train smallnet --lr nan", "ArgumentError",
        "--lr: 'nan' must be a number of at least 0 (see minidnn train --help)"),
    Use("minidnn train smallnet --lr=-0.1", "ArgumentError",
        "--lr: '-0.1' must be a number of at least 0 (see minidnn train --help)"),
    Use("minidnn train smallnet --lr 1e999", "ArgumentError",
        "--lr: '1e999' must be a number of at least 0 (see minidnn train --help)"),
    Use("minidnn train smallnet --lr 1_000", "ArgumentError",
        "--lr: '1_000' must be a number of at least 0 (see minidnn train --help)"),
    Use("minidnn train smallnet --data=--", "ArgumentError",
        "--data is '--', which is no value; write one, or leave --data out"),
    Use("minidnn train smallnet --data ''", "ArgumentError",
        "data is ''; give digits, synthetic[:classes=10,length=512,shape=3x64x64], a .npz file, an x.npy file beside "
        "y.npy, or a directory of IDX files, of CIFAR .bin files, of x.npy and y.npy, or of one folder of images per "
        "class"),
    Use("minidnn train smallnet --data ~nobody-of-this-name/x", "DataError",
        "cannot read data '~nobody-of-this-name/x': ... home directory...; write the whole path"),
    Use("minidnn train smallnet --budget 8GiBs", "ArgumentError",
        "--budget: '8GiBs' is no size; write a number and a unit, such as 8GiB, 512MiB or 4096 (see minidnn "
        "train --help)"),
    Use("minidnn train smallnet --budget 0.5", "ArgumentError",
        "--budget: '0.5' is no size; write a number and a unit, such as 8GiB, 512MiB or 4096 (see minidnn train "
        "--help)"),
    Use("minidnn train smallnet --device host --batch 64 --budget 100KiB", "BudgetError",
        "memory mode base at batch 64 needs at least 4386304 bytes (4.2 MiB); the budget is 102400 bytes (100.0 "
        "KiB); base, keep and vdnn++ do not fit, vdnn++:all needs the least of them, 2884096 bytes (2.8 MiB); best "
        "may, it plans for the budget"),
    Use("minidnn train smallnet --budget -8GiB", "ArgumentError",
        "--budget: '-8GiB' is below 0; write a size such as 8GiB"),
    Use("minidnn train smallnet --schedule 0:0.1", "ArgumentError",
        "--schedule is '0:0.1'; write constant, cosine, or EVERY:FACTOR such as 1000:0.1"),
    Use("minidnn train smallnet --device gpu", "ArgumentError",
        "device is 'gpu'; it must be 'auto', 'host', 'cuda' or 'cuda:0'"),
    Use("minidnn train smallnet --device host --graph", "ArgumentError",
        "graph is True; device host has no CUDA graphs: use device='cuda'"),
    Use("minidnn train smallnet --precision fp8", "ArgumentError",
        "--precision: invalid choice: 'fp8' (choose from ...) (see minidnn train --help)"),
    Use("minidnn train smallnet --memory vdn", "ArgumentError",
        "memory mode is 'vdn'; write one of base, keep, vdnn, vdnn++, greedy, dynprog, vdnn-threshold, autoswap, "
        "tflms, best, with an offload set for vdnn and vdnn++ (all, conv, aconv, none, dyn or layer+layer) and "
        "(p), (m) or (g), such as 'vdnn++:conv(p)'"),
    Use("minidnn train smallnet --memory base:all", "ArgumentError",
        "memory mode is 'base:all'; base takes no offload set"),
    Use("minidnn train smallnet --device host --memory vdnn:conv9", "ArgumentError",
        "offload set is 'conv9'; it must be all, conv, aconv, none, dyn or layers joined by '+', and there is no "
        "layer 'conv9' that computes (there are features.0, features.1, features.3, features.4, features.6, "
        "features.7, ...)"),
    Use("minidnn train smallnet --optimizer adam --momentum 0.9", "ArgumentError",
        "--momentum goes with --optimizer sgd; --optimizer is adam"),
    Use("minidnn train smallnet --optimizer adam --nesterov", "ArgumentError",
        "--nesterov goes with --optimizer sgd; --optimizer is adam"),
    Use("minidnn train smallnet --compress some", "ArgumentError",
        "--compress: invalid choice: 'some' (choose from ...) (see minidnn train --help)"),
    Use("minidnn train smallnet --data mnist", "DataError",
        "data 'mnist' is no known name and no such file or directory exists; give digits, "
        "synthetic[:classes=10,length=512,shape=3x64x64], a .npz file, an x.npy file beside y.npy, or a "
        "directory of IDX files, of CIFAR .bin files, of x.npy and y.npy, or of one folder of images per class"),
    Use("minidnn train smallnet --data cut.npz", "DataError",
        "cannot read cut.npz as .npz: File is not a zip file; write it again with numpy.savez"),
    Use("minidnn train smallnet --data few.npz", "DataError",
        "few: labels are int64 of shape [3]; they must be whole numbers, one for each of the 8 images"),
    Use("minidnn train smallnet --data signed.npz", "DataError",
        "signed: label -5 of sample 0 is out of range; labels must be 0 to 2147483646"),
    Use("minidnn train smallnet --data folder", "DataError",
        "data 'folder' is in no format that minidnn reads; give digits, "
        "synthetic[:classes=10,length=512,shape=3x64x64], a .npz file, an x.npy file beside y.npy, or a "
        "directory of IDX files, of CIFAR .bin files, of x.npy and y.npy, or of one folder of images per class"),
    Use("minidnn train vgg16 --data digits", "DataError",
        "data 'digits' are images of 1x8x8, not 3x224x224; build the network for an input of 1x8x8 or choose "
        "other data"),
    Use("minidnn train smallnet --device host --data nan.npz --batch 8 --quiet", "NonFiniteLoss",
        "the loss of step 0 is nan; lower the learning rate or check the data for NaN"),
    Use("minidnn train smallnet --weights weights.safetensors", "CheckpointError",
        "weights weights.safetensors is no readable safetensors file (...); give a file that safetensors wrote"),
    Use("minidnn train smallnet --weights smallvgg.json", "CheckpointError",
        "weights smallvgg.json is no readable safetensors file (...); give a file that safetensors wrote"),
    Use("minidnn train smallnet --weights folder", "CheckpointError",
        "weights folder is no readable safetensors file (Is a directory); give a file that safetensors wrote"),
    Use("minidnn train smallnet --resume run --weights weights.safetensors", "ArgumentError",
        "--weights and --resume both say how the network starts; give one of them"),
    Use("minidnn train smallnet --resume ''", "ArgumentError",
        "--resume: '' is no path; name a file or directory (see minidnn train --help)"),
    Use("minidnn train smallnet --device host --data digits --resume folder", "CheckpointError",
        "checkpoint folder has no checkpoint in it; give a directory that --checkpoint wrote"),
    Use("minidnn train smallvgg --device host --data digits --resume run", "CheckpointError",
        "run/step-00000001/weights.safetensors: weights do not fit the network: missing ['classifier.0.bias', "
        "'classifier.0.weight', "
        "'classifier.2.bias', 'classifier.2.weight'], unknown ['classifier.bias', 'classifier.weight', "
        "'features.1.bias', 'features.1.running_mean']; give those of the same network"),
    Use("minidnn train smallnet --device host --data digits --batch 32 --resume run", "CheckpointError",
        "checkpoint run/step-00000001 has batch_size 64; this run has 32: use the same to resume"),
    Use("minidnn train smallnet --device host --data digits --checkpoint net.py", "CheckpointError",
        "checkpoint directory net.py cannot be written: it is a file or a link; name another"),
    Use("minidnn train smallnet --device host --data digits --checkpoint /dev/null", "CheckpointError",
        "checkpoint directory /dev/null cannot be written: it is a file or a link; name another"),
    Use("minidnn train smallnet --checkpoint ''", "ArgumentError",
        "--checkpoint: '' is no path; name a file or directory (see minidnn train --help)"),
    Use("minidnn train smallnet --checkpoint-every 2", "ArgumentError",
        "--checkpoint-every needs --checkpoint DIR"),
    Use("minidnn train smallnet --device host --data digits --log nowhere/log.jsonl", "ArgumentError",
        "log nowhere/log.jsonl cannot be written: No such file or directory; name another file"),
    Use("minidnn train smallnet --log ''", "ArgumentError",
        "--log: '' is no path; name a file or directory (see minidnn train --help)"),
    Use("minidnn train smallnet:width=99999999 --device host --batch 1", "OutOfDeviceMemory",
        "the arena needs 3017485590.65 GiB; device host has ... free of ...: use a smaller batch or budget"),
    Use("minidnn train smallnet:width=99999999999", "ArgumentError",
        "model 'smallnet:width=99999999999': out_channels is 99999999999; it must be an int of 1 or more, at most "
        "2147483647"),
    Use("minidnn summary", "ArgumentError",
        "the following arguments are required: MODEL (see minidnn summary --help)"),
    Use("minidnn summary nowhere/net.py:net", "ArgumentError",
        "model file 'nowhere/net.py' does not exist"),
    Use("minidnn summary net.py/net.py:net", "ArgumentError",
        "model file 'net.py/net.py' cannot be read: Not a directory; name a file that can be read"),
    Use("minidnn summary net.py", "ArgumentError",
        "model file 'net.py' needs a function behind it, file.py:function; its functions are net, parts, images, "
        "empty, fickle"),
    Use("minidnn summary net.py:model", "ArgumentError",
        "model file 'net.py' has no function 'model'; its functions are net, parts, images, empty, fickle"),
    Use("minidnn summary net.py:parts", "ArgumentError",
        "model 'net.py:parts' returned list; it must return an nn.Sequential"),
    Use("minidnn summary broken.py:net", "ArgumentError",
        "model file 'broken.py' cannot be loaded: SyntaxError: invalid syntax (broken.py, line 1)"),
    Use("minidnn summary smallnet:depth=3", "ArgumentError",
        "model 'smallnet:depth=3' has no option 'depth=3'; its options are num_classes=10, input_shape=1x8x8, "
        "width=32"),
    Use("minidnn train vgg:extra=99999999999", "ArgumentError",
        "model 'vgg:extra=99999999999': extra is 99999999999; it must be 0 to 1000 more convolutions per group"),
    Use("minidnn train net.py:net:x=1", "ArgumentError",
        "model 'net.py:net:x=1' has no option 'x=1'; its function takes none: leave it out"),
    Use("minidnn summary vgg:extra=1_0", "ArgumentError",
        "option extra of model 'vgg:extra=1_0' is '1_0'; write a value like 0"),
    Use("minidnn summary smallnet --input 8x8", "ArgumentError",
        "--input: '8x8' is no shape; write channels x height x width, such as 3x64x64 (see minidnn summary --help)"),
    Use("minidnn summary vgg16 --input 3x0x64", "ArgumentError",
        "--input: '3x0x64' is no shape; write channels x height x width, such as 3x64x64 (see minidnn summary --help)"),
    Use("minidnn train smallnet --input 1x00x8", "ArgumentError",
        "--input: '1x00x8' is no shape; write channels x height x width, such as 3x64x64 (see minidnn train --help)"),
    Use("minidnn summary vgg16 --input 3x16x16", "ShapeError",
        "layer features.30 (MaxPool2d): input has shape [1, 512, 1, 1]; pooling window (2, 2) needs a larger image"),
    Use("minidnn memory vgg16 --mode vdnn:all(p)", "ArgumentError",
        "mode 'vdnn:all(p)' needs the workspaces of fast algorithms; give --profile FILE or --gpu NAME, or ask "
        "for memory-optimal ones: 'vdnn:all(m)'"),
    Use("minidnn memory vgg16 --mode best", "ArgumentError",
        "mode 'best' weighs times; give --gpu NAME (such as v100 or h100) or --profile FILE"),
    Use("minidnn simulate smallvgg --gpu k40 --trace out --html out", "ArgumentError",
        "--html out is what --trace names; give another file"),
    Use("minidnn memory smallvgg --save-trace out --plot ./out", "ArgumentError",
        "--plot ./out is what --save-trace names; give another file"),
    Use("minidnn memory smallvgg --fit tight", "ArgumentError",
        "fit is 'tight'; it must be one of best-fit, first-fit, exact-then-first, worst-fit, high-end, "
        "high-end-offloaded"),
    Use("minidnn memory smallvgg --fit ''", "ArgumentError",
        "fit is ''; it must be one of best-fit, first-fit, exact-then-first, worst-fit, high-end, high-end-offloaded"),
    Use("minidnn memory smallvgg --density 1.5", "ArgumentError",
        "--density is 1.5; it must be a number in [0, 1]"),
    Use("minidnn memory smallvgg --density 1_0", "ArgumentError",
        "--density is '1_0'; give a number from 0 to 1 or a JSON file (No such file or directory)"),
    Use("minidnn memory smallvgg --density ''", "ArgumentError",
        "--density is ''; give a number from 0 to 1 or a JSON file (No such file or directory)"),
    Use("minidnn memory --trace trace.jsonl", "DataError",
        "trace.jsonl: trace frees 'b', which was never allocated; free each allocated id once"),
    Use("minidnn memory --trace trace.jsonl --budget 1GiB", "ArgumentError",
        "--budget goes with a MODEL; a --trace has --fit alone"),
    Use("minidnn memory --trace trace.jsonl --plot trace.png", "ArgumentError",
        "--plot goes with a MODEL; a --trace has --fit alone"),
    Use("minidnn simulate vgg16", "ArgumentError",
        "simulate needs times: give --gpu NAME (such as gtx1080ti or h100) or --profile FILE"),
    Use("minidnn simulate smallvgg --gpu k80", "ArgumentError",
        "gpu is 'k80'; it must be one of gtx970, gtx1080ti, k40, p100, v100, rtx2080ti, t4, a100, rtx3090, "
        "rtx4090, l4, h100, h200"),
    Use("minidnn simulate smallvgg --gpu k40 --fit tight", "ArgumentError",
        "fit is 'tight'; it must be one of best-fit, first-fit, exact-then-first, worst-fit, high-end, "
        "high-end-offloaded"),
    Use("minidnn simulate smallvgg --gpu v100 --modes vdnn:conv+all", "ArgumentError",
        "offload set is 'conv+all'; it must be all, conv, aconv, none, dyn or layers joined by '+', and there is no "
        "layer 'conv' that computes (there are features.0, features.2, features.4, features.5, features.7, features.9, "
        "...)"),
    Use("minidnn simulate smallvgg --gpu k40 --modes base --budget 1KiB --plot lines.png", "BudgetError",
        "no mode fits the budget 1.0 KiB; of these base needs the least, 4248576 bytes (4.1 MiB); there is nothing to "
        "write for --plot lines.png"),
    Use("minidnn simulate smallvgg --gpu k40 --density half", "ArgumentError",
        "--density is 'half'; give a number from 0 to 1 or a JSON file (No such file or directory)"),
    Use("minidnn simulate smallvgg --profile empty.json", "ArgumentError",
        "profile empty.json is damaged or no profile; give a file that 'minidnn profile' wrote"),
    Use("minidnn simulate smallvgg --batch 16 --profile smallvgg.json", "ArgumentError",
        "profile smallvgg.json does not know features.0:forward at batch 16, fp32, paper graph; make one of this "
        "network with 'minidnn profile'"),
    Use("minidnn simulate smallvgg --gpu k40 --plot lines.pdf", "ArgumentError",
        "--plot: 'lines.pdf' would be a PNG whatever its name says; name a file that ends in .png (see minidnn "
        "simulate --help)"),
    Use("minidnn simulate smallvgg --gpu k40 --html report.pdf", "ArgumentError",
        "--html: 'report.pdf' would be an HTML page whatever its name says; name a file that ends in .html (see "
        "minidnn simulate --help)"),
    Use("minidnn simulate smallvgg --gpu k40 --html folder", "ArgumentError",
        "--html: 'folder' is a directory; name a file (see minidnn simulate --help)"),
    Use("minidnn simulate smallvgg --gpu k40 --html nowhere/report.html", "ArgumentError",
        "--html: 'nowhere/report.html' cannot be written: there is no folder nowhere; make it, or name another "
        "file (see minidnn simulate --help)"),
    Use("minidnn simulate smallvgg --gpu k40 --trace loop", "ArgumentError",
        "--trace: 'loop' cannot be written: Too many levels of symbolic links; name another file (see minidnn "
        "simulate --help)"),
    Use("minidnn plan smallvgg --batch 8 --gpu k40 --policy greedy --budget 1MiB", "BudgetError",
        "memory mode greedy at batch 8 needs at least ...; the budget is 1048576 bytes (1.0 MiB)"),
    Use("minidnn sweep smallvgg --gpu k40 --bandwidths 1,x", "ArgumentError",
        "--bandwidths: 'x' must be a number from 0.001 to 1000 (see minidnn sweep --help)"),
    Use("minidnn sweep smallvgg --gpu k40 --bandwidths 1e308 --throughput rate.png", "ArgumentError",
        "--bandwidths: '1e308' must be a number from 0.001 to 1000 (see minidnn sweep --help)"),
    Use("minidnn sweep smallvgg --gpu k40 --policies base,vdnn:conv9", "ArgumentError",
        "offload set is 'conv9'; it must be all, conv, aconv, none, dyn or layers joined by '+', and there is no layer "
        "'conv9' that computes (there are features.0, features.2, features.4, features.5, features.7, features.9, "
        "...)"),
    Use("minidnn sweep smallvgg --gpu k40 --bandwidths ,", "ArgumentError",
        "--bandwidths: ',' names none; write numbers with commas, such as 1,2,3 (see minidnn sweep --help)"),
    Use("minidnn profile smallvgg --device host -o profile.json", "ArgumentError",
        "--device is 'host'; it must be a CUDA device, such as cuda or cuda:1"),
    Use("minidnn profile smallnet --output=--", "ArgumentError",
        "--output is '--', which is no value; write one, or leave --output out"),
    Use("minidnn compare smallvgg --fit tight", "ArgumentError",
        "fit is 'tight'; it must be one of best-fit, first-fit, exact-then-first, worst-fit, high-end, "
        "high-end-offloaded"),
    Use("minidnn compare smallnet --device host --data digits --batch 5000", "ArgumentError",
        "--batch is 5000; digits has 1437 images: take a smaller batch"),
    Use("minidnn compare smallnet --device host --batch 2 --modes base --budget 1KiB", "BudgetError",
        "no mode fits the budget 1.0 KiB; of these base needs the least, 622592 bytes (608.0 KiB)"),
    Use("minidnn compare smallnet --device host --modes base,vdnn:conv9", "ArgumentError",
        "offload set is 'conv9'; it must be all, conv, aconv, none, dyn or layers joined by '+', and there is no "
        "layer 'conv9' that computes (there are features.0, features.1, features.3, features.4, features.6, "
        "features.7, ...)"),
    Use("minidnn compare smallnet --device host --modes base,best --placement live", "ArgumentError",
        "placement is 'live'; memory mode best orders its copies by offsets: use 'planned'"),
    Use("minidnn compare net.py:empty --device host --modes base", "ArgumentError",
        "net has no weights to train; append a layer that has some"),
    Use("minidnn compare net.py:fickle --device host --modes base(m),vdnn:all(m) --quiet", "GradientMismatch",
        "gradients differ from base with the same algorithms in vdnn:all(m)"),
    Use("minidnn compare net.py:images --device host --batch 4", "ShapeError",
        "layer loss (CrossEntropyLoss): logits have shape [4, 2, 6, 6]; expected [N, classes]: end the network in "
        "Flatten and Linear"),
    Use("minidnn models > /dev/full", "MiniDnnError",
        "standard output cannot be written: No space left on device; name a file that can take it"),
    Use("nn.Conv2d(3, 64, 3, stride=0)", "ArgumentError",
        "stride is 0; it must be an int or a pair of ints, each 1 or more"),
    Use('nn.Sequential(nn.Linear(4, 4), "relu")', "ArgumentError",
        "child '1' is 'relu'; Sequential takes layers or one dict of named layers"),
    Use("nn.Sequential(nn.Conv2d(1, 8, 3), nn.Linear(8, 10)).infer((1, 1, 8, 8))", "ShapeError",
        "layer 1 (Linear): input has shape [1, 8, 6, 6]; expected [N, 8]: put a Flatten in front"),
    Use('nn.Sequential(nn.Linear(2, 3)).load_state_dict({"0.weight": np.ones((2, 3)), "0.bias": np.ones(3)})',
        "CheckpointError",
        "weight 0.weight has shape [2, 3]; expected [3, 2]: leave it out of the state, and with strict=False the "
        "network keeps its own"),
    Use("optim.Adam(betas=0.9)", "ArgumentError",
        "betas is 0.9; it must be a pair of numbers in [0, 1)"),
    Use('from_arrays("photos", (x[:, 0], y))', "DataError",
        "photos: images are float32 of shape [4, 6, 6]; they must be real numbers of shape [samples, channels, "
        "height, width]"),
    Use('from_arrays("photos", (x, y / 2))', "DataError",
        "photos: labels are float64 of shape [4]; they must be whole numbers, one for each of the 4 images"),
    Use('open_data("synthetic", input_shape=(0, 8, 8))', "ArgumentError",
        "input_shape is (0, 8, 8); it must be (C, H, W), each 1 or more"),
    Use("Trainer(net, loss, sgd, batch=64.0)", "ArgumentError",
        "batch is 64.0; it must be an int of 1 or more"),
    Use("Trainer(net, loss, 0.1, batch=64)", "ArgumentError",
        "optimizer is 0.1; it must be an object such as optim.SGD(lr=0.1)"),
    Use('Trainer(net, loss, sgd, batch=4, device="host", compress=("conv1",))',
        "ArgumentError",
        "compress names 'conv1', which is no tensor of this network; use names such as 3.y"),
    Use('Trainer(net, loss, sgd, batch=4, device="host", algorithms={"0:forward": "fast"})',
        "ArgumentError",
        "algorithms has 'fast' for '0:forward'; it must be an Algorithm with a workspace of 0 or more bytes"),
    Use('Trainer(net, loss, sgd, batch=4, device="host", memory="best", placement="live")',
        "ArgumentError", "placement is 'live'; memory mode best orders its copies by offsets: use 'planned'"),
    Use('Trainer(net, loss, sgd, batch=64, memory="vdnn", budget="10KiB", device="host")', "BudgetError",
        "memory mode vdnn at batch 64 needs at least 31232 bytes (30.5 KiB); the budget is 10240 bytes (10.0 "
        "KiB); base, keep and vdnn++ do not fit..."),
    Use("trainer.step(x[:, :, :5], y)", "ArgumentError",
        "x has shape [4, 1, 5, 6]; expected 1 to 4 rows of [1, 6, 6]"),
    Use("trainer.step(x, y + 1)", "DataError",
        "y has labels of int64 from 1 to 3; expected integers 0 to 2"),
    Use("trainer.step(x * np.inf, y)", "NonFiniteLoss",
        "the loss of step 0 is nan; lower the learning rate or check the data for NaN"),
    Use("trainer.fit(data, epochs=0)", "ArgumentError",
        "epochs is 0; it must be an int of 1 or more"),
    Use("HostDevice().capture([], print)", "DeviceError",
        "device host cannot capture graphs; use a CUDA device"),
    Use("check_host_limits(2**60)", "OutOfPinnedMemory",
        "1073741824.00 GiB of pinned memory are needed, but ... is ... with ... left; use a smaller batch, "
        "offload fewer layers or raise that limit"),
    Use("pool.free(freed)", "PoolError",
        "block (address 0x0, 512 bytes) is not in use in this pool: freed before, or of another pool"),
    Use("pool.allocate(8192)", "OutOfDeviceMemory",
        "no room for 8.0 KiB: 0 B of 4.0 KiB are in use, the largest free block is 4.0 KiB (usable for this "
        "request: 4.0 KiB), the limit is 4.0 KiB, no release is pending; live buffers: none"),
    Use("unpack(released, np.empty(64, np.float32))", "CodecError",
        "the packed part was released; unpack it before its release"),
    Use("verify(replace(trainer.schedule, actions=trainer.schedule.actions[:9]))", "ScheduleError",
        "vdnn:all(m): ... is never launched; and ... more"),
)  # fmt: skip
