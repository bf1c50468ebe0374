"""The cases of bench/kernels.py: each kernel at the sizes of real networks, with what PyTorch makes of the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minidnn.ops import image_ops, map_ops, norm_ops, pool_ops
from minidnn.ops.array import Array
from minidnn.ops.context import Context
from minidnn.ops.kernels import Launcher

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.int64: "int64",
          torch.float64: "float64", torch.uint8: "uint8"}  # fmt: skip
FORMS = [("fp32 NCHW", torch.float32, False), ("fp32 NHWC", torch.float32, True), ("bf16 NHWC", torch.bfloat16, True)]
NO_PADDING = ((0, 0), (0, 0))


@dataclass
class Case:
    """`launch` is timed; `nbytes` is what it must move; `wrong`, called after a launch, says how far off it is."""

    name: str
    launch: Launcher
    nbytes: int
    wrong: Callable[[], float]
    limit: float


def array(t: torch.Tensor) -> Array:
    """A tensor's memory as kernels see it."""
    return Array(t.data_ptr(), tuple(t.shape), tuple(t.stride()), DTYPES[t.dtype])


def normal(*shape: int, dtype: torch.dtype = torch.float32, nhwc: bool = False, scale: float = 1.0) -> torch.Tensor:
    """Random values in that layout."""
    t = torch.randn(*shape, device="cuda") * scale
    return t.to(dtype).to(memory_format=torch.channels_last) if nhwc else t.to(dtype)


