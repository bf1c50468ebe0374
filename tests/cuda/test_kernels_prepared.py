"""Plans over other X and W than the given ones: the kernels that fill up, unfold and cut off, and convolutions through
them; and plans over parts of a batch."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.errors import DeviceError
from minidnn.ops import cudnn_ops, image_ops
from minidnn.ops.kernels import Launcher
from minidnn.ops.numpy_ops import OPS
from minidnn.ops.plans import PADDED, PREPARED, UNFOLDED, PlanStore, Problem, kind_of
from tests.cuda.fake import HostPlans
from tests.cuda.parity import normal
from tests.cuda.support import Emulated, Place, difference

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
    image_ops.pad_channels(place.context, x=x, y=wide)()
    place.check()
    found = place.get(wide)
    assert (found[:, :channels] == value).all()
    assert (found[:, channels:] == 0).all()
    back = place.empty(value.shape, dtype, "NHWC")
    image_ops.cut_channels(place.context, x=wide, y=back)()
    place.check()
    assert (place.get(back) == value).all()


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation"),
    [
        (3, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), (1, (5, 2), (2, 1), ((0, 3), (1, 0)), (1, 2)),
        (2, (4, 4), (4, 3), ((2, 2), (2, 2)), (2, 1)),
    ],
)  # fmt: skip
def test_windows_become_channels(
    place: Place, dtype: str, channels: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    value = normal((6, channels, 13, 9), dtype)
    padded = np.pad(value, ((0, 0), (0, 0), *padding))
    r, s = kernel
    p, q = ((padded.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    y = place.empty((6, -(-r * s * channels // 16) * 16, p, q), dtype, "NHWC")
    window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    image_ops.unfold(place.context, x=place.put(value, "NHWC"), y=y, **window)()
    place.check()
    found = place.get(y)
    taps = [
        padded[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]][:, :, :p, :q]
        for i in range(r) for j in range(s)
    ]  # fmt: skip
    assert (found[:, : r * s * channels] == np.concatenate(taps, 1)).all()
    assert (found[:, r * s * channels :] == 0).all()


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
        wide = problem(dtype, 3).prepared(PADDED, 1024)
        assert wide is not None
        assert [a.shape[1] for _, a in wide.operands] == [width, width, 6]
        x, w = wide.arrays["x"], wide.arrays["w"]
        assert (x.address, w.address) == (1024, 1024 + -(-x.nbytes // 256) * 256)
        assert problem(dtype, 3).prepared_bytes(PADDED) == w.address - 1024 + -(-w.nbytes // 256) * 256
        for kind in PREPARED:
            assert problem(dtype, width).prepared(kind) is None
            assert problem(dtype, 3, "NCHW").prepared(kind) is None
            assert problem(dtype, 3, groups=3).prepared(kind) is None
            assert problem("float32", 3, precision="fp32").prepared(kind) is None
            assert problem("float32", 3, precision="fp32").prepared_bytes(kind) == 0


def test_unfolded_a_convolution_has_windows_of_one_pixel() -> None:
    for dtype in WIDTHS:
        flat = problem(dtype, 3).prepared(UNFOLDED, 1024)
        assert flat is not None
        assert (flat.stride, flat.padding, flat.dilation) == ((1, 1), ((0, 0), (0, 0)), (1, 1))
        assert [a.shape for _, a in flat.operands] == [(2, 32, 5, 8), (6, 32, 1, 1), (2, 6, 5, 8)]
        x, w = flat.arrays["x"], flat.arrays["w"]
        assert (x.address, w.address) == (1024, 1024 + -(-x.nbytes // 256) * 256)


@pytest.mark.parametrize("plan", [f"{kind}{plan}" for kind in PREPARED for plan in ("fused host", "host")])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_convolution_over_other_operands_is_the_same(dtype: str, plan: str) -> None:
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
        space = place.empty((p.prepared_bytes(kind_of(plan)) + 4096 + 16,), "uint8")
        aligned = -(-space.address // 16) * 16
        getattr(cudnn_ops, function)(on, **arrays, **WINDOW, **more, algorithm=plan, workspace=aligned)()
        place.check()
    window = {**WINDOW, "groups": 1, "algorithm": "implicit", "workspace": None}
    host: dict[str, Any] = {"x": x, "w": w, "b": b, "y": np.zeros(y.shape, numpy_dtype(dtype))}
    OPS["conv2d_forward"](**host, **window, relu=True)
    assert difference(place.get(y), host["y"]) <= 8e-3
    host = {"x": x, "dy": dy, "dw": np.zeros(w.shape, np.float32)}
    OPS["conv2d_backward_filter"](**host, **window)
    assert difference(place.get(dw), host["dw"]) <= 1e-5


@pytest.mark.parametrize("plan", [f"{kind}{plan}" for kind in ("", *PREPARED) for plan in ("fused host", "host")])
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
        if kind_of(plan) and function == "conv2d_backward_data":
            continue
        arrays: dict[str, Any] = {n: (given | results)[n] for n in names.split()}
        relu: dict[str, Any] = {"relu": True} if function == "conv2d_forward" else {}
        p = cudnn_ops.problem(function, PRECISION[dtype], arrays, **WINDOW, **relu)
        part = p.parts(4)[0]
        space = place.empty((p.split_bytes + part.prepared_bytes(kind_of(plan)) + 4096 + 16,), "uint8")
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


@pytest.mark.parametrize("kind", PREPARED)
def test_a_plan_over_other_operands_is_refused_for_many_channels(kind: str) -> None:
    place = Emulated("bf16")
    arrays: dict[str, Any] = dict(problem("bfloat16", 16).operands)
    with pytest.raises(DeviceError, match=f"a plan that is {kind}is not for conv2d_forward"):
        cudnn_ops.conv2d_forward(place.context, **arrays, **WINDOW, algorithm=f"{kind}host", workspace=512)
