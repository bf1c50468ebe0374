"""Out-of-core training in PyTorch on one device: the ways that bench/peers.py measures beside minidnn.

`save_on_cpu` is PyTorch's own, as is `checkpoint_sequential`, and the compiler's `activation_memory_budget`.
`OffloadActivations` is TRL's (huggingface/trl, trl/models/activation_offloading.py) where that package is installed;
else what is here, written anew for the same technique: hooks on saved tensors, a second stream for the copies, the last
few activations of forward kept until their copies are done, and memory that came back handed on behind events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint_sequential

OWN = "own, after TRL's activation_offloading.py"
SMALLEST = 1024
"""Bytes of the smallest tensor that is offloaded, as in TRL."""

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """`forward` is called inside `around()`, `after` behind each backward pass; `about` goes into the row."""

    forward: Forward
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    after: Callable[[], object] = lambda: None
    about: str = ""


def way_of(name: str, net: torch.nn.Sequential) -> Way:
    """`save_on_cpu [SHARE%]`, `OffloadActivations KEEP`, `checkpoint SEGMENTS` over a network without nesting."""
    kind, _, setting = name.partition(" ")
    if kind == "save_on_cpu":
        return saving_on_cpu(net, int(setting.removesuffix("%") or 100))
    if kind == "OffloadActivations":
        return offloading(net, int(setting))
    if kind == "checkpoint":
        return checkpointing(net, int(setting))
    raise ValueError(f"there is no way {name!r}")


def flat(net: torch.nn.Module) -> torch.nn.Sequential:
    """torchvision's VGG and AlexNet as one chain of layers."""
    children = dict(net.named_children())
    layers = [*children["features"].children(), children["avgpool"], torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, *children["classifier"].children())


def saving_on_cpu(net: torch.nn.Sequential, share: int) -> Way:
    """What the first `share` percent of the layers save goes to the host, pinned, and comes back on demand."""
    limit = -(-len(net) * share // 100)
    pin = next(net.parameters()).is_cuda

    def forward(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu(pin_memory=pin):
            for layer in net[:limit]:
                x = layer(x)
        for layer in net[limit:]:
            x = layer(x)
        return x

    return Way(forward)


def checkpointing(net: torch.nn.Sequential, segments: int) -> Way:
    """Forward is computed again, segment by segment. No segment begins with an op in place: its input is what stays."""
    parts: list[list[torch.nn.Module]] = []
    for layer in net:
        if getattr(layer, "inplace", False) and parts:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    chain = torch.nn.Sequential(*(torch.nn.Sequential(*part) for part in parts))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint_sequential(chain, min(segments, len(chain)), x, use_reentrant=False)
        return y

    return Way(forward)


def offloading(net: torch.nn.Sequential, keep: int) -> Way:
    """TRL's context with streams, or ours."""
    try:
        trl = import_module("trl.models.activation_offloading")
    except ImportError:
        own = OffloadActivations(net.parameters(), keep)
        return Way(net, lambda: own, own.finish, OWN)
    real = trl.OffloadActivations(use_pin_memory=True, use_streams=True, max_fwd_stash_size=keep)
    real.update_model_params(net)
    return Way(net, lambda: real, about=f"trl {metadata.version('trl')}")


class _Saved:
    """A tensor that several ops may have saved. `here` is on the device where it is there."""

    def __init__(self, here: torch.Tensor, host: torch.Tensor, copied: Any) -> None:
        self.here: torch.Tensor | None = here
        self.host = host
        self.copied = copied
        self.fetched = False
        self.users = 1


class OffloadActivations(saved_tensors_hooks):  # type: ignore[misc,unused-ignore]
    """Saved tensors leave for pinned host memory while forward goes on, and come back while backward does.

    `keep` activations of forward stay until others follow: the computation runs ahead of the copies by so many. Weights
    and small tensors stay. What several ops save is copied once. A backward function that returns a view of what it
    saved is not supported (none of these networks has one). On the CPU the copies are synchronous.
    """

    def __init__(self, weights: Iterable[torch.Tensor], keep: int = 5) -> None:
        weights = list(weights)
        self.keep = keep
        self._weights = {w.untyped_storage().data_ptr() for w in weights}
        self._cuda = weights[0].is_cuda
        self._compute: Any = torch.cuda.current_stream() if self._cuda else None
        self._copy: Any = torch.cuda.Stream() if self._cuda else None
        self._kept: dict[Any, _Saved] = {}
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()
        self.offloaded_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> _Saved | torch.Tensor:
        start = x.untyped_storage().data_ptr()
        if x.nbytes < SMALLEST or start in self._weights or 0 in x.stride():
            return x
        key = (start, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)
        if key in self._kept:  # its memory is not free yet, so this is the same tensor
            self._kept[key].users += 1
            return self._kept[key]
        while len(self._kept) >= self.keep:
            self._let_go(next(iter(self._kept)))
        saved = self._kept[key] = self._copied_out(x)
        self.offloaded_bytes += x.nbytes
        return saved

    def _copied_out(self, x: torch.Tensor) -> _Saved:
        here = x.detach()
        host = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, pin_memory=self._cuda)
        if not self._cuda:
            return _Saved(here, host.copy_(here), None)
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            host.copy_(here, non_blocking=True)
            return _Saved(here, host, self._copy.record_event())

    def _let_go(self, key: Any) -> None:
        """The activation's memory may be used again by the computation, behind its copy-out."""
        saved = self._kept.pop(key)
        if self._cuda:
            self._compute.wait_event(saved.copied)
        saved.here = None

    def _unpack(self, saved: _Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.here is None:
            saved.here = self._copied_in(saved.host)
            saved.fetched = True
        here = saved.here
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined,unused-ignore]

        def used(*gradients: object) -> None:
            saved.users -= 1
            if saved.users == 0:
                self._done(saved)

        node.register_hook(used)
        return here

    def _copied_in(self, host: torch.Tensor) -> torch.Tensor:
        if not self._cuda:
            return host.clone()
        with torch.cuda.stream(self._copy):
            here = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device="cuda")
            here.copy_(host, non_blocking=True)
        self._compute.wait_stream(self._copy)
        return here

    def _done(self, saved: _Saved) -> None:
        """Nobody needs the tensor any more. What came back lies in the copy stream's memory, where later copies may
        follow it behind the computation; one such tensor stays, so that the next copy need not wait for this op."""
        here, saved.here = saved.here, None
        assert here is not None
        if self._cuda and saved.fetched:
            self._leaving.append((self._compute.record_event(), here))
            while len(self._leaving) > 1:
                self._copy.wait_event(self._leaving.popleft()[0])

    def finish(self) -> None:
        """Backward is over: nothing is kept from one iteration to the next."""
        while self._kept:
            self._let_go(next(iter(self._kept)))
        while self._leaving:
            self._copy.wait_event(self._leaving.popleft()[0])
