"""Parity of our kernels with the host's op of the same name: what the kernel tests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from minidnn.device.base import numpy_dtype
from minidnn.ops import map_ops, norm_ops, pool_ops
from minidnn.ops.numpy_ops import OPS
from tests.cuda.support import Place, difference

TOLERANCE = {"float32": 3e-6, "bfloat16": 8e-3}
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LAYOUTS = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
NO_PADDING = ((0, 0), (0, 0))
Value = Any


def bound(function: str) -> Any:
    """The CUDA op of that name."""
    return next(getattr(m, function) for m in (pool_ops, norm_ops, map_ops) if hasattr(m, function))


def parity(
    place: Place, function: str, inputs: Mapping[str, Value], outputs: Mapping[str, Value], layout: str = "NCHW", /,
    tolerance: float = 3e-6, layouts: Mapping[str, str] | None = None, **attributes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run the op on the host and in `place` and compare all outputs.

    An output is (shape, dtype), a list of them, or the name of the input that it overwrites.
    """
    host: dict[str, Any] = {
        k: [np.array(v) for v in a] if isinstance(a, list) else np.array(a) for k, a in inputs.items()
    }
    where = layouts or {}
    device: dict[str, Any] = {
        k: [place.put(v, where.get(k, layout)) for v in value] if isinstance(value, list)
        else place.put(value, where.get(k, layout))
        for k, value in inputs.items()
    }  # fmt: skip
    for name, output in outputs.items():
        if isinstance(output, str):
            host[name], device[name] = host[output], device[output]
        else:
            shapes = output if isinstance(output, list) else [output]
            made = [np.full(shape, 99, numpy_dtype(dtype)) for shape, dtype in shapes]
            empty = [place.empty(shape, dtype, where.get(name, layout)) for shape, dtype in shapes]
            host[name], device[name] = (made, empty) if isinstance(output, list) else (made[0], empty[0])
    OPS[function](**host, **attributes)
    bound(function)(place.context, **device, **attributes)()
    place.check()
    found: dict[str, Any] = {}
    for name in outputs:
        wanted, got = host[name], device[name]
        pairs = list(zip(got, wanted, strict=True)) if isinstance(wanted, list) else [(got, wanted)]
        found[name] = [place.get(array) for array, _ in pairs]
        for value, (_, reference) in zip(found[name], pairs, strict=True):
            assert difference(value, reference) <= tolerance, f"{function}: {name} differs"
    return found


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Random values of that type."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values.astype(numpy_dtype(dtype))
