"""How fast one core packs and unpacks, for predictions: bench/zvc.py measured it (bench/results/zvc_2core.json, medians
of 32-bit values with scattered zeros, AVX-512 loops on a Zen 5 server core; other processors differ)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class CodecRates:
    """Bytes of unpacked data per second and core, at each of some densities (share of values that are not zero)."""

    densities: tuple[float, ...]
    pack: tuple[float, ...]
    unpack: tuple[float, ...]

    def pack_ms(self, nbytes: int, density: float) -> float:
        """Time of one core to pack so many bytes."""
        return nbytes / self._at(self.pack, density) * 1e3

    def unpack_ms(self, nbytes: int, density: float) -> float:
        """Time of one core to unpack so many bytes."""
        return nbytes / self._at(self.unpack, density) * 1e3

    def _at(self, rates: tuple[float, ...], density: float) -> float:
        """The rate between its neighbours."""
        i = min(max(bisect_right(self.densities, density), 1), len(rates) - 1)
        low, high = self.densities[i - 1], self.densities[i]
        share = min(max((density - low) / (high - low), 0.0), 1.0)
        return rates[i - 1] + (rates[i] - rates[i - 1]) * share


MEASURED = CodecRates(
    (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
    (28.3e9, 21.7e9, 19.4e9, 16.9e9, 13.9e9, 8.4e9, 8.7e9),
    (31.1e9, 28.3e9, 25.9e9, 22.2e9, 18.9e9, 16.3e9, 16.6e9),
)
