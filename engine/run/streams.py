"""Streams, events and ranges with the device said aloud; on the CPU, where calls run in order, they order nothing.

Promises: events are made once and recorded again, so a step allocates none; the host waits without spinning.
A device is a torch.device or a simulated one, which only keeps time.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from draftgraph.capture.lane import Lane
from draftgraph.engine.run.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream
from draftgraph.profiles.ranges import Range, nvtx_range

Device = torch.device | SimulatedDevice
Stream = torch.cuda.Stream | SimulatedStream | None


def new_stream(device: Device, name: str) -> Stream:
    if isinstance(device, SimulatedDevice):
        return SimulatedStream(device, name)
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on(stream: Stream) -> AbstractContextManager[Any]:
    """Issue work on `stream` of its own device."""
    if stream is None:
        return contextlib.nullcontext()
    return stream if isinstance(stream, SimulatedStream) else torch.cuda.stream(stream)


def phase(lane: Lane, name: str, bucket: str = "") -> Range:
    """What the host issues inside goes to the lane's device, for this phase of a step."""
    return nvtx_range(lane.name, name, bucket, str(lane.device))


class Event:
    """A point in one stream's work that another stream, or the host, waits for.

    Args:
        timed: `elapsed_ms` between two of them is known, once both happened; the host does not wait for such.
    """

    def __init__(self, device: Device, timed: bool = False):
        self.event: torch.cuda.Event | SimulatedEvent | None = None
        if isinstance(device, SimulatedDevice):
            self.event = SimulatedEvent(device.clock)
        elif device.type == "cuda":
            # NOTE: blocking=True makes the host sleep in synchronize instead of spinning.
            self.event = torch.cuda.Event(blocking=not timed, enable_timing=timed)

    def record(self, stream: Stream) -> None:
        if self.event is not None:
            self.event.record(stream)  # type: ignore[arg-type]

    def hold(self, stream: Stream) -> None:
        """Work issued to `stream` from here on waits for this event."""
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)  # type: ignore[arg-type]

    def wait(self) -> None:
        """The host waits."""
        if self.event is not None:
            self.event.synchronize()

    def happened(self) -> bool:
        return self.event is None or self.event.query()

    def elapsed_ms(self, end: "Event") -> float:
        assert self.event is not None and end.event is not None
        return self.event.elapsed_time(end.event)  # type: ignore[arg-type]
