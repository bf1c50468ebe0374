"""Network + batch + target -> Graph: the one walk over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from minidnn.arguments import choice, shown
from minidnn.errors import ArgumentError, ShapeError
from minidnn.graph.emit import Scope, Writer, scalars_tensor
from minidnn.graph.graph import Graph, LayerInfo, Target
from minidnn.graph.op import Op
from minidnn.graph.tensor import Role, Tensor
from minidnn.nn.activation import ReLU
from minidnn.nn.layer import calling
from minidnn.nn.sequential import infer_at

if TYPE_CHECKING:
    from minidnn.nn.layer import Layer
    from minidnn.nn.loss import Loss
    from minidnn.nn.sequential import Sequential
    from minidnn.optim import Optimizer

UPDATES = ("per-layer", "at-end", "none")


def build(
    net: Sequential, loss: Loss | None, input_shape: Sequence[int], target: Target = Target(), *,
    optimizer: Optimizer | None = None, update: str = "per-layer", accumulate: bool = False,
    max_norm: float | None = None, own_input: bool = False,
) -> Graph:  # fmt: skip
    """The graph of one iteration over inputs of shape [N,C,H,W] (or [N,F]).

    With an optimizer it is a training iteration: forward, loss, backward, and updates `per-layer` (inside backward),
    `at-end` (one op, gradients stay until then), or `none` (a micro-batch). `accumulate` adds this batch's
    gradients to those that are there. `max_norm` clips by the global norm (update `at-end` only). `own_input`: layers
    read a copy of the input even where nothing needs to be cast, so that the next one may take its place. Without an
    optimizer it is inference: forward, and the loss if there is one.

    Raises ShapeError naming the layer when a shape does not fit, ArgumentError for options that cannot be combined.
    """
    training = optimizer is not None
    if training and loss is None:
        raise ArgumentError("loss is None; training needs a loss such as nn.CrossEntropyLoss()")
    choice(update, "update", UPDATES)
    if (accumulate or max_norm is not None) and update == "per-layer":
        raise ArgumentError("update is 'per-layer'; clipping and micro-batches need 'at-end'")
    shape = tuple(int(s) for s in input_shape)
    if len(shape) < 2 or min(shape) < 1:
        raise ArgumentError(f"input_shape is {list(shape)}; it must be N, C, H, W, each 1 or more")

    def write(in_place: bool) -> tuple[Writer, list[tuple[Layer, Scope]], Tensor]:
        writer = Writer(target, training, accumulate, in_place)
        scopes, output = _forward(writer, net, loss, shape, own_input)
        if optimizer is not None:
            writer.backward = True
            _backward(writer, scopes, optimizer if update == "per-layer" else None)
            if update == "at-end":
                _update(writer, optimizer, _gradients(writer), scopes[-1][1].index, "update", max_norm)
        return writer, scopes, output

    writer, scopes, output = write(in_place=True)
    lost = _lost(writer)
    if lost:
        writer, scopes, output = write(in_place=False)
        lost = _lost(writer)
    for op, name, by in lost:
        raise ArgumentError(
            f"{op.name} reads {name}, which {by.name} has overwritten; a layer must write to a tensor of its own"
        )
    infos = tuple(LayerInfo(s.index, s.path, layer.kind, s.x.name, s.y.name) for layer, s in scopes)
    if not infos:
        raise ArgumentError("net has no layer that computes anything; append one")
    update = update if training else "none"
    return Graph(shape[0], target, tuple(writer.ops), writer.tensors, infos, output.name, training, update)


def _forward(
    writer: Writer, net: Sequential, loss: Loss | None, shape: tuple[int, ...], own_input: bool
) -> tuple[list[tuple[Layer, Scope]], Tensor]:
    """Write the forward pass; return the layers that own ops with their scopes, and the network's output."""
    leaves: list[tuple[str, Layer]] = list(net.leaves())
    x = output = _input(writer, shape, own_input)
    scopes: list[tuple[Layer, Scope]] = []
    skip = False
    for i, (path, layer) in enumerate([*leaves, *([("loss", loss)] if loss else [])]):
        if skip:  # this ReLU was computed by the layer in front of it
            skip = False
            continue
        out_shape = infer_at(path, layer, shape)
        scope = Scope(writer, path, len(scopes), i, shape, x, x)
        scope.relu = layer.fuses_relu and i + 1 < len(leaves) and isinstance(leaves[i + 1][1], ReLU)
        front = scopes[-1][1] if scopes else None
        scope.mask_dx = bool(
            front and front.relu and writer.training and writer.target.fuses_backward
            and layer.masks and front.y is x
        )  # fmt: skip
        before = len(writer.ops)
        y = _forward_at(layer, scope, out_shape)
        if len(writer.ops) > before:  # a layer without ops (a view, an equal-size pool) is not in the graph
            scope.y = y
            if front and scope.mask_dx:
                front.dy_masked = True
            scopes.append((layer, scope))
        skip = scope.relu
        x, shape = y, out_shape
        if layer is not loss:
            output = y
    return scopes, output


