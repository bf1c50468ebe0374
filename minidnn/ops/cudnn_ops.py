"""Convolutions on CUDA: cuDNN's plan, and what of ours goes before and after it.

A plan's name is the algorithm's name in profiles and schedules, and says what is to be done: the epilogue is fused, or
one of our kernels follows; dW is left rounded, and cast; X and W are padded with zeros first; the batch is split into
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minidnn.errors import DeviceError, ShapeError
from minidnn.ops import map_ops
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Launcher, sequence
from minidnn.ops.plans import FUSED, PADDED, ROUNDED, SPLIT, Padding, Pair, Problem, split_of, variant_of


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
        algorithm = next(a.name for a in on.plans.algorithms(p) if not a.name.startswith((PADDED, SPLIT)))
    return on.plans.bind(p, algorithm, workspace), algorithm


def _padded(p: Problem, workspace: int) -> dict[str, Any]:
    """The operands of the convolution over more channels."""
    wide = p.padded(workspace)
    if wide is None:
        raise DeviceError(f"a padded plan is not for {p.key}; profile this card again")
    return dict(wide.arrays)


def _in_parts(
    on: Context, op: Callable[..., Launcher], p: Problem, algorithm: str, workspace: int, **more: Any
) -> Launcher:
    """The convolution over the parts of a batch, one after another in the same workspace; the parts of dW are added."""
    split = split_of(algorithm)
    assert split is not None
    count, inner = split
    if count not in p.part_counts:
        raise DeviceError(f"a batch in {count} parts is not for {p.key}; profile this card again")
    window: dict[str, Any] = {"stride": p.stride, "padding": p.padding, "dilation": p.dilation, "groups": p.groups}
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
    if algorithm.startswith(PADDED):
        wide = _padded(p, workspace)
        return sequence(
            map_ops.pad_channels(on, x=x, y=wide["x"]), map_ops.pad_channels(on, x=w, y=wide["w"]),
            conv2d_forward(
                on, **wide, relu=relu, stride=stride, padding=padding, dilation=dilation,
                algorithm=algorithm.removeprefix(PADDED), workspace=workspace + p.padded_bytes,
            ),
        )  # fmt: skip
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
    if algorithm.startswith(PADDED):
        wide = _padded(p, workspace)
        return sequence(
            map_ops.pad_channels(on, x=x, y=wide["x"]),
            conv2d_backward_filter(
                on, **wide, stride=stride, padding=padding, dilation=dilation,
                algorithm=algorithm.removeprefix(PADDED), workspace=workspace + p.padded_bytes,
            ),
            map_ops.cut_channels(on, x=wide["dw"], y=dw),
        )  # fmt: skip
    launch, name = _bind(on, p, algorithm, workspace)
    if variant_of(name) != ROUNDED:
        return launch
    assert on.plans is not None
    return sequence(launch, map_ops.cast(on, x=on.plans.rounded(p, name, workspace), y=dw))
