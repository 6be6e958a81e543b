"""The schedule over devices that only keep time: the scheduler that trains, with lanes that take what graphs take.

Promises: the order, the events and the look-ahead are those of a run, since it is the same code; what one step, copy
and sum takes comes from `costs`. Kernels that share a GPU are taken to slow each other down by exactly their own time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from draftgraph.engine.config import PlacementSection
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.schedule import MicroBatch, Schedule
from draftgraph.engine.predict.costs import HOST_MS_PER_REPLAY, Costs
from draftgraph.engine.run.reduce import Reduction
from draftgraph.engine.run.rig import HandOffSlot, Rig
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.run.simulated import Clock, Interval, SimulatedDevice, SimulatedEvent, SimulatedStream

WARM_STEPS = 3  # until every lane is in its rhythm


class SimulatedLane:
    """A lane whose steps take milliseconds; a CPU's lane holds the host up as well."""

    def __init__(self, name: str, device: SimulatedDevice, ms: Callable[[str, str], float], blocking: bool):
        self.name, self.device, self.ms, self.blocking = name, device, ms, blocking
        self.stream = SimulatedStream(device, name)

    def replay(self, step: str, bucket: str = "") -> None:
        self.device.clock.spend(HOST_MS_PER_REPLAY)
        self.stream.run(f"{step} {bucket}".strip(), self.ms(step, bucket))
        if self.blocking:
            self.device.clock.wait_until(self.stream.ready_ms)

    def synchronize(self) -> None:
        self.device.clock.wait_until(self.stream.ready_ms)


class SimulatedBatch:
    """A batch buffer: where it is, and how long copies to it take."""

    def __init__(self, device: SimulatedDevice, costs: Costs):
        self.device, self.costs = device, costs

    def read_host(self, bucket: Bucket, _: object) -> None:
        """Inputs alone: less than a millisecond, beside taps of hundreds of megabytes."""

    def read(self, bucket: Bucket, other: "SimulatedBatch") -> None:
        ms = self.costs.copy_ms(bucket, same_device=other.device is self.device)
        self.device.clock.streams[-1].run("hand-off", ms, exclusive=False)


@dataclass
class SimulatedRole:
    """A target or a drafter."""

    lane: SimulatedLane
    batch: SimulatedBatch
    step: str

    @property
    def device(self) -> SimulatedDevice:
        return self.lane.device

    def replay(self, bucket: Bucket) -> None:
        self.lane.replay(self.step, bucket.name)


class SimulatedReduction(Reduction):
    """The reduction's order of meetings, with copies that take their bytes' time."""

    def __init__(self, drafters: list[Any], costs: Costs, hosts: int):
        self.costs, self.hosts = costs, hosts
        super().__init__(drafters, across=self if hosts > 1 else None)  # type: ignore[arg-type]

    def take_buffers(self) -> None:
        pass

    def peers_ms(self, drafter: Any, bytes_per_parameter: int) -> float:
        """A slice from every peer in turn."""
        return sum(
            self.costs.share_ms(bytes_per_parameter, len(self.drafters), other.device is drafter.device)
            for other in self.drafters
            if other is not drafter
        )

    def gather(self, index: int, owner: Any) -> None:
        owner.lane.stream.run("reduce", self.peers_ms(owner, 4), exclusive=False)
        self.sum_across(index, owner)

    def sum_across(self, index: int, owner: Any) -> None:
        if self.hosts > 1:
            owner.lane.stream.run("reduce", self.costs.across_ms(len(self.drafters), self.hosts), exclusive=False)

    def exchange(self, index: int, drafter: Any) -> None:
        pass

    def add_norms(self, index: int, drafter: Any) -> None:
        pass

    def spread(self, index: int, drafter: Any) -> None:
        drafter.lane.stream.run("reduce", self.peers_ms(drafter, self.costs.plan.element_size), exclusive=False)


