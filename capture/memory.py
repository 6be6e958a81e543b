"""Watches whether device memory stays flat after warm-up, in the three ways that can betray it.

The allocator's counters see every allocation, the reserved memory sees the allocator's segments, and NVML sees what
neither does: graph executables, libraries, other processes. It reads counters only and never waits for the device.
"""

from collections.abc import Iterable
from typing import Any

import torch

from draftgraph.capture import nvml


class MemoryWatch:
    """Marks the memory figures of some devices step by step.

    Args:
        devices: those of the run; CPU devices have no figures.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({device.index for device in devices if device.type == "cuda"})
        self._nvml = _nvml_handles(self._devices)
        self._num_marks = 0
        self._allocated: list[tuple[int, int]] = []
        self._first_allocated: list[tuple[int, int]] = []
        self._reserved: list[_Range] = [_Range() for _ in self._devices]
        self._used: list[_Range] = [_Range() for _ in self._nvml or ()]

    def mark(self) -> None:
        """Read all figures; the first mark, after warm-up, is the baseline, each later one ends a step."""
        self._allocated = [_allocated(device) for device in self._devices]
        if self._num_marks == 0:
            self._first_allocated = self._allocated
        self._num_marks += 1
        for device, reserved in zip(self._devices, self._reserved, strict=True):
            reserved.add(torch.cuda.memory_reserved(device))
        for handle, used in zip(self._nvml or (), self._used, strict=True):
            if (now := nvml.used_bytes(handle)) is not None:
                used.add(now)

    def growth(self) -> dict[str, int]:
        """The last mark minus the first, of all devices together; 0 where it cannot be measured."""
        pairs = list(zip(self._first_allocated, self._allocated, strict=True))
        return {
            "alloc_count": sum(now[0] - first[0] for first, now in pairs),
            "alloc_bytes": sum(now[1] - first[1] for first, now in pairs),
            "reserved_bytes": sum(reserved.change for reserved in self._reserved),
            "device_used_bytes": sum(used.change for used in self._used),
        }

    def report(self, num_steps: int | None = None) -> dict[str, float | int | None]:
        """The figures since the first mark, of all devices together; None where they cannot be measured.

        Args:
            num_steps: steps between the first and the last mark, where not every step was marked.
        Returns:
            alloc_count: allocations since the first mark, and alloc_bytes_per_step their bytes per step.
            reserved_range_bytes, device_used_range_bytes: highest minus lowest mark, of the device where it is largest.
        """
        steps = self._num_marks - 1 if num_steps is None else num_steps
        measured = bool(self._devices) and self._num_marks > 1 and steps > 0
        grown = self.growth()
        return {
            "alloc_count": grown["alloc_count"] if measured else None,
            "alloc_bytes_per_step": grown["alloc_bytes"] / steps if measured else None,
            "reserved_range_bytes": max(reserved.width for reserved in self._reserved) if measured else None,
            "device_used_range_bytes": max(used.width for used in self._used) if measured and self._used else None,
        }


class _Range:
    def __init__(self) -> None:
        self._values: tuple[int, int] | None = None
        self._first = self._last = 0

    def add(self, value: int) -> None:
        if self._values is None:
            self._first = value
        self._last = value
        low, high = self._values or (value, value)
        self._values = min(low, value), max(high, value)

    @property
    def change(self) -> int:
        return self._last - self._first

    @property
    def width(self) -> int:
        low, high = self._values or (0, 0)
        return high - low


def _allocated(device: int) -> tuple[int, int]:
    """Allocations and bytes since the process began; both only grow."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return stats["allocation"]["all"]["allocated"], stats["allocated_bytes"]["all"]["allocated"]


def _nvml_handles(devices: list[int]) -> list[Any] | None:
    """NVML's handles of CUDA devices; None where there are none, or where one does not tell its memory in use."""
    if not devices:
        return None
    try:
        handles = nvml.open_handles(nvml.uuids(devices))
    except nvml.Unavailable:
        return None
    return None if any(nvml.used_bytes(handle) is None for handle in handles) else handles
