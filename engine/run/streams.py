"""Streams, events and ranges with the device said aloud; on the CPU, where calls run in order, they order nothing.

Promises: events are made once and recorded again, so a step allocates none; the host waits without spinning.
"""

import contextlib
from contextlib import AbstractContextManager

import torch

from draftgraph.capture.lane import Lane
from draftgraph.profiles.ranges import Range, nvtx_range


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """Issue work on `stream` of its own device."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def phase(lane: Lane, name: str, bucket: str = "") -> Range:
    """What the host issues inside goes to the lane's device, for this phase of a step."""
    return nvtx_range(lane.name, name, bucket, str(lane.device))


class Event:
    """A point in one stream's work that another stream, or the host, waits for."""

    def __init__(self, device: torch.device):
        # NOTE: blocking=True makes the host sleep in synchronize instead of spinning.
        self.event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def record(self, stream: torch.cuda.Stream | None) -> None:
        if self.event is not None:
            self.event.record(stream)

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Work issued to `stream` from here on waits for this event."""
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)

    def wait(self) -> None:
        """The host waits."""
        if self.event is not None:
            self.event.synchronize()

    def happened(self) -> bool:
        return self.event is None or self.event.query()