class SimulatedSource:
    """The data process: it collates one micro-batch after the other, as slots become free."""

    def __init__(self, batches: Iterator[MicroBatch], clock: Clock, costs: Costs, num_slots: int):
        self.batches, self.clock, self.costs = batches, clock, costs
        self.freed = [0.0] * num_slots
        self.taken: list[int] = []  # bucket indices
        self.ready_ms = 0.0

    def next(self) -> tuple[int, MicroBatch]:
        batch = next(self.batches)
        bucket = self.costs.plan.buckets[batch.bucket_index]
        self.ready_ms = max(self.ready_ms, self.freed.pop(0)) + self.costs.collate_ms(bucket)
        self.clock.wait_until(self.ready_ms)
        self.taken.append(batch.bucket_index)
        return 0, batch

    def release(self) -> None:
        self.freed.append(self.clock.now())


@dataclass(frozen=True)
class Outcome:
    """What a simulated schedule does in its rhythm."""

    placement: PlacementSection
    hosts: int
    accumulate: int  # micro-steps of all hosts in a step
    reuse: int
    step_ms: float
    tokens_per_s: float  # real tokens extracted, all hosts
    busy: dict[str, float]  # device -> share
    lanes: dict[str, dict[str, float]]  # lane -> share of its time per label of run/idle.py
    data_wait_ms: float  # the host's, per step
    timeline: list[Interval]

    @property
    def bound_by(self) -> str:
        """The role that is busiest, or what it waits for where it has time left; both, where they share all devices."""
        if set(self.placement.targets) == set(self.placement.drafters) and min(self.busy.values()) > 0.8:
            return "target and drafter"
        work = {role: [s for name, s in self.lanes.items() if name.startswith(role)] for role in ("target", "drafter")}
        mean = {role: sum(s["work"] for s in shares) / len(shares) for role, shares in work.items()}
        busiest = max(mean, key=lambda role: mean[role])
        if mean[busiest] > 0.8 or min(self.busy.values()) > 0.8:
            return busiest
        reasons = {r: sum(s[r] for s in work[busiest]) for r in work[busiest][0] if r != "work"}
        return max(reasons, key=lambda reason: reasons[reason])


