"""How fast a run's devices were allowed to be, from samples as devices.jsonl holds them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Sums:
    samples: int = 0
    sm_mhz: int = 0
    power_w: float = 0.0
    throttled: Counter[str] = field(default_factory=Counter)


class Clocks:
    """Takes samples in order and counts those of the steady phase; a new process of the run starts anew."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of devices.jsonl; those without a clock and a power, such as the host's, say nothing."""
        if line.get("event") == "start":
            self._sums = {}
        device, mhz, power = line.get("device"), line.get("sm_mhz"), line.get("power_w")
        if line.get("phase") != "steady" or not isinstance(device, str) or mhz is None or power is None:
            return
        sums = self._sums.setdefault(device, _Sums())
        sums.samples += 1
        sums.sm_mhz += mhz
        sums.power_w += power
        sums.throttled.update(line.get("throttled") or [])

    def sentences(self) -> list[str]:
        """One per device: means of SM clock and power, and what held the clock back in which share of the samples."""
        return [f"{device}: {_sentence(sums)}" for device, sums in sorted(self._sums.items())]


def _sentence(sums: _Sums) -> str:
    means = f"{sums.sm_mhz / sums.samples:,.0f} MHz, {sums.power_w / sums.samples:,.0f} W"
    held = [f"{reason} in {count / sums.samples:.0%}" for reason, count in sums.throttled.most_common()]
    return f"{means}, held back by {', '.join(held)} of {sums.samples} samples" if held else means