def _lost(writer: Writer) -> list[tuple[Op, str, Op]]:
    """The ops that read what a layer has written and a later one has overwritten: which, what, and who did."""
    made: dict[str, int] = {}
    overwritten: dict[str, Op] = {}
    found = []
    for op in writer.ops:
        found += [(op, name, overwritten[name]) for _, name in op.reads
                  if name in overwritten and op.layer < overwritten[name].layer]
        for _, name in op.writes:
            if op.forward:
                made.setdefault(name, op.layer)
            if made.get(name, op.layer) != op.layer:
                overwritten[name] = op
    return found


def _forward_at(layer: Layer, scope: Scope, shape: tuple[int, ...]) -> Tensor:
    """`layer.forward`, whose output is to have that shape, with the layer's path in front of what it says."""
    before = len(scope.writer.ops)
    with calling(layer, scope.path, "forward") as name:
        y: object = layer.forward(scope)
    if not isinstance(y, Tensor):
        raise ArgumentError(f"{name}: forward returned {shown(y)}; it must return its output, a Tensor")
    if prod(y.shape) != prod(shape):
        raise ShapeError(f"{name}: forward returned a tensor of {list(y.shape)}; infer said {list(shape)}: make one so")
    if y is not scope.x and y.name not in _written(scope.writer.ops[before:]):
        raise ArgumentError(f"{name}: forward returned {y.name}, which none of its ops writes; one must")
    return y


def _written(ops: Sequence[Op]) -> set[str]:
    return {name for op in ops for _, name in op.writes}


def _backward_at(layer: Layer, scope: Scope, dy: Tensor) -> Tensor | None:
    """`layer.backward`, of a layer that has one; None where the gradient of its input is not needed."""
    before = len(scope.writer.ops)
    with calling(layer, scope.path, "backward", "a layer that is trained") as name:
        dx: object = layer.backward(scope, dy)
    if not scope.needs_dx:
        return None
    if not isinstance(dx, Tensor) or prod(dx.shape) != prod(scope.shape):
        raise ArgumentError(
            f"{name}: backward returned {shown(dx)}; "
            "it must return the gradient of its input, a Tensor such as scope.dx()"
        )
    if dx is not dy and dx.name not in _written(scope.writer.ops[before:]):
        raise ArgumentError(f"{name}: backward returned {dx.name}, which none of its ops writes; one must")
    return dx


def _input(writer: Writer, shape: tuple[int, ...], own: bool) -> Tensor:
    """X0 as it comes from the host (float32, NCHW), and, where the target differs or wants its `own`, a cast of it."""
    target = writer.target
    x = writer.tensor("input", shape, "float32", Role.INPUT)
    scalars_tensor(writer)
    one_layout = target.layout == "NCHW" or len(shape) < 4 or shape[1] == 1 or shape[2] * shape[3] == 1
    if target.activation_dtype == "float32" and one_layout and not own:
        return x
    y = writer.tensor("input.cast", shape, target.activation_dtype, Role.ACTIVATION, target.layout)
    writer.op("input:cast", "cast", "cast", 0, [("x", x)], [("y", y)])
    return y


