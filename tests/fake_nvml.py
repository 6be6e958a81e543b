"""Stands for the module pynvml: as many devices as are named, and every way in which a driver refuses."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    pass


class Nvml:
    """Args:
    used: UUID as NVML writes it ("GPU-...", "MIG-...") -> the memory in use at each question.
    refuses: names of functions that are not permitted, or not supported by a MIG slice.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwSlowdown = 4, 8
    nvmlClocksThrottleReasonSyncBoost, nvmlClocksThrottleReasonSwThermalSlowdown = 16, 32
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 64, 128

    def __init__(self, used: dict[str, Callable[[], int]], refuses: tuple[str, ...] = ()) -> None:
        self.used, self.refuses = used, refuses

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refuses"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *_: Any) -> None:
        raise NVMLError("Insufficient Permissions")

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=self.used[handle](), total=140 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 612_000

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4 + 64 + 1  # the last: idle, which nobody needs to know
