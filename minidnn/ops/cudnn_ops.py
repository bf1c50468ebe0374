"""Convolutions on CUDA: cuDNN's plan, and what of ours goes before and after it.

A plan's name is the algorithm's name in profiles and schedules, and says what is to be done: the epilogue is fused, or
one of our kernels follows; dW is left rounded, and cast; X and W are padded with zeros or unfolded first; the batch is
split into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minidnn.errors import DeviceError, ShapeError
from minidnn.ops import image_ops, map_ops
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Launcher, sequence
from minidnn.ops.plans import (
    FUSED,
    PADDED,
    PREPARED,
    ROUNDED,
    SPLIT,
    Padding,
    Pair,
    Problem,
    kind_of,
    split_of,
    variant_of,
)  # fmt: skip


def problem(
    function: str, precision: str, arrays: Mapping[str, Array | None], *,
    stride: Pair, padding: Padding, dilation: Pair, groups: int = 1, relu: bool = False,
) -> Problem:  # fmt: skip
    """The plans' view of a convolution: operands in the order of the graph's uids, output last."""
    order = {
        "conv2d_forward": ("x", "w", "b", "y"),
        "conv2d_backward_data": ("dy", "w", "mask", "dx"),
        "conv2d_backward_filter": ("x", "dy", "dw"),
    }[function]
    given = [(name, arrays.get(name)) for name in order]
    operands = tuple((name, array) for name, array in given if array is not None)
    for name, array in operands:
        if name != "b" and len(array.shape) != 4:
            raise ShapeError(f"{function}: {name} has shape {list(array.shape)}; expected four axes")
    return Problem(function, operands, stride, padding, dilation, groups, relu, precision)


def _bind(on: Context, p: Problem, algorithm: str, workspace: int) -> tuple[Launcher, str]:
    """The convolution, and the name of its plan: what is still to do goes by that."""
    assert on.plans is not None
    if algorithm == "default":
        algorithm = next(a.name for a in on.plans.algorithms(p) if not a.name.startswith((*PREPARED, SPLIT)))
    return on.plans.bind(p, algorithm, workspace), algorithm


def _prepared(on: Context, p: Problem, kind: str, workspace: int) -> tuple[Problem, dict[str, Launcher]]:
    """The convolution over other X and W, and what makes them."""
    wide = p.prepared(kind, workspace)
    if wide is None:
        raise DeviceError(f"a plan that is {kind.strip()} is not for {p.key}; profile this card again")
    arrays, others = p.arrays, wide.arrays
    made: dict[str, Launcher] = {}
    for name in ("x", "w"):
        if name not in arrays:
            continue
        x, y = arrays[name], others[name]
        if kind == PADDED:
            made[name] = image_ops.pad_channels(on, x=x, y=y)
            continue
        # A weight's windows are the whole weight, one behind the other.
        window = p.window if name == "x" else {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
        _, _, r, s = (arrays.get("w") or arrays["dw"]).shape4
        made[name] = image_ops.unfold(on, x=x, y=y, kernel=(r, s), **window)
    return wide, made


def _in_parts(
    on: Context, op: Callable[..., Launcher], p: Problem, algorithm: str, workspace: int, **more: Any
) -> Launcher:
    """The convolution over the parts of a batch, one after another in the same workspace; the parts of dW are added."""
    split = split_of(algorithm)
    assert split is not None
    count, inner = split
    if count not in p.part_counts:
        raise DeviceError(f"a batch in {count} parts is not for {p.key}; profile this card again")
    window: dict[str, Any] = {**p.window, "groups": p.groups}
    total = p.arrays.get("dw")
    launches: list[Launcher] = []
    for i, part in enumerate(p.parts(count, workspace)):
        arrays: dict[str, Any] = dict(part.arrays)
        launches.append(op(on, **arrays, **window, **more, algorithm=inner, workspace=workspace + p.split_bytes))
        if total is not None and i > 0:
            launches.append(map_ops.accumulate(on, source=[arrays["dw"]], total=[total]))
    return sequence(*launches)


def conv2d_forward(
    on: Context, *, x: Array, w: Array, y: Array, b: Array | None = None, relu: bool = False, stride: Pair,
    padding: Padding, dilation: Pair, groups: int = 1, algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """Y [N,K,P,Q] = conv(X [N,C,H,W], W [K,C/groups,R,S]) + b, then ReLU."""
    p = problem(
        "conv2d_forward", on.precision, {"x": x, "w": w, "b": b, "y": y},
        stride=stride, padding=padding, dilation=dilation, groups=groups, relu=relu,
    )  # fmt: skip
    if algorithm.startswith(SPLIT):
        return _in_parts(on, conv2d_forward, p, algorithm, workspace, relu=relu)
    if kind := kind_of(algorithm):
        wide, made = _prepared(on, p, kind, workspace)
        operands: dict[str, Any] = dict(wide.arrays)
        convolution = conv2d_forward(
            on, **operands, relu=relu, **wide.window, algorithm=algorithm.removeprefix(kind),
            workspace=workspace + p.prepared_bytes(kind),
        )  # fmt: skip
        return sequence(made["x"], made["w"], convolution)
    launch, name = _bind(on, p, algorithm, workspace)
    if variant_of(name) == FUSED or not p.has_epilogue:
        return launch
    if b is None:
        return sequence(launch, map_ops.relu_backward(on, y=y, dy=y, dx=y))
    return sequence(launch, map_ops.bias_relu(on, y=y, b=b, relu=relu))


def conv2d_backward_data(
    on: Context, *, dy: Array, w: Array, dx: Array, mask: Array | None = None, stride: Pair, padding: Padding,
    dilation: Pair, groups: int = 1, algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """dX from dY and W, zero where mask <= 0."""
    p = problem(
        "conv2d_backward_data", on.precision, {"dy": dy, "w": w, "mask": mask, "dx": dx},
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    if algorithm.startswith(SPLIT):
        return _in_parts(on, conv2d_backward_data, p, algorithm, workspace)
    launch, name = _bind(on, p, algorithm, workspace)
    if variant_of(name) == FUSED or mask is None:
        return launch
    return sequence(launch, map_ops.relu_backward(on, y=mask, dy=dx, dx=dx))


def conv2d_backward_filter(
    on: Context, *, x: Array, dy: Array, dw: Array, stride: Pair, padding: Padding, dilation: Pair, groups: int = 1,
    algorithm: str = "default", workspace: int = 0,
) -> Launcher:  # fmt: skip
    """dW (float32) from X and dY."""
    p = problem(
        "conv2d_backward_filter", on.precision, {"x": x, "dy": dy, "dw": dw},
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    if algorithm.startswith(SPLIT):
        return _in_parts(on, conv2d_backward_filter, p, algorithm, workspace)
    if kind := kind_of(algorithm):
        wide, made = _prepared(on, p, kind, workspace)
        operands: dict[str, Any] = dict(wide.arrays)
        convolution = conv2d_backward_filter(
            on, **operands, **wide.window, algorithm=algorithm.removeprefix(kind),
            workspace=workspace + p.prepared_bytes(kind),
        )  # fmt: skip
        k, c, r, s = dw.shape4
        y = dw if kind == PADDED else Array.channels_last(dw.address, (k, r * s * c, 1, 1), dw.dtype)
        return sequence(made["x"], convolution, image_ops.cut_channels(on, x=operands["dw"], y=y))
    launch, name = _bind(on, p, algorithm, workspace)
    if variant_of(name) != ROUNDED:
        return launch
    assert on.plans is not None
    return sequence(launch, map_ops.cast(on, x=on.plans.rounded(p, name, workspace), y=dw))
