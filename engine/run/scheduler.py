"""The scheduler: one thread, one fixed order, whole-step replays.

Extraction k goes to target k mod T and to drafter k mod D, which makes `reuse` micro-steps of it; after `accumulate`
micro-steps comes one optimizer step. Events on the devices order the work; the host waits only where the look-ahead is
full, asleep. Same seed, same schedule, same bits. It knows lanes and buffers, and nothing of models or data; `plan`
runs it over devices that only keep time.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from draftgraph.engine.run.idle import DATA, HAND_OFF, HOST, LATE_DATA_SECONDS, WORK, Meter
from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.rig import HandOffSlot, Rig, Source
from draftgraph.engine.run.streams import Event, new_stream, on, phase
from draftgraph.profiles.ranges import nvtx_range


class Scheduler:
    """Owns: the events, one copy stream per target. `real_tokens` and `replays` count what was issued."""

    def __init__(
        self, rig: Rig, source: Source, lengths: np.ndarray, reuse: int, accumulate: int, start_micro_step: int
    ):
        self.rig, self.source, self.lengths = rig, source, lengths
        self.reuse, self.accumulate = reuse, accumulate
        self.micro_step = start_micro_step
        self.extracted = [Event(target.lane.device) for target in rig.targets]
        self.handed = [Event(target.lane.device) for target in rig.targets]
        self.copy_streams = [
            new_stream(target.lane.device, f"{target.lane.name} copies") if rig.rings else None
            for target in rig.targets
        ]
        self.done = [Event(drafter.device) for drafter in rig.drafters]
        self.finish_events = [[Event(d.device) for _ in range(rig.max_in_flight + 1)] for d in rig.drafters]
        self.in_flight: deque[Event] = deque()
        # One event per drafter that its next update waits for: a checkpoint copies what the update overwrites.
        self.copied: Sequence[Event] = ()
        self.bucket = rig.buckets[0]
        self.meter = Meter(rig.lanes, most_marks=3 * accumulate + 8)
        self.late = HOST  # why a lane that has nothing to do has nothing to do
        self.data_waits: deque[float] = deque(maxlen=10_000)  # seconds, the last ones
        self.replays: dict[str, int] = {}
        self.real_tokens = 0
        self.look_ahead_waits = 0
        # What was written so far went to other streams than the lanes', which nothing else orders.
        self.drain()
        if start_micro_step % reuse:
            # A resume in the middle of an extraction's repeats: extract again, then go on with the next repeat.
            self.extract(start_micro_step // reuse)
            drafter = rig.drafters[start_micro_step // reuse % len(rig.drafters)]
            with on(drafter.lane.stream):
                drafter.repeat.fill_(start_micro_step % reuse)

    def step(self) -> None:
        """Issue one optimizer step: its micro-steps, the reduction, the update."""
        self.meter.begin()
        for _ in range(self.accumulate):
            extraction, repeat = divmod(self.micro_step, self.reuse)
            if repeat == 0:
                self.extract(extraction)
            index = extraction % len(self.rig.drafters)
            drafter = self.rig.drafters[index]
            with phase(drafter.lane, "drafter replay", self.bucket.name):
                drafter.replay(self.bucket)
                self.meter.mark(drafter.lane, WORK)
                if repeat == self.reuse - 1:
                    self.finish(extraction, index)
            self.count("drafter", self.bucket.name)
            self.micro_step += 1
        for copied, drafter in zip(self.copied, self.rig.drafters, strict=bool(self.copied)):
            copied.hold(drafter.lane.stream)
        self.copied = ()
        self.rig.reduction.step(self.meter.mark)
        self.count("optimizer", "")
        self.meter.end()

    def extract(self, extraction: int) -> None:
        """Bring one micro-batch to its target, extract, and hand inputs and taps to its drafter."""
        t, d = extraction % len(self.rig.targets), extraction % len(self.rig.drafters)
        target, drafter = self.rig.targets[t], self.rig.drafters[d]
        with nvtx_range("scheduler", "wait"):
            if len(self.in_flight) == self.rig.max_in_flight:
                self.look_ahead_waits += 1
                self.in_flight.popleft().wait()
                self.source.release()
            since = self.rig.seconds()
            host_slot, micro_batch = self.source.next()
            self.data_waits.append(self.rig.seconds() - since)
            self.late = DATA if self.data_waits[-1] > LATE_DATA_SECONDS else HOST
        self.bucket = bucket = self.rig.buckets[micro_batch.bucket_index]
        self.real_tokens += int(self.lengths[micro_batch.row_ids].sum())
        stream = target.lane.stream
        with phase(target.lane, "h2d", bucket.name), on(stream):
            self.meter.mark(target.lane, self.late)
            # The target's buffers are free once they were handed on, or, where they are shared, once they were used.
            (self.handed[t] if self.rig.rings else self.done[d]).hold(stream)
            self.meter.mark(target.lane, HAND_OFF)
            target.batch.read_host(bucket, self.rig.host_slots[host_slot])
        with phase(target.lane, "target replay", bucket.name):
            target.replay(bucket)
            self.extracted[t].record(stream)
            self.meter.mark(target.lane, WORK)
        self.count("target", bucket.name)
        if self.rig.rings:
            ring = self.rig.rings[d]
            self.hand_off(t, drafter, ring[extraction // len(self.rig.drafters) % len(ring)])
        else:
            with phase(drafter.lane, "hand-off", bucket.name):
                self.await_taps(drafter, self.extracted[t])

    def hand_off(self, t: int, drafter: DrafterLane, slot: HandOffSlot) -> None:
        """Target buffer -> ring slot on the target's copy stream; ring slot -> static input on the drafter's."""
        copy, target, bucket = self.copy_streams[t], self.rig.targets[t], self.bucket
        with phase(target.lane, "hand-off", bucket.name), on(copy):
            self.extracted[t].hold(copy)
            slot.free.hold(copy)
            slot.batch.read(bucket, target.batch)
            slot.ready.record(copy)
            self.handed[t].record(copy)
        with phase(drafter.lane, "hand-off", bucket.name), on(drafter.lane.stream):
            self.await_taps(drafter, slot.ready)
            drafter.batch.read(bucket, slot.batch)
            slot.free.record(drafter.lane.stream)

    def await_taps(self, drafter: DrafterLane, ready: Event) -> None:
        self.meter.mark(drafter.lane, self.late)
        ready.hold(drafter.lane.stream)
        self.meter.mark(drafter.lane, HAND_OFF)

    def finish(self, extraction: int, index: int) -> None:
        events = self.finish_events[index]
        event = events[extraction // len(self.rig.drafters) % len(events)]
        event.record(self.rig.drafters[index].lane.stream)
        self.done[index] = event
        self.in_flight.append(event)

    def drain(self) -> None:
        """Wait until everything that was issued has finished; for checkpoints and the end of a run."""
        for lane in self.rig.lanes:
            lane.synchronize()

    def count(self, step: str, bucket: str) -> None:
        key = f"{step} {bucket}".strip()
        self.replays[key] = self.replays.get(key, 0) + 1
