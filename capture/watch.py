"""Watches that a run stays as its warm-up proved it: no allocation, no growth, no wait, no capture, no compilation.

Promises to cost nothing that a step would feel: counters are read where the caller marks a step, stacks are recorded
only when something is allocated or waited for. Each kind of trouble is told once, with the steps, the bytes and the
place. It judges nothing: the caller decides whether a finding ends the run.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from draftgraph.capture.compilations import count_compilations
from draftgraph.capture.graph import CapturedGraph
from draftgraph.capture.memory import MemoryWatch
from draftgraph.capture.stacks import innermost
from draftgraph.capture.syncs import count_syncs

MIB = 2**20


class SteadyWatch:
    """The steady state of some devices.

    Args:
        devices: those of the run. On the CPU only compilations and captures are counted.
    Owns: torch's record of allocations, between `open` and `close`.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({device.index for device in devices if device.type == "cuda"})
        self.memory = MemoryWatch(torch.device("cuda", index) for index in self._devices)
        self.host_syncs: int | None = 0 if self._devices else None
        self.late_compilations = 0
        self.late_captures = 0
        self.findings: list[str] = []
        self.broken = False  # by this process: what NVML sees may be another's
        self._told: set[str] = set()
        self._last_step = 0

    def open(self, step: int) -> None:
        """The baseline, after warm-up and before the first step."""
        if self._devices:
            # NOTE: a record per allocation, and in steady state there is none.
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=10_000)
        self._captures = CapturedGraph.num_captures
        self._last_step = step
        self.memory.mark()

    def close(self) -> None:
        """Stop recording allocations."""
        if self._devices:
            torch.cuda.memory._record_memory_history(None)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Waits of the calling thread, and compilations, inside the block are findings at the next mark."""
        with count_syncs() as syncs, count_compilations() as compilations:
            self._syncs, self._compilations = syncs, compilations
            try:
                yield
            finally:
                if self.host_syncs is not None:
                    self.host_syncs += syncs.value or 0
                self.late_compilations += len(compilations.names)

    def mark(self, step: int) -> list[str]:
        """Read the counters after `step`; returns what is found for the first time. Call it inside `steady`."""
        self.memory.mark()
        self.late_captures = CapturedGraph.num_captures - self._captures
        fresh = self._found()
        self._told |= set(fresh)
        self.broken |= bool(set(fresh) - {"used"})
        lines = [f"steady state broken between step {self._last_step} and {step}: {text}" for text in fresh.values()]
        self._last_step = step
        self.findings += lines
        return lines

    def _found(self) -> dict[str, str]:
        """Each kind of trouble, not told before, since the baseline or since this steady stretch began."""
        grown, names = self.memory.growth(), self._compilations.names
        found = {}
        if (count := grown["alloc_count"]) and "allocation" not in self._told:
            size = grown["alloc_bytes"] / MIB
            found["allocation"] = f"{count} allocations, {size:.2f} MiB, the first at {self._allocation()}"
        if change := grown["reserved_bytes"]:
            found["reserved"] = f"torch's reserved memory changed by {change / MIB:+.1f} MiB"
        if change := grown["device_used_bytes"]:
            found["used"] = f"NVML's used memory changed by {change / MIB:+.1f} MiB (other processes count too)"
        if count := self._syncs.value or 0:
            found["wait"] = f"{count} waits for the device, the first at {self._syncs.first}"
        if names:
            found["compilation"] = f"Triton compiled or loaded {len(names)} kernels: {', '.join(names[:3])}"
        if self.late_captures:
            found["capture"] = f"{self.late_captures} graphs were captured"
        return {kind: text for kind, text in found.items() if kind not in self._told}

    def _allocation(self) -> str:
        """Where the first allocation since the baseline was made."""
        for device in self._devices:
            for entry in torch.cuda.memory._snapshot(device)["device_traces"][device]:
                if entry["action"] == "alloc" and entry.get("frames"):
                    # Innermost first, as torch records them.
                    frames = [
                        traceback.FrameSummary(f["filename"], f["line"], f["name"]) for f in reversed(entry["frames"])
                    ]
                    return innermost(frames, limit=3)
        return "an unrecorded place"
