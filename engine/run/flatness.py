"""Whether the memory of a run's devices stayed flat, judged from samples as devices.jsonl holds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB = 2**20
HOST = "host"  # the process's own memory, which nobody promised to keep


@dataclass
class _Steady:
    since: float
    first: int
    low: int
    high: int
    latest: float
    moved: float | None = None  # when a sample first differed


class Flatness:
    """Takes samples in order; a new process of the run starts anew. Fixed memory."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # device -> first of the warm-up
        self._steady: dict[str, _Steady] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of devices.jsonl."""
        if line.get("event") == "start":
            self._before, self._steady = {}, {}
        device, used, now = line.get("device"), line.get("used_bytes"), line.get("time")
        if (
            not isinstance(device, str)
            or device == HOST
            or not isinstance(used, int)
            or not isinstance(now, int | float)
        ):
            return
        if line.get("phase") == "warm-up":
            self._before.setdefault(device, used)
        elif line.get("phase") == "steady":
            seen = self._steady.setdefault(device, _Steady(now, used, used, used, now))
            if used != seen.first and seen.moved is None:
                seen.moved = now
            seen.low, seen.high, seen.latest = min(seen.low, used), max(seen.high, used), now

    def sentences(self) -> list[str]:
        """One per device: flat, or by how much it moved and when; and what the warm-up took."""
        return [f"{device}: {self._sentence(device, seen)}" for device, seen in sorted(self._steady.items())]

    def _sentence(self, device: str, seen: _Steady) -> str:
        lasted = duration(seen.latest - seen.since)
        grown = ""
        if device in self._before:
            grown = f" (warm-up: {(seen.first - self._before[device]) / 2**30:+,.1f} GiB)"
        if seen.moved is None:
            return f"flat: 0 MiB over {lasted}{grown}"
        return (
            f"moved by {(seen.high - seen.low) / MIB:,.1f} MiB in the steady phase of {lasted}, first after "
            f"{duration(seen.moved - seen.since)}; other processes count too{grown}"
        )


def duration(seconds: float) -> str:
    """Such as "12 minutes"."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