def poisoned(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output of that shape and layout that holds nothing useful."""
    t = torch.empty_like(like, dtype=dtype)
    return t.fill_(99 if t.dtype == torch.int8 else float("nan"))


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |found - wanted| / max |wanted|, infinite for NaN."""
    difference = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def size(*tensors: torch.Tensor) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def tolerance(dtype: torch.dtype) -> float:
    """Rounding of one store."""
    return 8e-3 if dtype == torch.bfloat16 else 1e-5


def max_pooling(on: Context) -> Iterator[Case]:
    shapes = [("2x2 224", (64, 64, 224, 224), 2), ("2x2 28", (64, 512, 28, 28), 2), ("2x2 14", (64, 512, 14, 14), 2),
              ("3x3s2 55", (256, 96, 55, 55), 3), ("3x3s2 13", (256, 256, 13, 13), 3)]  # fmt: skip
    for name, shape, k in shapes:
        for form, dtype, nhwc in FORMS:
            x = normal(*shape, dtype=dtype, nhwc=nhwc).relu_().requires_grad_()
            wanted = F.max_pool2d(x, k, 2)
            y = poisoned(wanted.detach())
            index = poisoned(y, torch.int8)
            dy = torch.randn_like(y)
            (expected,) = torch.autograd.grad(wanted, x, dy)
            expected = torch.where(x <= 0, torch.zeros_like(expected), expected)
            dx = poisoned(x.detach())
            geometry: dict[str, Any] = {"kernel": (k, k), "stride": (2, 2), "padding": NO_PADDING, "dilation": (1, 1)}
            x = x.detach()
            yield Case(
                f"max pool {name} forward, {form}",
                pool_ops.max_pool2d_forward(on, x=array(x), y=array(y), index=array(index), relu=True, **geometry),
                size(x, y, index), lambda y=y, wanted=wanted: gap(y, wanted), 0.0,
            )  # fmt: skip
            yield Case(
                f"max pool {name} backward, {form}",
                pool_ops.max_pool2d_backward(on, dy=array(dy), dx=array(dx), index=array(index), **geometry),
                size(dy, index, dx), lambda dx=dx, expected=expected: gap(dx, expected), tolerance(dtype),
            )  # fmt: skip


def max_pooling_without_index(on: Context) -> Iterator[Case]:
    """As the paper's graph saves X and Y, and as table3's window, the whole image, is too large for an index."""
    for name, shape, k, stride in (("2x2 224", (64, 64, 224, 224), 2, 2), ("3x3s2 55", (256, 96, 55, 55), 3, 2),
                                   ("224x224", (64, 64, 224, 224), 224, 224)):  # fmt: skip
        for form, dtype, nhwc in FORMS:
            x = normal(*shape, dtype=dtype, nhwc=nhwc).requires_grad_()
            wanted = F.max_pool2d(x, k, stride)
            y = poisoned(wanted.detach())
            dy = torch.randn_like(y)
            (expected,) = torch.autograd.grad(wanted, x, dy)
            x, dx, wanted = x.detach(), poisoned(x.detach()), wanted.detach()
            geometry: dict[str, Any] = {"kernel": (k, k), "stride": (stride, stride), "padding": NO_PADDING,
                                        "dilation": (1, 1)}  # fmt: skip
            yield Case(
                f"max pool {name} forward without index, {form}",
                pool_ops.max_pool2d_forward(on, x=array(x), y=array(y), **geometry),
                size(x, y), lambda y=y, wanted=wanted: gap(y, wanted), 0.0,
            )  # fmt: skip
            yield Case(
                f"max pool {name} backward from X and Y, {form}",
                pool_ops.max_pool2d_backward(on, dy=array(dy), x=array(x), y=array(wanted), dx=array(dx), **geometry),
                size(dy, x, dx), lambda dx=dx, expected=expected: gap(dx, expected), tolerance(dtype),
            )  # fmt: skip


def average_pooling(on: Context) -> Iterator[Case]:
    for name, shape, window in [("7x7 global", (256, 2048, 7, 7), None), ("3x3", (64, 256, 56, 56), (3, 1, 1))]:
        for form, dtype, nhwc in FORMS:
            x = normal(*shape, dtype=dtype, nhwc=nhwc)
            exact = x.float().contiguous().requires_grad_()
            wanted = F.adaptive_avg_pool2d(exact, 1) if window is None else F.avg_pool2d(exact, *window)
            form_of = torch.channels_last if nhwc else torch.contiguous_format
            dy = torch.randn_like(wanted).to(dtype).to(memory_format=form_of)
            y = poisoned(dy)
            (expected,) = torch.autograd.grad(wanted, exact, dy.float().contiguous())
            dx = poisoned(x)
            if window is None:
                forward = pool_ops.adaptive_avg_pool2d_forward(on, x=array(x), y=array(y))
                backward = pool_ops.adaptive_avg_pool2d_backward(on, dy=array(dy), dx=array(dx))
            else:
                k, s, p = window
                geometry: dict[str, Any] = {"kernel": (k, k), "stride": (s, s), "padding": ((p, p), (p, p))}
                forward = pool_ops.avg_pool2d_forward(on, x=array(x), y=array(y), **geometry)
                backward = pool_ops.avg_pool2d_backward(on, dy=array(dy), dx=array(dx), **geometry)
            yield Case(f"avg pool {name} forward, {form}", forward, size(x, y),
                       lambda y=y, wanted=wanted: gap(y, wanted), tolerance(dtype))  # fmt: skip
            yield Case(f"avg pool {name} backward, {form}", backward, size(dy, dx),
                       lambda dx=dx, expected=expected: gap(dx, expected), tolerance(dtype))  # fmt: skip


def normalization(on: Context) -> Iterator[Case]:
    for form, dtype, nhwc in FORMS:
        x = normal(128, 96, 55, 55, dtype=dtype, nhwc=nhwc).requires_grad_()
        options: dict[str, Any] = {"size": 5, "alpha": 1e-2, "beta": 0.75, "k": 2.0}
        wanted = F.local_response_norm(x.float(), options["size"], options["alpha"], options["beta"], options["k"])
        dy = torch.randn_like(x)
        (expected,) = torch.autograd.grad(wanted, x, dy.float())
        x = x.detach()
        y, dx, scale = poisoned(x), poisoned(x), poisoned(x, torch.float32)
        yield Case(f"LRN forward, {form}",
                   norm_ops.local_response_norm_forward(on, x=array(x), y=array(y), scale=array(scale), **options),
                   size(x, y, scale), lambda y=y, wanted=wanted: gap(y, wanted), tolerance(dtype))  # fmt: skip
        backward = norm_ops.local_response_norm_backward(
            on, x=array(x), y=array(y), scale=array(scale), dy=array(dy), dx=array(dx), **options
        )
        yield Case(f"LRN backward, {form}", backward, size(x, y, scale, dy, dx),
                   lambda dx=dx, expected=expected: gap(dx, expected), tolerance(dtype))  # fmt: skip
    for name, shape in [("112", (64, 64, 112, 112)), ("14", (256, 512, 14, 14))]:
        for form, dtype, nhwc in FORMS:
            x = normal(*shape, dtype=dtype, nhwc=nhwc).requires_grad_()
            w, b = (torch.randn(shape[1], device="cuda") for _ in range(2))
            w.requires_grad_(), b.requires_grad_()
            wanted = F.batch_norm(x, None, None, w, b, training=True)
            dy = torch.randn_like(x)
            expected, _, _ = torch.autograd.grad(wanted, (x, w, b), dy)
            x, w, b = x.detach(), w.detach(), b.detach()
            y, dx = poisoned(x), poisoned(x)
            mean, invstd, dw, db = (poisoned(w) for _ in range(4))
            small = {"w": array(w), "mean": array(mean), "invstd": array(invstd)}
            forward = norm_ops.batch_norm_forward(
                on, x=array(x), y=array(y), b=array(b), momentum=0.1, eps=1e-5, **small
            )
            yield Case(f"batch-norm {name} forward, {form}", forward, 2 * size(x) + size(y),
                       lambda y=y, wanted=wanted: gap(y, wanted), max(tolerance(dtype), 2e-5))  # fmt: skip
            backward = norm_ops.batch_norm_backward(
                on, x=array(x), dy=array(dy), dx=array(dx), dw=array(dw), db=array(db), **small
            )
            yield Case(f"batch-norm {name} backward, {form}", backward, 2 * size(x, dy) + size(dx),
                       lambda dx=dx, expected=expected: gap(dx, expected), max(tolerance(dtype), 1e-4))  # fmt: skip


def bias_gradient(on: Context) -> Iterator[Case]:
    for name, shape in [("224", (64, 64, 224, 224)), ("28", (64, 512, 28, 28)), ("13", (256, 384, 13, 13))]:
        for form, dtype, nhwc in FORMS:
            dy = normal(*shape, dtype=dtype, nhwc=nhwc)
            db, wanted = torch.empty(shape[1], device="cuda"), dy.double().sum((0, 2, 3)).float()
            launch = norm_ops.bias_backward(on, dy=array(dy), db=array(db))
            yield Case(f"bias gradient {name}, {form}", launch, size(dy),
                       lambda db=db, wanted=wanted: gap(db, wanted), 1e-5)  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        dy = normal(4096, 4096, dtype=dtype)
        db, wanted = torch.empty(4096, device="cuda"), dy.double().sum(0).float()
        yield Case(f"bias gradient fc, {dtype}", norm_ops.bias_backward(on, dy=array(dy), db=array(db)), size(dy),
                   lambda db=db, wanted=wanted: gap(db, wanted), 1e-5)  # fmt: skip


def repeated(launch: Launcher, y: torch.Tensor, start: torch.Tensor, wanted: torch.Tensor) -> float:
    """Error of an op that works in place: run again from its first input."""
    y.copy_(start)
    torch.cuda.synchronize()
    launch()
    torch.cuda.synchronize()
    return gap(y, wanted)


def elementwise(on: Context) -> Iterator[Case]:
    for form, dtype, nhwc in FORMS:
        y, dy = (normal(64, 64, 112, 112, dtype=dtype, nhwc=nhwc) for _ in range(2))
        dx = poisoned(y)
        wanted = torch.where(y <= 0, torch.zeros_like(dy), dy)
        yield Case(f"relu backward, {form}", map_ops.relu_backward(on, y=array(y), dy=array(dy), dx=array(dx)),
                   size(y, dy, dx), lambda dx=dx, wanted=wanted: gap(dx, wanted), 0.0)  # fmt: skip
        for function in ("sigmoid", "tanh"):
            launch = map_ops.activation_forward(on, x=array(y), y=array(dx), function=function)
            wanted = getattr(torch, function)(y)
            yield Case(f"{function} forward, {form}", launch, size(y, dx),
                       lambda dx=dx, wanted=wanted: gap(dx, wanted), tolerance(dtype))  # fmt: skip
        b, start = torch.randn(64, device="cuda"), y.clone()
        biased = (start.float() + b[:, None, None]).relu()
        launch = map_ops.bias_relu(on, y=array(y), b=array(b), relu=True)

        yield Case(f"bias + relu, {form}", launch, 2 * size(y), partial(repeated, launch, y, start, biased),
                   tolerance(dtype))  # fmt: skip
    for name, shape, a, b_, before, after in [
        ("NCHW f32 -> NHWC bf16 C=3", (256, 3, 224, 224), torch.float32, torch.bfloat16, False, True),
        ("NCHW f32 -> NHWC f32 C=3", (256, 3, 224, 224), torch.float32, torch.float32, False, True),
        ("NCHW f32 -> NHWC f32", (64, 64, 112, 112), torch.float32, torch.float32, False, True),
        ("NHWC bf16 -> NCHW bf16", (64, 64, 112, 112), torch.bfloat16, torch.bfloat16, True, False),
        ("NHWC bf16 -> NCHW bf16 7x7", (2048, 512, 7, 7), torch.bfloat16, torch.bfloat16, True, False),
        ("NCHW f32 -> NCHW f32 C=3", (256, 3, 224, 224), torch.float32, torch.float32, False, False),
        ("f32 -> bf16", (64, 64, 112, 112), torch.float32, torch.bfloat16, False, False),
        ("bf16 -> f32", (64, 64, 112, 112), torch.bfloat16, torch.float32, False, False),
    ]:
        x = normal(*shape, dtype=a, nhwc=before)
        form_ = torch.channels_last if after else torch.contiguous_format
        y = torch.empty(shape, device="cuda", dtype=b_).to(memory_format=form_)
        yield Case(f"layout {name}", map_ops.layout(on, x=array(x), y=array(y)), size(x, y),
                   lambda y=y, x=x: gap(y, x.to(y.dtype)), 0.0)  # fmt: skip
    for form, dtype, channels in (("bf16", torch.bfloat16, 8), ("fp32", torch.float32, 4)):
        x = normal(256, 3, 224, 224, dtype=dtype, nhwc=True)
        y = poisoned(normal(256, channels, 224, 224, dtype=dtype, nhwc=True))
        wanted = F.pad(x, (0, 0, 0, 0, 0, channels - 3))
        launch = image_ops.pad_channels(on, x=array(x), y=array(y))
        yield Case(f"pad channels 3 to {channels}, {form}", launch, size(x, y),
                   lambda y=y, wanted=wanted: gap(y, wanted), 0.0)  # fmt: skip
    for form, dtype, k, stride in (("bf16 3x3", torch.bfloat16, 3, 1), ("bf16 11x11s4", torch.bfloat16, 11, 4),
                                   ("fp32 3x3", torch.float32, 3, 1)):  # fmt: skip
        x = normal(64, 3, 224, 224, dtype=dtype, nhwc=True)
        pixels, pad = (224 + 2 * (k // 4 + 1) - k) // stride + 1, k // 4 + 1
        y = poisoned(normal(64, -(-3 * k * k // 16) * 16, pixels, pixels, dtype=dtype, nhwc=True))
        launch = image_ops.unfold(
            on, x=array(x), y=array(y), kernel=(k, k), stride=(stride, stride), padding=((pad, pad), (pad, pad)),
            dilation=(1, 1),
        )  # fmt: skip

        def windows(y: torch.Tensor = y, x: torch.Tensor = x, k: int = k, s: int = stride, pad: int = pad) -> float:
            _, wide, p, q = y.shape
            taps = F.unfold(x[:4].float(), k, padding=pad, stride=s).view(4, 3, k * k, p, q).transpose(1, 2)
            return gap(y[:4], F.pad(taps.reshape(4, 3 * k * k, p, q), (0, 0, 0, 0, 0, wide - 3 * k * k)))

        yield Case(f"unfold {form}", launch, size(x, y), windows, 0.0)


def dropout_and_losses(on: Context) -> Iterator[Case]:
    scalars = torch.zeros(16, device="cuda", dtype=torch.float64)
    scalars[1:6] = torch.tensor([1 / 256, 3, 0, 12345, 678], device="cuda", dtype=torch.float64)
    for name, shape, dtype, nhwc in [
        ("fc f32", (4096, 9216), torch.float32, False), ("fc bf16", (4096, 9216), torch.bfloat16, False),
        ("image bf16 NHWC", (256, 256, 28, 28), torch.bfloat16, True),
        ("image f32 NHWC", (256, 256, 28, 28), torch.float32, True),
    ]:  # fmt: skip
        x = normal(*shape, dtype=dtype, nhwc=nhwc)
        y = poisoned(x)

        def share(y: torch.Tensor = y, x: torch.Tensor = x) -> float:
            kept = y != 0
            off = abs(float(kept.float().mean()) - 0.5) * 10  # bits are checked exactly by the tests
            return off + gap(y[kept], x[kept].float() * 2)

        launch = map_ops.dropout_forward(on, x=array(x), y=array(y), scalars=array(scalars), p=0.5, op=3)
        yield Case(f"dropout {name}", launch, size(x, y), share, 1e-2)
    for rows, dtype in [(256, torch.float32), (65536, torch.float32), (65536, torch.bfloat16)]:
        x = normal(rows, 1000, dtype=dtype)
        labels = torch.randint(0, 1000, (rows,), device="cuda")
        y, dx, loss = poisoned(x), poisoned(x), torch.empty(2, device="cuda")
        expected = F.cross_entropy(x.float(), labels, reduction="sum") / 256
        forward = map_ops.cross_entropy_forward(
            on, x=array(x), labels=array(labels), y=array(y), loss=array(loss), scalars=array(scalars)
        )
        yield Case(f"cross-entropy {rows} forward, {dtype}", forward, size(x, y),
                   lambda loss=loss, w=expected: gap(loss[0], w), 1e-4)  # fmt: skip
        backward = map_ops.cross_entropy_backward(
            on, y=array(y), labels=array(labels), dx=array(dx), scalars=array(scalars)
        )
        gradient = (torch.softmax(x.float(), 1) - F.one_hot(labels, 1000)) / 256
        yield Case(f"cross-entropy {rows} backward, {dtype}", backward, size(y, dx),
                   lambda dx=dx, w=gradient: gap(dx, w), tolerance(dtype))  # fmt: skip


def updates(on: Context) -> Iterator[Case]:
    shapes = [(64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3),
              *[(256, 256, 3, 3)] * 2, (512, 256, 3, 3), *[(512, 512, 3, 3)] * 5,
              (4096, 25088), (4096, 4096), (1000, 4096),
              *[(c,) for c in (64, 64, 128, 128, 256, 256, 256, *[512] * 6, 4096, 4096, 1000)]]  # fmt: skip
    scalars = torch.zeros(16, device="cuda", dtype=torch.float64)
    scalars[0], scalars[2], scalars[6], scalars[7] = 1e-3, 1, 0.19, 0.002
    w, dw, m, v = ([torch.randn(s, device="cuda") for s in shapes] for _ in range(4))
    for t in v:
        t.abs_()
    copies = [torch.empty_like(t, dtype=torch.bfloat16) for t in w[:16]]
    lists = {"w": [array(t) for t in w], "dw": [array(t) for t in dw]}
    everything = size(*w)

    def sgd_step(copied: bool) -> Callable[[], float]:
        def check() -> float:
            reference = torch.nn.Parameter(w[15].clone())
            optimizer = torch.optim.SGD([reference], lr=1e-3, momentum=0.9, weight_decay=5e-4)
            optimizer.state[reference]["momentum_buffer"] = m[15].clone()
            reference.grad = dw[15]
            optimizer.step()
            torch.cuda.synchronize()
            sgd[copied]()
            torch.cuda.synchronize()
            worst = gap(w[15], reference.detach())
            return max(worst, 0.0 if torch.equal(copies[15], w[15].bfloat16()) else 1.0) if copied else worst

        return check

    options: dict[str, Any] = {"momentum_factor": 0.9, "weight_decay": 5e-4}
    moments = {"momentum": [array(t) for t in m]}
    sgd = {
        False: map_ops.sgd_update(on, **lists, **moments, scalars=array(scalars), **options),
        True: map_ops.sgd_update(
            on, **lists, **moments, scalars=array(scalars), copy=[array(t) for t in copies], **options
        ),
    }
    yield Case("SGD momentum, 138 M", sgd[False], 5 * everything, sgd_step(False), 1e-6)
    yield Case("SGD momentum + bf16 copies, 138 M", sgd[True], 5 * everything + size(*copies), sgd_step(True), 1e-6)

    def adam_step() -> float:
        reference = torch.nn.Parameter(w[15].clone())
        optimizer = torch.optim.Adam([reference], lr=1e-3)
        optimizer.state[reference] = {"step": torch.tensor(1.0), "exp_avg": m[15].clone(), "exp_avg_sq": v[15].clone()}
        reference.grad = dw[15]
        optimizer.step()
        scalars[6], scalars[7] = 1 - 0.9**2, 1 - 0.999**2
        torch.cuda.synchronize()
        adam()
        torch.cuda.synchronize()
        return gap(w[15], reference.detach())

    adam = map_ops.adam_update(
        on, **lists, m=moments["momentum"], v=[array(t) for t in v], scalars=array(scalars),
        beta1=0.9, beta2=0.999, eps=1e-8,
    )
    yield Case("Adam, 138 M", adam, 7 * everything, adam_step, 1e-6)

    def sum_step() -> float:
        wanted = w[15] + dw[15]
        torch.cuda.synchronize()
        add()
        torch.cuda.synchronize()
        return gap(w[15], wanted)

    add = map_ops.accumulate(on, source=lists["dw"], total=lists["w"])
    yield Case("accumulate, 138 M", add, 3 * everything, sum_step, 1e-6)
    clip = torch.empty(1, device="cuda")
    norm = torch.sqrt(sum((t.double() ** 2).sum() for t in dw))
    launch = map_ops.clip_factor(on, dw=lists["dw"], clip=array(clip), max_norm=1.0)
    yield Case("clip factor, 138 M", launch, everything,
               lambda: gap(clip, 1.0 / (norm.float().reshape(1) + 1e-6)), 1e-5)  # fmt: skip


FAMILIES = (
    max_pooling, max_pooling_without_index, average_pooling, normalization, bias_gradient, elementwise,
    dropout_and_losses, updates,
)  # fmt: skip
