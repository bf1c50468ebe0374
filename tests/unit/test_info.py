"""`minidnn info` reads the NVIDIA driver, and says what CUDA lacks and how to get it."""

from __future__ import annotations

import argparse
import ctypes
from typing import Any

import pytest

from minidnn.cli import info
from minidnn.cli.options import Console


class FakeDriver:
    """libcuda of a machine with the given cards (name, bytes, major, minor)."""

    def __init__(self, version: int, cards: list[tuple[bytes, int, int, int]], start: int = 0) -> None:
        self.version, self.cards, self.start = version, cards, start

    def cuInit(self, flags: int) -> int:
        return self.start

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = self.version

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.cards)

    def cuDeviceGet(self, handle: Any, index: int) -> None:
        handle._obj.value = index

    def cuDeviceGetName(self, name: Any, length: int, handle: Any) -> None:
        name.value = self.cards[handle.value][0]

    def cuDeviceTotalMem_v2(self, total: Any, handle: Any) -> None:
        total._obj.value = self.cards[handle.value][1]

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> None:
        value._obj.value = self.cards[handle.value][{75: 2, 76: 3}[attribute]]


CARDS = [(b"NVIDIA H100 80GB HBM3", 85_520_809_984, 9, 0), (b"GeForce GTX 1080 Ti", 11_720_851_456, 6, 1)]


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> None:
    def load(name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_devices_come_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, FakeDriver(13020, CARDS))
    found = info.read_driver()
    assert (found.cuda_version, found.problem) == ("13.2", None)
    assert found.devices == (
        info.CudaDevice(0, "NVIDIA H100 80GB HBM3", 85_520_809_984, "9.0"),
        info.CudaDevice(1, "GeForce GTX 1080 Ti", 11_720_851_456, "6.1"),
    )


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (None, "no NVIDIA driver (libcuda.so.1)"),
        (FakeDriver(13000, CARDS, start=100), "does not start (cuInit returned 100)"),
        (FakeDriver(13000, []), "finds no device"),
    ],
)
def test_a_driver_that_is_absent_or_useless_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None, says: str
) -> None:
    with_driver(monkeypatch, driver)
    found = info.read_driver()
    assert found.devices == ()
    assert says in str(found.problem)
    assert says in info.missing_for_cuda(found, dict.fromkeys(info.PACKAGES, "1"))[0]


@pytest.mark.parametrize(("version", "extra"), [(13000, "cuda13"), (12080, "cuda12")])
def test_what_is_missing_suits_the_driver(monkeypatch: pytest.MonkeyPatch, version: int, extra: str) -> None:
    with_driver(monkeypatch, FakeDriver(version, CARDS))
    driver, nothing = info.read_driver(), dict.fromkeys(info.PACKAGES)
    number = extra.removeprefix("cuda")
    assert info.missing_for_cuda(driver, nothing) == [
        f"not installed: cupy-cuda{number}x, nvidia-cudnn-cu{number}, nvidia-cudnn-frontend: "
        f"pip install 'minidnn[{extra}]'"
    ]
    assert info.missing_for_cuda(driver, dict.fromkeys(info.PACKAGES, "1")) == []


def test_the_report_lists_cards_and_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_driver(monkeypatch, FakeDriver(13000, CARDS))
    monkeypatch.setattr(info, "installed", lambda package: "1.0")
    found = info.run(argparse.Namespace(), Console(json=False, quiet=False))
    assert found["cuda"]["devices"][1]["name"] == "GeForce GTX 1080 Ti"
    text = capsys.readouterr().out
    assert "cuda:0    NVIDIA H100 80GB HBM3, 79.65 GiB, compute capability 9.0\n" in text
    assert "driver    serves CUDA 13.0\n" in text
    assert "no CUDA" not in text
