"""Plans over more channels than X has: the kernels that fill up and cut off, and a convolution through them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.errors import DeviceError
from minidnn.ops import cudnn_ops, map_ops
from minidnn.ops.kernels import Launcher
from minidnn.ops.numpy_ops import OPS
from minidnn.ops.plans import PADDED, PlanStore, Problem
from tests.cuda.fake import HostPlans
from tests.cuda.support import Emulated, Place, difference
from tests.cuda.test_kernels import normal

WINDOW: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 1), (0, 2)), "dilation": (1, 1)}
WIDTHS = {"float32": 4, "bfloat16": 8}
PRECISION = {"float32": "tf32", "bfloat16": "bf16"}


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("pixels", [(1, 1), (13, 7), (33, 40)])
def test_channels_are_filled_up_with_zeros_and_cut_off_again(
    place: Place, dtype: str, channels: int, pixels: tuple[int, int]
) -> None:
    value = normal((3, channels, *pixels), dtype)
    x, wide = place.put(value, "NHWC"), place.empty((3, WIDTHS[dtype], *pixels), dtype, "NHWC")
    map_ops.pad_channels(place.context, x=x, y=wide)()
    place.check()
    found = place.get(wide)
    assert (found[:, :channels] == value).all()
    assert (found[:, channels:] == 0).all()
    back = place.empty(value.shape, dtype, "NHWC")
    map_ops.cut_channels(place.context, x=wide, y=back)()
    place.check()
    assert (place.get(back) == value).all()


class Plans(HostPlans):
    """Plans that use their workspace."""

    def bind(self, problem: Problem, algorithm: str, workspace: int) -> Launcher:
        launch = super().bind(problem, algorithm, workspace)

        def run() -> None:
            ctypes.memset(workspace, 0xFF, 4096)
            launch()

        return run


def problem(dtype: str, channels: int, layout: str = "NHWC", groups: int = 1, precision: str | None = None) -> Problem:
    place = Emulated()
    arrays = {
        "x": place.empty((2, channels, 9, 8), dtype, layout),
        "w": place.empty((6, channels // groups, 3, 3), dtype, layout),
        "y": place.empty((2, 6, 5, 8), dtype, layout),
    }
    return cudnn_ops.problem("conv2d_forward", precision or PRECISION[dtype], arrays, **WINDOW, groups=groups)


def test_only_few_channels_that_lie_innermost_are_filled_up() -> None:
    for dtype, width in WIDTHS.items():
        wide = problem(dtype, 3).padded(1024)
        assert wide is not None
        assert [a.shape[1] for _, a in wide.operands] == [width, width, 6]
        x, w = wide.arrays["x"], wide.arrays["w"]
        assert (x.address, w.address) == (1024, 1024 + -(-x.nbytes // 256) * 256)
        assert problem(dtype, 3).padded_bytes == w.address - 1024 + -(-w.nbytes // 256) * 256
        assert problem(dtype, width).padded() is None
        assert problem(dtype, 3, "NCHW").padded() is None
        assert problem(dtype, 3, groups=3).padded() is None
    assert problem("float32", 3, precision="fp32").padded() is None


@pytest.mark.parametrize("plan", ["fused host", "host"])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_convolution_over_filled_up_channels_is_the_same(dtype: str, plan: str) -> None:
    place = Emulated(PRECISION[dtype])
    plans: Any = Plans(0, PlanStore(None))
    on = replace(place.context, plans=plans)
    x, w, dy = normal((2, 3, 9, 8), dtype), normal((6, 3, 3, 3), dtype, 1), normal((2, 6, 5, 8), dtype, 2)
    b = normal((6,), "float32", 3)
    given = {name: place.put(value, "NHWC") for name, value in (("x", x), ("w", w), ("b", b), ("dy", dy))}
    y, dw = place.empty(dy.shape, dtype, "NHWC"), place.empty(w.shape, "float32", "NHWC")
    forward: dict[str, Any] = {"x": given["x"], "w": given["w"], "b": given["b"], "y": y}
    backward: dict[str, Any] = {"x": given["x"], "dy": given["dy"], "dw": dw}
    relu: dict[str, Any] = {"relu": True}
    for function, arrays, more in (("conv2d_forward", forward, relu), ("conv2d_backward_filter", backward, {})):
        p = cudnn_ops.problem(function, PRECISION[dtype], arrays, **WINDOW, **more)
        space = place.empty((p.padded_bytes + 4096,), "uint8")
        aligned = -(-space.address // 16) * 16
        getattr(cudnn_ops, function)(on, **arrays, **WINDOW, **more, algorithm=PADDED + plan, workspace=aligned)()
        place.check()
    window = {**WINDOW, "groups": 1, "algorithm": "implicit", "workspace": None}
    host: dict[str, Any] = {"x": x, "w": w, "b": b, "y": np.zeros(y.shape, numpy_dtype(dtype))}
    OPS["conv2d_forward"](**host, **window, relu=True)
    assert difference(place.get(y), host["y"]) <= 8e-3
    host = {"x": x, "dy": dy, "dw": np.zeros(w.shape, np.float32)}
    OPS["conv2d_backward_filter"](**host, **window)
    assert difference(place.get(dw), host["dw"]) <= 1e-5


@pytest.mark.parametrize("plan", ["fused host", "host", "padded fused host", "padded host"])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_convolution_of_a_batch_in_parts_is_the_same(dtype: str, plan: str) -> None:
    place = Emulated(PRECISION[dtype])
    plans: Any = Plans(0, PlanStore(None))
    on = replace(place.context, plans=plans)
    x, w, dy = normal((8, 3, 8, 8), dtype), normal((6, 3, 3, 3), dtype, 1), normal((8, 6, 4, 8), dtype, 2)
    b, mask = normal((6,), "float32", 3), normal((8, 3, 8, 8), dtype, 4)
    given = {n: place.put(value, "NHWC") for n, value in {"x": x, "w": w, "b": b, "dy": dy, "mask": mask}.items()}
    results = {
        "y": place.empty(dy.shape, dtype, "NHWC"), "dw": place.empty(w.shape, "float32", "NHWC"),
        "dx": place.empty(x.shape, dtype, "NHWC"),
    }  # fmt: skip
    host: dict[str, Any] = {"x": x, "w": w, "b": b, "dy": dy, "mask": mask}
    host |= {n: np.zeros(a.shape, numpy_dtype(a.dtype)) for n, a in results.items()}
    window = {**WINDOW, "groups": 1, "algorithm": "implicit", "workspace": None}
    for function, names, limit in (
        ("conv2d_forward", "x w b y", 8e-3), ("conv2d_backward_data", "dy w mask dx", 8e-3),
        ("conv2d_backward_filter", "x dy dw", 1e-5),
    ):  # fmt: skip
        if plan.startswith(PADDED) and function == "conv2d_backward_data":
            continue
        arrays: dict[str, Any] = {n: (given | results)[n] for n in names.split()}
        relu: dict[str, Any] = {"relu": True} if function == "conv2d_forward" else {}
        p = cudnn_ops.problem(function, PRECISION[dtype], arrays, **WINDOW, **relu)
        part = p.parts(4)[0]
        space = place.empty((p.split_bytes + part.padded_bytes + 4096 + 16,), "uint8")
        aligned = -(-space.address // 16) * 16
        getattr(cudnn_ops, function)(
            on, **arrays, **WINDOW, **relu, algorithm=f"split 4 {plan}", workspace=aligned
        )()  # fmt: skip
        place.check()
        OPS[function](**{n: host[n] for n in names.split()}, **window, **relu)
        output = names.split()[-1]
        assert difference(place.get(results[output]), host[output]) <= limit


def test_a_batch_that_cannot_be_split_so_is_refused() -> None:
    place = Emulated("bf16")
    arrays: dict[str, Any] = dict(problem("bfloat16", 16).operands)
    with pytest.raises(DeviceError, match="a batch in 3 parts is not for conv2d_forward"):
        cudnn_ops.conv2d_forward(place.context, **arrays, **WINDOW, algorithm="split 3 host", workspace=512)


def test_a_padded_plan_for_many_channels_is_refused() -> None:
    place = Emulated("bf16")
    arrays: dict[str, Any] = dict(problem("bfloat16", 16).operands)
    with pytest.raises(DeviceError, match="a padded plan is not for conv2d_forward"):
        cudnn_ops.conv2d_forward(place.context, **arrays, **WINDOW, algorithm="padded host", workspace=512)