def simulate(
    costs: Costs,
    placement: PlacementSection | None = None,
    *,
    num_steps: int = 40,
    reuse: int | None = None,
    accumulate: int | None = None,
    hosts: int = 1,
    first_step: int | None = None,
    warm_steps: int = WARM_STEPS,
    clock: Clock | None = None,
) -> Outcome:
    """Run one host's scheduler for some steps; the others do the same beside it.

    Args:
        placement: default: the plan's.
        reuse, accumulate: default: the profile's; `accumulate` is of all hosts.
        first_step: train on the micro-batches of the run from this step on; default: on as few as there are, in an
            epoch's proportions.
        warm_steps: of `num_steps`, how many come before what is timed.
        clock: default: a virtual one.
    """
    plan = costs.plan
    placement = placement or plan.profile.placement
    reuse = reuse or plan.profile.drafter.reuse
    accumulate = accumulate or plan.profile.optim.accumulate
    local = accumulate // hosts
    rig, devices = simulated_rig(costs, placement, hosts, clock or Clock())
    clock = devices[0].clock
    schedule = Schedule(plan.assignment, plan.buckets, plan.profile.run.seed, len(placement.drafters) * hosts, 0, hosts)
    if first_step is None:
        batches = in_proportion(schedule, num_steps * local // reuse)
    else:
        batches = schedule.at(first_step * local // reuse)
    source = SimulatedSource(batches, clock, costs, rig.max_in_flight + 1)
    scheduler = Scheduler(rig, source, plan.lengths, reuse, local, 0)
    scheduler.meter.every = 1
    ends = [SimulatedEvent(clock) for _ in range(num_steps)]
    warm = min(warm_steps, num_steps - 1)
    begin, before, taken = 0.0, [0.0] * len(devices), 0
    for number, end in enumerate(ends):
        scheduler.step()
        end.record(rig.drafters[0].lane.stream)  # type: ignore[arg-type]
        if number == warm - 1:
            begin, before, taken = end.at_ms, [device.busy_until(end.at_ms) for device in devices], len(source.taken)
    finish = ends[-1].at_ms
    span = finish - begin
    scheduler.drain()
    scheduler.meter.read()
    # A few steps hold other buckets than an epoch: take their time for the work that they hold.
    work = np.array([costs.target_ms[b] + reuse * costs.drafter_ms[b] for b in plan.buckets])
    per_epoch = np.array(schedule.batches_per_bucket)
    epoch_work = (per_epoch * work).sum() / per_epoch.sum()
    held = work[source.taken[taken:]].mean() / epoch_work if first_step is None else 1.0
    step_ms = float(span / (num_steps - warm) / held)
    tokens = plan.lengths.sum() / per_epoch.sum() * accumulate / reuse
    return Outcome(
        placement=placement,
        hosts=hosts,
        accumulate=accumulate,
        reuse=reuse,
        step_ms=step_ms,
        tokens_per_s=float(1e3 * tokens / step_ms),
        busy={d.name: (d.busy_until(finish) - b) / span for d, b in zip(devices, before, strict=True)},
        lanes=scheduler.meter.shares() or {},
        data_wait_ms=1e3 * float(np.mean(scheduler.data_waits)) * len(source.taken) / num_steps,
        timeline=[i for d in devices for i in d.record if begin <= i.start_ms],
    )


def in_proportion(schedule: Schedule, num_batches: int) -> Iterator[MicroBatch]:
    """Micro-batches of one host, dealt side by side, of each bucket about as often as in an epoch."""
    side_by_side = schedule.group // schedule.hosts
    num_groups = -(-num_batches // side_by_side)
    per_epoch = np.cumsum(schedule.batches_per_bucket)
    points = (np.arange(num_groups) + 0.5) / num_groups * per_epoch[-1]
    chosen = np.random.default_rng(schedule.seed).permutation(np.searchsorted(per_epoch, points))
    nothing = np.zeros(0, dtype=np.int64)
    for number, bucket in enumerate(cycle(chosen.tolist())):
        for member in range(side_by_side):
            yield MicroBatch(number * side_by_side + member, bucket, nothing, 0)


def simulated_rig(
    costs: Costs, placement: PlacementSection, hosts: int, clock: Clock
) -> tuple[Rig, list[SimulatedDevice]]:
    """A rig whose lanes only take time, and its devices."""
    names = dict.fromkeys(placement.targets + placement.drafters)
    devices = {name: SimulatedDevice(name, clock) for name in names}
    times: dict[tuple[str, str], float] = {
        **{("target", b.name): ms for b, ms in costs.target_ms.items()},
        **{("drafter", b.name): ms for b, ms in costs.drafter_ms.items()},
        ("optimizer", ""): costs.optimizer_ms / len(placement.drafters),
    }

    def role(step: str, index: int, name: str) -> SimulatedRole:
        device = devices[name]
        lane = SimulatedLane(f"{step} {index}", device, lambda step, bucket: times[step, bucket], name == "cpu")
        return SimulatedRole(lane, SimulatedBatch(device, costs), step)

    targets = [role("target", t, name) for t, name in enumerate(placement.targets)]
    drafters: list[Any] = [role("drafter", d, name) for d, name in enumerate(placement.drafters)]
    rings: list[Any] = [
        [HandOffSlot(SimulatedBatch(d.device, costs), d.device) for _ in range(placement.look_ahead)]  # type: ignore[arg-type]
        for d in drafters
    ]
    rig = Rig(
        targets=targets,  # type: ignore[arg-type]
        drafters=drafters,
        rings=[ring for ring in rings if ring],
        reduction=SimulatedReduction(drafters, costs, hosts),
        host_slots=[None],  # type: ignore[list-item]
        buckets=costs.plan.buckets,
        seconds=lambda: clock.now() / 1e3,
    )
    return rig, list(devices.values())
