"""Where the time of every lane goes: work, or idleness with its reason. Measured in one of some steps, by events.

Promises: no wait, no allocation in a step: events are made at the start, and read only once all of them happened; a
sample that is not read yet skips the next. On the CPU, where a lane is the host itself, nothing is measured.
"""

from collections.abc import Collection, Sequence

import numpy as np

from draftgraph.capture.lane import Lane
from draftgraph.engine.run.streams import Event

WORK = "work"
HAND_OFF, REDUCTION, DATA, HOST = REASONS = ("hand-off", "reduction", "data", "host")

SAMPLE_EVERY = 10  # steps
LATE_DATA_SECONDS = 1e-3  # the host had to wait: the queue of the data process was empty


def p99_ms(seconds: Collection[float]) -> float | None:
    """The wait that one in a hundred exceeds."""
    return 1e3 * float(np.percentile(list(seconds), 99)) if seconds else None


class Meter:
    """Args:
    most_marks: in one step, on one lane.
    every: one of so many steps is measured.
    """

    def __init__(self, lanes: Sequence[Lane], most_marks: int, every: int = SAMPLE_EVERY):
        self.lanes, self.every = lanes, every
        self.active = all(lane.stream is not None for lane in lanes)
        num_events = most_marks if self.active else 0
        self.events = {lane.name: [Event(lane.device, timed=True) for _ in range(num_events)] for lane in lanes}
        self.labels: dict[str, list[str]] = {lane.name: [] for lane in lanes}
        self.totals: dict[str, dict[str, float]] = {lane.name: {} for lane in lanes}
        self.steps = 0
        self.sampling = self.unread = False

    def begin(self) -> None:
        """A step is about to be issued."""
        self.read()
        self.sampling = self.active and not self.unread and self.steps % self.every == self.every - 1
        self.steps += 1
        for lane in self.lanes:
            self.mark(lane, "")

    def mark(self, lane: Lane, label: str) -> None:
        """What the lane's stream did since the mark before counts as `label`."""
        if self.sampling:
            labels = self.labels[lane.name]
            self.events[lane.name][len(labels)].record(lane.stream)
            labels.append(label)

    def end(self) -> None:
        self.unread = self.unread or self.sampling
        self.sampling = False

    def read(self) -> None:
        """Add up the sample, if all of it has happened."""
        last = [self.events[name][len(labels) - 1] for name, labels in self.labels.items() if labels]
        if not (self.unread and all(event.happened() for event in last)):
            return
        for name, labels in self.labels.items():
            for earlier, (later, label) in enumerate(zip(self.events[name][1:], labels[1:], strict=False)):
                ms = self.events[name][earlier].elapsed_ms(later)
                self.totals[name][label] = self.totals[name].get(label, 0.0) + ms
            labels.clear()
        self.unread = False

    def shares(self) -> dict[str, dict[str, float]] | None:
        """Per lane, the share of its time that was work, and that it idled for each reason; None: not measured."""
        if not any(self.totals.values()):
            return None
        shares = {}
        for name, totals in self.totals.items():
            whole = sum(totals.values())
            shares[name] = {label: totals.get(label, 0.0) / whole if whole else 0.0 for label in (WORK, *REASONS)}
        return shares
