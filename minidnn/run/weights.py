"""A network's weights while it trains: where they lie in the arena, and their way there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from minidnn.arguments import shown
from minidnn.device.base import Device, Operand, Region, load, numpy_dtype, store
from minidnn.errors import ArgumentError, CheckpointError, NonFiniteLoss
from minidnn.graph.tensor import Role, Tensor
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential, finite_array
from minidnn.schedule.actions import Schedule


class DeviceWeights:
    """Weights, running statistics and optimizer state in the persistent region that `schedule` (training) describes."""

    def __init__(self, device: Device, arena: Region, schedule: Schedule, net: Sequential, loss: Loss) -> None:
        self.device, self.arena, self.schedule = device, arena, schedule
        self.net, self.loss = net, loss

    def _operands(self, *roles: Role) -> Iterator[tuple[Tensor, Operand]]:
        tensors = self.schedule.graph.tensors
        for buffer in self.schedule.persistent:
            t = tensors[buffer.tensor]
            if t.role in roles:
                yield t, Operand(t, buffer.offset)

    def reset(self) -> None:
        """Optimizer state starts at zero; gradients and scalars are written before they are read."""
        for t, operand in self._operands(Role.OPTIMIZER_STATE):
            store(self.device, self.arena, operand, np.zeros(t.shape, dtype=numpy_dtype(t.dtype)))

    def push(self, seed: int) -> None:
        """Upload the network's weights and statistics, and the loss's class weights."""
        parameters = dict(self.net.named_parameters())
        for t, operand in self._operands(Role.WEIGHT, Role.STATISTIC):
            name = t.name.removesuffix("@bf16")
            if name in parameters:
                value = parameters[name].materialize(name, seed)
            else:
                value = np.asarray(getattr(self.loss, "weight"))  # noqa: B009 - only losses with classes have one
            store(self.device, self.arena, operand, value)

    def pull(self, steps: int) -> None:
        """Download the newest weights and statistics into the network.

        Raises NonFiniteLoss when one is NaN or infinite after so many steps; the network then keeps what it had.
        """
        parameters = dict(self.net.named_parameters())
        newest = {
            t.name: load(self.device, self.arena, operand)
            for t, operand in self._operands(Role.WEIGHT, Role.STATISTIC)
            if t.name in parameters
        }
        for name, value in newest.items():
            if not np.isfinite(value).all():
                raise NonFiniteLoss(
                    f"{name} has NaN or infinite values after {steps} steps; lower the learning rate or clip gradients"
                )
        for name, value in newest.items():
            parameters[name].assign(value)

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Copies of the optimizer's buffers: `features.0.weight@momentum` -> array in PyTorch's layout."""
        return {t.name: load(self.device, self.arena, o) for t, o in self._operands(Role.OPTIMIZER_STATE)}

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take the buffers that `optimizer_state` gave. Raises CheckpointError when they are of another optimizer or
        network, or no finite numbers, before any is taken."""
        own = {t.name: (t, operand) for t, operand in self._operands(Role.OPTIMIZER_STATE)}
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state is {shown(state)}; it must be a dict of arrays by name")
        if own.keys() != state.keys():
            wrong = sorted(own.keys() ^ state.keys(), key=str)[0]
            where = "in this run alone" if wrong in own else "in what was saved alone"
            raise CheckpointError(
                f"optimizer state does not fit: {shown(wrong)} is {where}; "
                "use the network and the optimizer it was saved with"
            )
        arrays = {name: finite_array("optimizer state", name, state[name], t.dtype) for name, (t, _) in own.items()}
        for name, (t, _) in own.items():
            if arrays[name].shape != t.shape:
                raise CheckpointError(
                    f"optimizer state {name} has shape {list(arrays[name].shape)}; expected {list(t.shape)}"
                )
        for name, (_, operand) in own.items():
            store(self.device, self.arena, operand, arrays[name])
