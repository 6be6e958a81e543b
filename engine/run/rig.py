"""The lanes of a host and what connects them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.run.buffers import BatchBuffer
from draftgraph.engine.run.lanes import DrafterLane, TargetLane
from draftgraph.engine.run.reduce import Reduction
from draftgraph.engine.run.streams import Device, Event


class Source(Protocol):
    """Micro-batches in order, in host slots that are rewritten only after `release`."""

    def next(self) -> tuple[int, Any]: ...

    def release(self) -> None: ...


class HandOffSlot:
    """One buffer of a drafter's ring: filled by a target's copy stream, emptied by the drafter's stream."""

    def __init__(self, batch: BatchBuffer, device: Device):
        self.batch = batch
        self.ready, self.free = Event(device), Event(device)


@dataclass(frozen=True)
class Rig:
    """`rings` is empty where one target and one drafter share a buffer. Simulated lanes have the same shape."""

    targets: Sequence[TargetLane]
    drafters: Sequence[DrafterLane]
    rings: Sequence[Sequence[HandOffSlot]]
    reduction: Reduction
    host_slots: Sequence[Tensor]  # uint8, pinned where a device is a GPU
    buckets: Sequence[Bucket]
    seconds: Callable[[], float] = time.perf_counter  # the host's time

    @property
    def lanes(self) -> list[Lane]:
        return [target.lane for target in self.targets] + [drafter.lane for drafter in self.drafters]

    @property
    def max_in_flight(self) -> int:
        """Extractions that may be issued and unfinished: enough that no lane waits for the host."""
        return 2 * max(len(self.targets), len(self.drafters)) + sum(len(ring) for ring in self.rings)
