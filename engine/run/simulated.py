"""Devices that only keep time: streams and events over a clock, where a GPU has work, for the same scheduler.

Promises: what is issued takes the milliseconds that it is told, in the order of streams and events; on one device
work that was issued first goes first, later work fills the gaps that it leaves. The clock is virtual (a prediction:
nothing sleeps) or the wall's (a rehearsal: whoever waits for an event sleeps until its time).
"""

import time
from dataclasses import dataclass, field
from typing import Self

KEPT_GAPS = 32  # older gaps of a device are forgotten: nothing is issued that far behind


class Clock:
    """The host's time in ms, which moves where the host waits or spends."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.streams: list[SimulatedStream] = []  # the current one is last

    def now(self) -> float:
        return self.now_ms

    def wait_until(self, ms: float) -> None:
        self.now_ms = max(self.now_ms, ms)

    def spend(self, ms: float) -> None:
        """What issuing takes of the host's time."""
        self.now_ms += ms


class WallClock(Clock):
    """The real time: issuing takes what it takes."""

    def now(self) -> float:
        return 1e3 * time.perf_counter()

    def wait_until(self, ms: float) -> None:
        time.sleep(max(0.0, ms - self.now()) / 1e3)

    def spend(self, ms: float) -> None:
        pass


@dataclass(frozen=True)
class Interval:
    """One piece of work on a stream, as a picture shows it."""

    stream: str
    what: str
    start_ms: float
    end_ms: float


@dataclass
class SimulatedDevice:
    """Owns: when it is busy, as intervals in order, and a record of all work."""

    name: str
    clock: Clock
    type: str = "simulated"
    busy: list[tuple[float, float]] = field(default_factory=list)
    busy_ms: float = 0.0
    record: list[Interval] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name

    def busy_until(self, ms: float) -> float:
        """Busy time before `ms`, which is later than the gaps that are forgotten."""
        return self.busy_ms - sum(end - max(begin, ms) for begin, end in self.busy if end > ms)

    def claim(self, start: float, ms: float) -> tuple[float, float]:
        """Take `ms` of the device from `start` on, in the gaps between work that was issued before."""
        self.busy_ms += ms
        taken: list[tuple[float, float]] = []
        for begin, end in self.busy:
            if end <= start:
                continue
            if begin > start:
                part = min(ms, begin - start)
                taken.append((start, start + part))
                ms -= part
                if ms <= 0:
                    break
            start = max(start, end)
        if ms > 0 or not taken:
            taken.append((start, start + ms))
        merged: list[tuple[float, float]] = []
        for begin, end in sorted([*self.busy, *taken]):
            if merged and begin <= merged[-1][1] + 1e-9:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self.busy = merged[-KEPT_GAPS:]
        return taken[0][0], taken[-1][1]


class SimulatedStream:
    """Work in order on one device; entered, it is where copies go."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.ready_ms = 0.0  # when all that was issued has ended

    def run(self, what: str, ms: float, exclusive: bool = True) -> None:
        """Issue work. Copies between devices are not exclusive: they leave the device to others."""
        start = max(self.ready_ms, self.device.clock.now())
        if exclusive:
            start, self.ready_ms = self.device.claim(start, ms)
        else:
            self.ready_ms = start + ms
        self.device.record.append(Interval(self.name, what, start, self.ready_ms))

    def wait_event(self, event: "SimulatedEvent") -> None:
        self.ready_ms = max(self.ready_ms, event.at_ms)

    def __enter__(self) -> Self:
        self.device.clock.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.device.clock.streams.pop()


class SimulatedEvent:
    """The interface of torch.cuda.Event over a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.at_ms = clock, 0.0

    def record(self, stream: SimulatedStream) -> None:
        self.at_ms = max(stream.ready_ms, self.clock.now())

    def synchronize(self) -> None:
        self.clock.wait_until(self.at_ms)

    def query(self) -> bool:
        return self.at_ms <= self.clock.now()

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        return end.at_ms - self.at_ms
