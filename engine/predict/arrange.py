"""Which arrangement of targets and drafters is best on 2, 4, 8, 16, 64 devices: every one is simulated."""

from dataclasses import dataclass

from draftgraph.engine.config import PlacementSection
from draftgraph.engine.predict.cards import RESERVED_BYTES
from draftgraph.engine.predict.costs import Costs
from draftgraph.engine.predict.memory import device_bytes, per_device
from draftgraph.engine.predict.simulate import Outcome, simulate

COUNTS = (2, 4, 8, 16, 64)
PER_HOST = 8
REUSES = (1, 2, 4)
MICRO_STEPS = 240  # of one host, simulated for each arrangement


@dataclass(frozen=True)
class Arrangement:
    """Some devices, how they are used, and what comes of it."""

    devices: int
    outcome: Outcome
    most_bytes: int  # on one device
    fits: bool | None  # None: the memory of the device is not known

    @property
    def name(self) -> str:
        placement, hosts = self.outcome.placement, self.outcome.hosts
        pairs = placement.targets == placement.drafters
        each = f"{len(placement.targets)} pairs" if pairs else f"{len(placement.targets)}:{len(placement.drafters)}"
        return f"{hosts} hosts of {each}" if hosts > 1 else each


def placements(per_host: int) -> list[PlacementSection]:
    """A pair on every device, and every split."""
    names = [f"cuda:{i}" for i in range(per_host)]
    splits = [PlacementSection(names[:t], names[t:], look_ahead=1) for t in range(1, per_host)]
    return [PlacementSection(names, names, look_ahead=1), *splits]


def rounded(accumulate: int, multiple: int) -> int:
    """Micro-steps of a step that every drafter has an equal number of, at least as many as the profile's."""
    return -(-accumulate // multiple) * multiple


def arrangement(costs: Costs, placement: PlacementSection, hosts: int, reuse: int | None = None) -> Arrangement:
    plan = costs.plan
    reuse = reuse or plan.profile.drafter.reuse
    accumulate = rounded(plan.profile.optim.accumulate, len(placement.drafters) * hosts * reuse)
    num_steps = max(8, MICRO_STEPS * hosts // accumulate)
    outcome = simulate(costs, placement, num_steps=num_steps, reuse=reuse, accumulate=accumulate, hosts=hosts)
    most = max(per_device(device_bytes(plan, placement)).values())
    fits = most + RESERVED_BYTES <= costs.card.memory_bytes if costs.card else None
    used = len(set(placement.targets + placement.drafters))
    return Arrangement(used * hosts, outcome, most, fits)


def arrangements(costs: Costs) -> list[Arrangement]:
    """All of them, the best first within each number of devices; those that do not fit come last."""
    found = []
    for count in COUNTS:
        per_host, hosts = min(count, PER_HOST), max(1, count // PER_HOST)
        found += [arrangement(costs, placement, hosts) for placement in placements(per_host)]
    return sorted(found, key=lambda a: (a.devices, a.fits is False, -a.outcome.tokens_per_s))


def reuses(costs: Costs) -> list[Arrangement]:
    """The best use of as many devices as the plan has, for each `drafter.reuse`."""
    placement = costs.plan.profile.placement
    used = len(set(placement.targets + placement.drafters))
    if used == 1:
        return [arrangement(costs, placement, 1, reuse) for reuse in REUSES]
    pairs, *splits = placements(used)
    best = []
    for reuse in REUSES:

        def longest_ms(split: PlacementSection, reuse: int = reuse) -> float:
            target = sum(costs.target_ms.values()) / len(split.targets)
            return max(target, reuse * sum(costs.drafter_ms.values()) / len(split.drafters))

        likely = sorted(splits, key=longest_ms)[:2]
        tried = [arrangement(costs, candidate, 1, reuse) for candidate in (pairs, *likely)]
        best.append(min(tried, key=lambda a: (a.fits is False, -a.outcome.tokens_per_s)))
    return best