def _backward(writer: Writer, scopes: list[tuple[Layer, Scope]], optimizer: Optimizer | None) -> None:
    """Write backward from the last layer to the first one that has weights; `optimizer`: update inside each layer."""
    learns = [i for i, (layer, _) in enumerate(scopes) if any(p.role is Role.WEIGHT for p in layer.parameters.values())]
    if not learns:
        raise ArgumentError("net has no weights to train; append a layer that has some")
    dy = scopes[-1][1].y
    for i in range(len(scopes) - 1, learns[0] - 1, -1):
        layer, scope = scopes[i]
        scope.needs_dx = i > learns[0]
        if scope.relu and not scope.dy_masked:
            scope.emit("backward_activation", "relu_backward", [("y", scope.y), ("dy", dy)], [("dx", dy)])
        before = len(writer.ops)
        dx = _backward_at(layer, scope, dy)
        _settle(writer, scope, _written(writer.ops[before:]), optimizer)
        if dx is not None:
            dy = dx


def _settle(writer: Writer, scope: Scope, written: set[str], optimizer: Optimizer | None) -> None:
    """After a layer's backward: add up micro-batch gradients, or update its weights at once."""
    micro = [t for t in writer.tensors.values() if t.name in written and t.name.endswith("@micro")]
    if micro:
        totals = [writer.tensors[t.name.removesuffix("@micro")] for t in micro]
        scope.emit(
            "accumulate", "accumulate", [*(("source[]", t) for t in micro), *(("total[]", t) for t in totals)],
            [("total[]", t) for t in totals],
        )  # fmt: skip
    gradients = [t for t in _gradients(writer) if t.name in written]
    if optimizer and gradients:
        _update(writer, optimizer, gradients, scope.index, f"{scope.path}:update", None)


def _gradients(writer: Writer) -> list[Tensor]:
    return [t for t in writer.tensors.values() if t.role is Role.WEIGHT_GRADIENT]


def _update(
    writer: Writer, optimizer: Optimizer, gradients: list[Tensor], layer: int, name: str, max_norm: float | None
) -> None:
    """One update op for these weights. Those with a bf16 copy come first: copy i belongs to weight i."""
    stored = {dw.name: writer.tensors[weight_name(dw.name)] for dw in gradients}
    gradients = sorted(gradients, key=lambda dw: f"{stored[dw.name].name}@bf16" not in writer.tensors)
    weights = [stored[dw.name] for dw in gradients]
    states = [
        (f"{state}[]", writer.tensor(f"{w.name}@{state}", w.shape, w.dtype, Role.OPTIMIZER_STATE, w.layout))
        for state in optimizer.states
        for w in weights
    ]
    copies = [("copy[]", writer.tensors[f"{w.name}@bf16"]) for w in weights if f"{w.name}@bf16" in writer.tensors]
    clip = None
    if max_norm is not None:
        clip = writer.tensor("clip", (1,), writer.target.weight_dtype, Role.MASK)
        writer.op(
            "clip", "update", "clip_factor", layer, [("dw[]", dw) for dw in gradients], [("clip", clip)],
            max_norm=float(max_norm),
        )  # fmt: skip
    writer.op(
        name, "update", optimizer.function, layer,
        [*(("w[]", w) for w in weights), *(("dw[]", dw) for dw in gradients), *states,
         ("scalars", scalars_tensor(writer)), ("clip", clip)],
        [*(("w[]", w) for w in weights), *states, *copies], **optimizer.attributes(),
    )  # fmt: skip


def weight_name(gradient: str) -> str:
    """`features.0.dweight` -> `features.0.weight`."""
    head, _, tail = gradient.rpartition(".")
    return f"{head}.{tail[1:]}"
