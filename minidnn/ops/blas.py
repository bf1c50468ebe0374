"""Fully connected layers on CUDA: cuBLAS, with a workspace that we own.

cuBLAS is called through ctypes: CuPy's binding sets the stream at each call, which makes cuBLAS forget a workspace that
was set by hand and take memory of its own.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_void_p
from math import prod
from typing import Any

from minidnn.errors import DeviceError, ShapeError
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Launcher, load_library, sequence
from minidnn.ops.map_ops import bias_relu, relu_backward

_TYPES = {"float32": 0, "bfloat16": 14}  # cudaDataType
_COMPUTE = {"fp32": 68, "tf32": 77, "bf16": 68}  # cublasComputeType_t: 32F, 32F_FAST_TF32
_TRANSPOSE = {False: 0, True: 1}  # cublasOperation_t
_DEFAULT_ALGORITHM = -1
_ONE, _ZERO = c_float(1.0), c_float(0.0)


class Blas:
    """A cuBLAS handle bound to one stream and one workspace (address, nbytes); created at first use."""

    def __init__(self, stream: int, workspace: tuple[int, int]) -> None:
        self._stream, self._workspace = stream, workspace
        self._library: Any = None
        self._handle = c_void_p()

    def _open(self) -> None:
        self._library = ctypes.CDLL(load_library("cublas"))
        self._call("cublasCreate_v2", byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, c_void_p(self._stream))
        address, nbytes = self._workspace
        self._call("cublasSetWorkspace_v2", self._handle, c_void_p(address), ctypes.c_size_t(nbytes))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DeviceError(f"{name} failed with cuBLAS status {status}; see cublasStatus_t")

    def product(
        self, a: Array, b: Array, c: Array, m: int, n: int, k: int, *,
        transpose_a: bool = False, transpose_b: bool = False, precision: str,
    ) -> Launcher:  # fmt: skip
        """Bind C [m,n] = A [m,k] B [k,n], all row-major; a transposed operand is stored as [k,m] or [n,k].

        cuBLAS is column-major, so it computes the transposed product: C' = B' A'.
        """
        if not self._handle:
            self._open()
        function = self._library.cublasGemmEx
        arguments = (
            self._handle, c_int(_TRANSPOSE[transpose_b]), c_int(_TRANSPOSE[transpose_a]), c_int(n), c_int(m), c_int(k),
            byref(_ONE), c_void_p(b.address), c_int(_TYPES[b.dtype]), c_int(k if transpose_b else n),
            c_void_p(a.address), c_int(_TYPES[a.dtype]), c_int(m if transpose_a else k),
            byref(_ZERO), c_void_p(c.address), c_int(_TYPES[c.dtype]), c_int(n),
            c_int(_COMPUTE[precision]), c_int(_DEFAULT_ALGORITHM),
        )  # fmt: skip

        def run() -> None:
            status = function(*arguments)
            if status != 0:
                raise DeviceError(
                    f"cublasGemmEx of {m} x {k} x {n} failed with cuBLAS status {status}; "
                    "see cublasStatus_t"
                )

        return run

    def close(self) -> None:
        """Destroy the handle."""
        if self._handle:
            self._call("cublasDestroy_v2", self._handle)
            self._handle = c_void_p()


def _matrix(x: Array, what: str) -> tuple[int, int]:
    """Rows and columns of [N,F] or of [N,C,H,W] that lies as [N, C*H*W]. Raises ShapeError where it lies otherwise."""
    if "nchw" not in x.layouts:
        raise ShapeError(f"{what} of shape {list(x.shape)} lies channels-last; Linear needs a layout change before it")
    return x.shape[0], prod(x.shape[1:])


def _blas(on: Context) -> Blas:
    assert on.blas is not None
    return on.blas


def linear_forward(
    on: Context, *, x: Array, w: Array, y: Array, b: Array | None = None, relu: bool = False
) -> Launcher:
    """Y [N,O] = X [N,F] W' + b, then ReLU."""
    rows, features = _matrix(x, "X")
    product = _blas(on).product(x, w, y, rows, w.shape[0], features, transpose_b=True, precision=on.precision)
    if b is not None:
        return sequence(product, bias_relu(on, y=y, b=b, relu=relu))
    return sequence(product, relu_backward(on, y=y, dy=y, dx=y)) if relu else product


def linear_backward_data(on: Context, *, dy: Array, w: Array, dx: Array, mask: Array | None = None) -> Launcher:
    """dX [N,F] = dY [N,O] W, zero where mask <= 0."""
    rows, features = _matrix(dx, "dX")
    product = _blas(on).product(dy, w, dx, rows, features, w.shape[0], precision=on.precision)
    return sequence(product, relu_backward(on, y=mask, dy=dx, dx=dx)) if mask is not None else product


def linear_backward_filter(on: Context, *, x: Array, dy: Array, dw: Array) -> Launcher:
    """dW [O,F] = dY' X, float32."""
    rows, features = _matrix(x, "X")
    return _blas(on).product(dy, x, dw, dw.shape[0], features, rows, transpose_a=True, precision=on.precision)


