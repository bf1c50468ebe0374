"""The built-in networks are what their papers and torchvision say, and a spec names them."""

from __future__ import annotations

from collections import Counter
from math import prod, sqrt
from pathlib import Path

import numpy as np
import pytest

from minidnn import models, nn
from minidnn.errors import ArgumentError, ShapeError
from minidnn.models import MODELS, create, resolve

# torchvision 0.29, `sum(p.numel() for p in model.parameters())`, 1000 classes
TORCHVISION_PARAMETERS = {
    "alexnet_tv": 61_100_840,
    "vgg11": 132_863_336, "vgg13": 133_047_848, "vgg16": 138_357_544, "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840, "vgg13_bn": 133_053_736, "vgg16_bn": 138_365_992, "vgg19_bn": 143_678_248,
}  # fmt: skip

# torchvision's indices of the convolutions in `features`
TORCHVISION_CONVOLUTIONS = {
    "alexnet_tv": [0, 3, 6, 8, 10],
    "vgg11": [0, 3, 6, 8, 11, 13, 16, 18],
    "vgg16": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
    "vgg16_bn": [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40],
    "vgg19": [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34],
}


def shapes(net: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Parameter and statistic shapes by name; draws no values."""
    return {name: parameter.shape for name, parameter in net.named_parameters()}


def kinds(net: nn.Sequential) -> Counter[str]:
    return Counter(layer.kind for _, layer in net.leaves())


@pytest.mark.parametrize("name", TORCHVISION_PARAMETERS)
@pytest.mark.parametrize("tv", [False, True])
def test_parameter_count_is_torchvisions(name: str, tv: bool) -> None:
    net = create(name) if name.startswith("alexnet") else create(f"{name}:tv={str(tv).lower()}")
    assert net.summary().total["parameters"] == TORCHVISION_PARAMETERS[name]


@pytest.mark.parametrize("name", TORCHVISION_CONVOLUTIONS)
def test_parameter_names_are_torchvisions(name: str) -> None:
    found = shapes(create(name))
    convolutions = [n for n, shape in found.items() if len(shape) == 4]
    linear = [n for n, shape in found.items() if len(shape) == 2]
    assert convolutions == [f"features.{index}.weight" for index in TORCHVISION_CONVOLUTIONS[name]]
    assert linear == [f"classifier.{index}.weight" for index in ((1, 4, 6) if "alexnet" in name else (0, 3, 6))]
    assert all(n.removesuffix("weight") + "bias" in found for n in convolutions + linear)


def test_torchvision_vgg16_shapes() -> None:
    found = shapes(create("vgg16"))
    assert found["features.0.weight"] == (64, 3, 3, 3)
    assert found["features.28.weight"] == (512, 512, 3, 3)
    assert found["classifier.0.weight"] == (4096, 512 * 7 * 7)
    assert found["classifier.6.bias"] == (1000,)
    assert len(found) == 32


def test_batch_norm_variant_names_its_statistics_as_torchvision() -> None:
    found = shapes(create("vgg11_bn"))
    for entry in ("weight", "bias", "running_mean", "running_var"):
        assert found[f"features.1.{entry}"] == (64,)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("vgg11", [1, 1, 2, 2, 2]),
        ("vgg13", [2, 2, 2, 2, 2]),
        ("vgg16", [2, 2, 3, 3, 3]),
        ("vgg19", [2, 2, 4, 4, 4]),
        ("vgg101", [12, 12, 24, 25, 25]),
        ("vgg116", [22, 22, 23, 23, 23]),
        ("vgg191", [37, 37, 38, 38, 38]),
    ],
)
def test_vgg_convolutions_per_group(name: str, groups: list[int]) -> None:
    net = create(name)
    found = [0]
    for _, layer in net.leaves():
        if layer.kind == "conv":
            found[-1] += 1
        elif layer.kind == "pool":
            found.append(0)
    assert found == [*groups, 0]
    assert sum(groups) + kinds(net)["fc"] == int(name.removeprefix("vgg"))


def test_extra_deepens_every_group() -> None:
    assert shapes(create("vgg:extra=20")) == shapes(create("vgg116"))
    assert kinds(create("vgg:depth=19,extra=1"))["conv"] == 16 + 5
    assert kinds(create("vgg:extra=1000"))["conv"] == 13 + 5 * 1000
    assert kinds(create("table3:repeats=1000"))["conv"] == 2 + 2 * 1000


def test_alexnet_is_the_papers() -> None:
    net = create("alexnet")
    assert net.input_shape == (3, 227, 227)
    rows = [row for row in net.summary(256).rows if row["type"] not in ("ReLU", "Flatten")]
    assert [row["output_shape"][1:] for row in rows] == [
        [96, 55, 55], [96, 27, 27], [256, 27, 27], [256, 13, 13], [384, 13, 13], [384, 13, 13],
        [256, 13, 13], [256, 6, 6], [4096], [4096], [1000],
    ]  # fmt: skip
    assert kinds(net)["dropout"] == 0
    assert net.summary().total["parameters"] == 62_378_344


def test_table3_is_the_papers_constructed_network() -> None:
    net = create("table3")
    filters = [shape[1:] + shape[:1] for shape in shapes(net).values() if len(shape) == 4]
    assert filters == [(3, 3, 3, 64), *[(64, 1, 1, 64), (64, 5, 5, 64)] * 5, (64, 1, 1, 3)]
    assert net.infer((256, 3, 224, 224)) == (256, 2)


def test_vgg_adds_torchvisions_pooling_and_dropout_on_request() -> None:
    plain, tv = create("vgg11"), create("vgg11:tv=true")
    assert kinds(plain)["dropout"] == 0
    assert kinds(tv)["dropout"] == 2
    assert shapes(plain) == shapes(tv)
    assert create("vgg11:tv=true", input_shape=(3, 64, 96)).infer((2, 3, 64, 96)) == (2, 1000)
    assert shapes(create("vgg11:tv=true", input_shape=(3, 64, 96))) == shapes(tv)


def test_vgg_weights_start_by_torchvisions_rule() -> None:
    drawn = {
        name: parameter.materialize(name, seed=1)
        for name, parameter in create("vgg11_bn").named_parameters()
        if name in ("features.4.weight", "features.4.bias", "features.5.weight", "features.5.bias")
        or name in ("classifier.6.weight", "classifier.6.bias")
    }
    fan_out = 128 * 3 * 3
    assert np.std(drawn["features.4.weight"]) == pytest.approx(sqrt(2 / fan_out), rel=0.02)
    assert np.std(drawn["classifier.6.weight"]) == pytest.approx(0.01, rel=0.02)
    assert not drawn["features.4.bias"].any()
    assert not drawn["classifier.6.bias"].any()
    assert (drawn["features.5.weight"] == 1).all()
    assert not drawn["features.5.bias"].any()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_carries_its_input_and_follows_the_wanted_classes_and_input(name: str) -> None:
    net = create(name, num_classes=7)
    assert net.input_shape is not None
    assert net.infer((2, *net.input_shape)) == (2, 7)
    shape = (2, 96, 72)
    other = create(name, num_classes=3, input_shape=shape)
    assert other.input_shape == shape
    assert other.infer((1, *shape)) == (1, 3)


def test_planning_size_networks_are_built_without_drawing_weights() -> None:
    assert not any(parameter.materialized for _, parameter in create("vgg191").named_parameters())


def test_spec_options_win_over_what_the_caller_wants() -> None:
    assert create("smallnet:num_classes=3", num_classes=10).infer((1, 1, 8, 8)) == (1, 3)
    assert create("smallnet:input_shape=3x12x16", input_shape=(1, 8, 8)).input_shape == (3, 12, 16)


def test_a_model_file_is_loaded_with_options_and_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from minidnn import nn\n"
        "from neighbour import WIDTH\n"
        "def build(num_classes=10, scale: float = 1.0):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(16, int(WIDTH * scale)), nn.Linear(int(WIDTH * scale),"
        " num_classes))\n"
    )
    net = create(f"{file}:build:scale=2", num_classes=4, input_shape=(1, 4, 4))
    assert [shape for shape in shapes(net).values() if len(shape) == 2] == [(10, 16), (4, 10)]
    assert net.input_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("vgg17", "there is no model 'vgg17'; the models are smallnet, "),
        ("vgg:depth=12", "depth is 12; VGG has 11, 13, 16 or 19"),
        ("vgg:extra=-1", "extra is -1; it must be 0 to 1000 more convolutions per group"),
        ("vgg:extra=1001", "extra is 1001; it must be 0 to 1000 more"),
        ("table3:repeats=-1", "repeats is -1; it must be 0 to 1000 pairs of convolutions"),
        ("table3:repeats=1001", "repeats is 1001; it must be 0 to 1000 pairs"),
        ("vgg:extra", "has no option 'extra'"),
        ("vgg116:extra=3", "has no option 'extra=3'; its options are num_classes=1000, input_shape=3x224x224"),
        ("vgg16:num_classes=ten", "option num_classes of model 'vgg16:num_classes=ten' is 'ten'"),
        ("vgg16:num_classes=0", "out_features is 0"),
        ("vgg16:tv=maybe", "write a value like false"),
        ("vgg16:input_shape=3x32", "write a value like 3x224x224"),
        ("nowhere.py:build", "model file 'nowhere.py' does not exist"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_would_work(spec: str, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        create(spec)
    assert says in str(caught.value)


def test_a_model_file_that_is_there_and_cannot_be_read_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    file, folder, loop = tmp_path / "file.py", tmp_path / "folder.py", tmp_path / "loop.py"
    file.write_text("def build(): pass\n")
    folder.mkdir()
    loop.symlink_to(loop)
    for path, says in (
        (file / "net.py", "cannot be read: Not a directory; name a file that can be read"),
        (folder, "is no file; name a Python file"), (tmp_path / "absent.py", "does not exist"),
        (loop, "cannot be read: Too many levels of symbolic links; name a file that can be read"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"^model file '{path}' {says}$"):
            create(f"{path}:build")
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(ArgumentError, match=r"cannot be read: Permission denied; name a file that can be read$"):
        create(f"{file}:build")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def other(): pass\ndef _hidden(): pass\n", r"has no function 'build'; its functions are other$"),
        ("def build(): return 3\n", "returned int; it must return an nn.Sequential"),
        ("def build(): return 1 / 0\n", "cannot be built: ZeroDivisionError"),
        ("import absent_module\n", "cannot be loaded: ModuleNotFoundError: No module named 'absent_module'"),
        ("def build(:\n", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_wrong_model_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=says):
        create(f"{file}:build")


def test_an_input_too_small_for_the_network_is_refused_by_the_layer() -> None:
    with pytest.raises(ShapeError, match=r"features\.\d+ \(MaxPool2d\)"):
        create("vgg16", input_shape=(3, 16, 16))


def test_factories_are_public_names_too() -> None:
    assert prod(models.alexnet_tv(10).infer((1, 3, 64, 64))) == 10
    assert resolve("smallnet") is models.smallnet
