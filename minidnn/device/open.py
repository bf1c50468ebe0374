"""Names of devices -> devices: `host`, `cuda`, `cuda:1`, `auto`."""

from __future__ import annotations

import re

from minidnn.arguments import flag, shown
from minidnn.device.base import Device
from minidnn.errors import ArgumentError, DeviceError


def open_device(name: str = "auto", *, precision: str = "fp32", deterministic: bool = False) -> Device:
    """Open a device. `auto` is the first CUDA device that works and knows the precision, else the host.

    Raises ArgumentError for an unknown name, DeviceError (saying what is missing) for CUDA that cannot be opened.
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f"device is {shown(name)}; "
            "it must be 'auto', 'host', 'cuda' or 'cuda:0', or an open Device"
        )
    flag(deterministic, "deterministic")
    cuda = re.fullmatch(r"cuda(?::(\d+))?", name)
    if cuda:
        from minidnn.device.cuda import CudaDevice

        return CudaDevice(int(cuda[1] or 0), precision=precision, deterministic=deterministic)
    if name in ("host", "auto"):
        if name == "auto":
            try:
                return open_device("cuda", precision=precision, deterministic=deterministic)
            except (ArgumentError, DeviceError, ImportError):
                pass  # no usable GPU, or one without fp64: the emulator serves
        from minidnn.device.host import HostDevice

        return HostDevice()
    raise ArgumentError(f"device is {shown(name)}; it must be 'auto', 'host', 'cuda' or 'cuda:0'")
