"""Network -> graph: what each op reads and writes, fusions, targets, updates."""

from __future__ import annotations

import pytest

from minidnn import nn, optim
from minidnn.errors import ArgumentError, ShapeError
from minidnn.graph.build import build
from minidnn.graph.emit import Scope
from minidnn.graph.graph import Graph, Target
from minidnn.graph.tensor import Role, Tensor

NATIVE = Target("native")
BF16 = Target("native", "bf16", "NHWC")


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def graph(net: nn.Sequential | None = None, target: Target = Target(), **options: object) -> Graph:
    options.setdefault("optimizer", optim.SGD(0.1, momentum=0.9))
    return build(net or small(), nn.CrossEntropyLoss(), (2, 3, 8, 8), target, **options)  # type: ignore[arg-type]


def reads(g: Graph, name: str) -> dict[str, str]:
    (op,) = [op for op in g.ops if op.name == name]
    return dict(op.reads)


def test_relu_behind_a_convolution_owns_no_op() -> None:
    g = graph()
    assert [layer.name for layer in g.layers] == ["0", "2", "3", "6", "8", "loss"]
    assert dict(g.ops[0].attributes)["relu"] is True


@pytest.mark.parametrize("target", [Target(), Target("paper"), NATIVE, BF16])
@pytest.mark.parametrize("update", ["at-end", "per-layer"])
def test_no_two_ops_have_one_name(target: Target, update: str) -> None:
    """A plan has algorithms by name, and a simulation times."""
    every = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3), nn.AvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 2 * 2, 5), nn.Tanh(),
        nn.Linear(5, 3),
    )  # fmt: skip
    names = [op.name for op in graph(every, target, update=update).ops]
    assert len(names) == len(set(names))


def test_paper_pooling_saves_x_and_y_and_native_an_index() -> None:
    assert set(reads(graph(), "2:backward_data")) == {"dy", "x", "y"}
    assert set(reads(graph(target=NATIVE), "2:backward_data")) == {"dy", "index"}


def test_native_fuses_the_relu_backward_into_the_op_that_makes_its_gradient() -> None:
    assert not [op for op in graph(target=NATIVE).ops if op.function == "relu_backward"]
    assert reads(graph(target=NATIVE), "8:backward_data")["mask"] == "6.y"
    assert len([op for op in graph().ops if op.function == "relu_backward"]) == 3


def test_native_frees_what_a_pool_hides() -> None:
    g = graph(target=NATIVE)
    assert g.first_backward_use("0.y") == -1, "the output in front of a pool is not needed in backward"
    assert graph().first_backward_use("0.y") > 0


def test_relu_backward_is_an_op_where_the_next_layer_cannot_mask() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 3))
    assert [op.name for op in graph(net, NATIVE).ops if op.function == "relu_backward"] == ["0:backward_activation"]


def test_first_layer_makes_no_input_gradient() -> None:
    g = graph()
    assert "dinput" not in g.tensors
    assert not [op for op in g.ops if op.name == "0:backward_data"]


def test_layers_in_front_of_the_first_weights_have_no_backward() -> None:
    net = nn.Sequential(nn.AvgPool2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 3))
    assert not [op for op in graph(net).ops if not op.forward and op.layer < 2]


def test_updates_are_per_layer_at_the_end_or_left_out() -> None:
    assert len([op for op in graph().ops if op.kind == "update"]) == 4
    at_end = graph(update="at-end", max_norm=1.0)
    assert [op.function for op in at_end.ops[-2:]] == ["clip_factor", "sgd_update"]
    assert at_end.is_persistent("0.dweight")
    assert not graph().is_persistent("0.dweight")
    assert not [op for op in graph(update="none").ops if op.kind == "update"]


def test_micro_batches_add_up_gradients() -> None:
    g = graph(update="none", accumulate=True)
    adds = [op for op in g.ops if op.function == "accumulate"]
    assert len(adds) == 4
    assert dict(adds[-1].writes) == {"total[]": "0.dbias"} or ("total[]", "0.dweight") in adds[-1].writes
    assert not g.is_persistent("0.dweight@micro")


