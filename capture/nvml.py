"""What NVML tells of CUDA devices, each figure None where the driver, a permission or a MIG slice refuses it.

It never waits for a device, makes no CUDA call after `uuids`, and raises nothing but `Unavailable`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Why a clock is held back, where somebody should know; being idle, or set so, is not.
THROTTLE = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
}


class Unavailable(Exception):
    """NVML cannot be used here; the message says why."""


@dataclass(frozen=True)
class Reading:
    used_bytes: int | None
    total_bytes: int | None
    utilisation: int | None  # percent of the last sample period with any kernel
    power_w: float | None
    sm_mhz: int | None
    temperature_c: int | None
    throttled: list[str] | None


def uuids(indices: Sequence[int]) -> list[str]:
    """Of CUDA devices: CUDA and NVML number them differently."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in indices]


def open_handles(found: Sequence[str], nvml: Any = None) -> list[Any]:
    """NVML's handles of devices, or of the MIG slices that CUDA names so.

    Args:
        nvml: the module pynvml, or what stands for it.
    Raises:
        Unavailable: no library, no driver, or a device that NVML does not know.
    """
    nvml = nvml or _pynvml()
    try:
        nvml.nvmlInit()
        return [_handle(nvml, uuid) for uuid in found]
    except nvml.NVMLError as error:
        raise Unavailable(str(error)) from error


def used_bytes(handle: Any, nvml: Any = None) -> int | None:
    """Memory in use on a device, by all processes. Some virtual machines do not tell it."""
    memory = _memory(handle, nvml or _pynvml())
    return None if memory is None else memory.used


def read(handle: Any, nvml: Any = None) -> Reading:
    """All figures of a device."""
    nvml = nvml or _pynvml()
    memory = _memory(handle, nvml)
    power = _asked(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    reasons = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return Reading(
        used_bytes=None if memory is None else memory.used,
        total_bytes=None if memory is None else memory.total,
        utilisation=_asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        power_w=None if power is None else power / 1e3,
        sm_mhz=_asked(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        temperature_c=_asked(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        throttled=None if reasons is None else _named(nvml, reasons),
    )


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _memory(handle: Any, nvml: Any) -> Any:
    return _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))


def _asked(nvml: Any, question: Any) -> Any:
    try:
        return question()
    except nvml.NVMLError:
        return None


def _named(nvml: Any, bits: int) -> list[str]:
    return [text for name, text in THROTTLE.items() if bits & getattr(nvml, f"nvmlClocksThrottleReason{name}")]
