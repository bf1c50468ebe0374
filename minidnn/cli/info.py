"""`minidnn info`: what this machine offers, read without loading CuPy, cuDNN or NumPy."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from minidnn import __version__
from minidnn.cli.options import Console
from minidnn.memory.pinned import host_limits, locked_limit
from minidnn.units import format_size

EXAMPLE = "minidnn info --json"

PACKAGES = (
    "numpy", "numba", "ml_dtypes", "safetensors", "tqdm", "matplotlib", "Pillow",
    "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend",
)  # fmt: skip


@dataclass(frozen=True)
class CudaDevice:
    """One GPU as the driver describes it."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA version it serves, as "13.0", and its devices; or why it does not answer."""

    cuda_version: str | None
    devices: tuple[CudaDevice, ...]
    problem: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`info` has no options of its own."""


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return devices, versions, limits and what CUDA lacks."""
    driver = read_driver()
    versions = {package: installed(package) for package in PACKAGES}
    result: dict[str, Any] = {
        "minidnn": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "host": host(),
        "cuda": {**asdict(driver), "missing": missing_for_cuda(driver, versions)},
    }
    console.say(report(result))
    return result


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def host() -> dict[str, Any]:
    """Cores that this process may use, the machine's memory, and what bounds host and pinned memory (bytes)."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "limits": [asdict(limit) for limit in (*host_limits(), *locked_limit())],
    }


def read_driver() -> Driver:
    """Ask libcuda itself: it is there where a driver is, whatever Python packages are installed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(None, (), "no NVIDIA driver (libcuda.so.1) on this machine")
    code = cuda.cuInit(0)
    if code != 0:
        return Driver(None, (), f"the NVIDIA driver does not start (cuInit returned {code})")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    devices = tuple(_device(cuda, index) for index in range(number.value))
    return Driver(version, devices, None if devices else "the NVIDIA driver finds no device")


def _device(cuda: ctypes.CDLL, index: int) -> CudaDevice:
    handle, total, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    # 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)
    return CudaDevice(index, name.value.decode(errors="replace"), total.value, f"{major.value}.{minor.value}")


def missing_for_cuda(driver: Driver, versions: dict[str, str | None]) -> list[str]:
    """One sentence per thing that CUDA training lacks here, each with the way to get it."""
    missing = []
    if driver.problem:
        missing.append(f"{driver.problem}: install NVIDIA's driver, 580 or newer for CUDA 13, 525 or newer for CUDA 12")
    cuda = "12" if driver.cuda_version and int(driver.cuda_version.split(".")[0]) < 13 else "13"
    needed = (f"cupy-cuda{cuda}x", f"nvidia-cudnn-cu{cuda}", "nvidia-cudnn-frontend")
    absent = ", ".join(package for package in needed if versions[package] is None)
    if absent:
        missing.append(f"not installed: {absent}: pip install 'minidnn[cuda{cuda}]'")
    return missing


def report(result: dict[str, Any]) -> str:
    """The same for a reader."""
    machine, cuda = result["host"], result["cuda"]
    lines = [
        f"minidnn {result['minidnn']}, Python {result['python']}",
        "packages  " + ", ".join(f"{name} {version}" for name, version in result["packages"].items() if version),
        f"host      {machine['cores']} cores, {format_size(machine['memory_bytes'])} memory",
    ]
    lines += [
        f"limit     {limit['name']}: {format_size(limit['value'])}, {format_size(limit['left'])} left"
        for limit in machine["limits"]
    ]
    lines += [
        f"cuda:{device['index']}    {device['name']}, {format_size(device['memory_bytes'])}, "
        f"compute capability {device['compute_capability']}"
        for device in cuda["devices"]
    ]
    if cuda["cuda_version"]:
        lines.append(f"driver    serves CUDA {cuda['cuda_version']}")
    lines += [f"no CUDA   {sentence}" for sentence in cuda["missing"]]
    return "\n".join(lines)