def test_bf16_casts_the_input_and_reads_weight_copies_that_the_update_refreshes() -> None:
    g = graph(target=BF16)
    assert g.ops[0].function == "cast"
    assert g.tensors["0.y"].dtype == "bfloat16"
    assert g.tensors["0.y"].layout == "NHWC"
    assert reads(g, "3:forward")["w"] == "3.weight@bf16"
    assert g.tensors["3.dweight"].dtype == "float32"
    update = next(op for op in g.ops if op.name == "3:update")
    weights = [t for a, t in update.writes if a == "w[]"]
    copies = [t for a, t in update.writes if a == "copy[]"]
    assert copies == [f"{w}@bf16" for w in weights[: len(copies)]], "copy i belongs to weight i"


def test_flatten_is_a_view_in_nchw_and_an_op_in_nhwc() -> None:
    assert reads(graph(), "6:forward")["x"] == "3.y"
    assert reads(graph(target=BF16), "6:forward")["x"] == "5.y"


def test_squared_error_compares_images_in_one_layout() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    for target, kinds in ((Target("native", "bf16", "NHWC"), ["layout"]), (Target(), [])):
        found = build(net, nn.MSELoss(), (2, 3, 8, 8), target, optimizer=optim.SGD(0.1))
        layouts = [op for op in found.ops if op.name.startswith("loss:") and op.function == "layout"]
        assert [op.kind for op in layouts] == kinds
        for op in found.ops:
            if op.function.startswith("mse"):
                images = [n for argument, n in op.bindings if argument in ("x", "target", "dx")]
                assert len({found.tensors[n].layout for n in images}) == 1


def test_softmax_refuses_classes_that_are_not_one_axis() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Softmax(), nn.Linear(144, 2))
    with pytest.raises(ShapeError, match=r"2 \(Softmax\).*flattened from .*2, 4, 6, 6.* not its 144 classes; use a"):
        build(net, nn.CrossEntropyLoss(), (2, 3, 8, 8), optimizer=optim.SGD(0.1))
    one_pixel = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.Softmax(), nn.Linear(4, 2))
    build(one_pixel, nn.CrossEntropyLoss(), (2, 3, 8, 8), optimizer=optim.SGD(0.1))


def test_dropout_bits_do_not_depend_on_the_target() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3))
    numbers = {
        dict(op.attributes)["op"] for target in (Target(), NATIVE, BF16)
        for op in graph(net, target).ops if op.function.startswith("dropout")
    }  # fmt: skip
    assert numbers == {2}, "the layer's position, not that among the layers that own ops"


def test_inference_has_no_backward_and_uses_running_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3))
    g = build(net, None, (2, 3, 8, 8))
    assert [op.function for op in g.ops] == ["conv2d_forward", "batch_norm_inference", "linear_forward"]
    assert g.output == "5.y"
    assert not g.training


def test_an_adaptive_pool_of_equal_size_is_no_op() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(144, 3))
    assert [layer.name for layer in graph(net).layers] == ["0", "3", "loss"]


def test_every_read_of_a_transient_is_behind_a_write() -> None:
    for target in (Target(), NATIVE, BF16):
        g = graph(target=target)
        for name, tensor in g.tensors.items():
            if not g.is_persistent(name) and tensor.role not in (Role.INPUT, Role.LABEL):
                assert g.first_write[name] == g.uses[name][0], name


def test_a_wrong_shape_names_the_layer() -> None:
    net = nn.Sequential({"features": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3))})
    with pytest.raises(ShapeError, match=r"layer features.1 \(Conv2d\): .*expected 5 channels, got 4"):
        graph(net)
    with pytest.raises(ShapeError, match=r"layer 1 \(Linear\).*put a Flatten in front"):
        graph(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"update": "sometimes"}, "update is 'sometimes'"),
        ({"max_norm": 1.0}, "clipping and micro-batches need 'at-end'"),
        ({"accumulate": True}, "clipping and micro-batches need 'at-end'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        graph(**options)  # type: ignore[arg-type]


def test_a_network_without_weights_cannot_train() -> None:
    with pytest.raises(ArgumentError, match="no weights"):
        graph(nn.Sequential(nn.AvgPool2d(8), nn.Flatten()))
    with pytest.raises(ArgumentError, match="loss is None"):
        build(small(), None, (2, 3, 8, 8), optimizer=optim.SGD(0.1))


def test_the_loss_writes_over_the_logits_unless_they_are_read_again() -> None:
    plain = build(nn.Sequential(nn.Linear(5, 3)), nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))
    assert ("y", "0.y") in next(op for op in plain.ops if op.kind == "loss").writes
    kept = build(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))
    assert ("y", "loss.y") in next(op for op in kept.ops if op.kind == "loss").writes
    assert kept.output == "0.y"
    seen = build(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), nn.CrossEntropyLoss(), (4, 5))
    assert "loss.y" not in seen.tensors  # no backward, no second tensor


class Own(nn.Layer):
    """A user's layer: tanh, written well or with one mistake."""

    kind = "activation"

    def __init__(
        self, in_place: bool = False, returned: object = "dx", emits: str = "forward backward",
        shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_place, self.returned, self.emits, self.shape = in_place, returned, emits, shape

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, scope: Scope) -> Tensor:
        y = scope.x if self.in_place else scope.activation(self.shape or scope.x.shape, scope.x.layout)
        if "forward" in self.emits:
            scope.emit(
                "forward", "activation_forward", [("x", scope.x)], [("y", y)], function="tanh", negative_slope=0.0
            )
        return y

    def backward(self, scope: Scope, dy: Tensor) -> Tensor | None:
        dx = scope.x if self.returned == "x" else scope.dx()
        scope.emit(
            "backward_data", "activation_backward", [("saved", scope.y), ("dy", dy)],
            [("dx", dx if "backward" in self.emits else dy)], function="tanh", negative_slope=0.0,
        )  # fmt: skip
        return dx if self.returned in ("dx", "x") else self.returned  # type: ignore[return-value]


def test_a_layer_that_overwrites_what_another_reads_again_is_refused() -> None:
    def trained(*layers: nn.Layer) -> Graph:
        return build(nn.Sequential(*layers), nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))

    trained(nn.Linear(5, 5), Own(in_place=True), nn.Linear(5, 3))  # a Linear does not read its output again
    said = r"^1:backward_data reads 1\.y, which 2:forward has overwritten; a layer must write to a tensor of its own"
    with pytest.raises(ArgumentError, match=said):
        trained(nn.Linear(5, 5), Own(), Own(in_place=True), nn.Linear(5, 3))
    with pytest.raises(ArgumentError, match=r"^1:backward_data reads 1\.y, which 2:backward_data has overwritten; a"):
        trained(nn.Linear(5, 5), Own(), Own(returned="x"), nn.Linear(5, 3))  # its gradient lies where its input did


@pytest.mark.parametrize("returned", [None, 3, Tensor("dx", (4, 6), "float32", Role.GRADIENT)])
def test_a_backward_that_returns_no_gradient_of_its_input_is_refused(returned: object) -> None:
    net = nn.Sequential(nn.Linear(5, 5), Own(returned=returned), nn.Linear(5, 3))
    with pytest.raises(ArgumentError, match=r"layer 1 \(Own\): backward returned .*; it must return the gradient of"):
        build(net, nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))
    first = nn.Sequential(Own(returned=returned), nn.Linear(5, 3))  # where nobody needs that gradient
    build(first, nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Own(emits="backward"), "forward returned 1.y, which none of its ops writes; one must"),
        (Own(emits="forward"), "backward returned 0.dy, which none of its ops writes; one must"),
        (Own(shape=(4, 3)), r"forward returned a tensor of \[4, 3\]; infer said \[4, 5\]: make one so"),
    ],
)
def test_a_layer_that_does_not_write_what_it_returns_is_refused(layer: nn.Layer, said: str) -> None:
    net = nn.Sequential(nn.Linear(5, 5), layer, nn.Linear(5, 3))
    with pytest.raises((ArgumentError, ShapeError), match=rf"layer 1 \(Own\): {said}"):
        build(net, nn.CrossEntropyLoss(), (4, 5), optimizer=optim.SGD(0.1))
