"""Milliseconds of every graph and copy: measured by a warm-up where there is one, else estimated.

Promises: every figure says which it is. An estimate is FLOPs and bytes at what steps reach of a card's data sheet;
where a warm-up measured other buckets of the same step, it is scaled by what that showed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from draftgraph.engine.config import PlacementSection
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.errors import UsageError
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.cards import CARDS, DEFAULT, NETWORK_GB_S, REACHED_BYTES, Card, card_named, card_of
from draftgraph.engine.predict.measured import Evidence, gpu_name, measured_ms
from draftgraph.engine.predict.recompute import extra_flops

# The optimizer kernel, per bf16 parameter: gradient read and zeroed, master and moments read and written.
OPTIMIZER_BYTES = 34
# Measured: 2.0 ms of the data process for 49,152 tokens (profiles/results/prepare.json).
COLLATE_MS_PER_TOKEN = 2.0 / 49152
HOST_MS_PER_REPLAY = 0.05  # issuing one step of a lane: guard, events, launch


@dataclass(frozen=True)
class Costs:
    """Of one plan on one kind of device."""

    plan: Plan
    card: Card | None  # None: CPU cores, or a GPU that the table lacks, where copies are taken for free
    target_ms: Mapping[Bucket, float]
    drafter_ms: Mapping[Bucket, float]
    optimizer_ms: float  # of all parameters on one device
    measured: frozenset[str]  # "target r2-s4096-a512", ..., "optimizer"

    def batch_bytes(self, bucket: Bucket) -> int:
        """Inputs and taps of a micro-batch."""
        taps = bucket.rows * bucket.context * self.plan.taps_size * self.plan.element_size
        return self.plan.layouts[bucket].num_bytes + taps

    def copy_ms(self, bucket: Bucket, same_device: bool) -> float:
        """One hand-off copy; on one device it reads and writes its memory."""
        if self.card is None:
            return 0.0
        num_bytes = self.batch_bytes(bucket)
        return self.card.memory_ms(2 * num_bytes) if same_device else self.card.link_ms(num_bytes)

    def share_ms(self, bytes_per_parameter: int, num_drafters: int, same_device: bool) -> float:
        """One drafter's slice from or to one peer."""
        if self.card is None:
            return 0.0
        num_bytes = bytes_per_parameter * self.plan.shape.num_parameters / num_drafters
        return self.card.memory_ms(2 * num_bytes) if same_device else self.card.link_ms(num_bytes)

    def across_ms(self, num_drafters: int, hosts: int) -> float:
        """The gradient sum of a slice over hosts, by a ring."""
        num_bytes = 4 * self.plan.shape.num_parameters / num_drafters
        return 2 * (hosts - 1) / hosts * num_bytes / (REACHED_BYTES * NETWORK_GB_S) / 1e6

    def collate_ms(self, bucket: Bucket) -> float:
        return bucket.rows * bucket.context * COLLATE_MS_PER_TOKEN


def costs(plan: Plan, evidence: Evidence | None, gpu: str | None) -> Costs | None:
    """What the plan's graphs take; None where that is not known: on a CPU without a warm-up.

    Args:
        evidence: the content of a warmup.json.
        gpu: a name of the card table; default: the warm-up's card, else an H200 where the profile names GPUs.
    Raises:
        UsageError: the card is not in the table, or has no products in FP8 for a target that is.
    """
    placement = plan.profile.placement
    on_cpu = set(placement.targets + placement.drafters) == {"cpu"}
    measured, found = measured_ms(plan, evidence), card_named(gpu_name(evidence))
    if gpu:
        card = card_of(gpu)
        if found is None or card != found:
            measured = {}  # of another card
    elif on_cpu or (measured and found is None):
        card = None
    else:
        card = found or CARDS[DEFAULT]
    precision = plan.profile.target.precision
    if card is not None and precision == "fp8" and not card.fp8:
        raise UsageError(f'plan: {card.name} has no products in FP8; write target.precision = "own"')
    target = {b.name: float(plan.flops.target(b.rows * b.context)) for b in plan.buckets}
    drafter = {b.name: float(b.rows * plan.flops.drafter(b.context, b.anchors)) for b in plan.buckets}
    if plan.profile.drafter.recompute:
        drafter = {b.name: drafter[b.name] + extra_flops(plan, b) for b in plan.buckets}

    def rate(names: list[str], precision: str) -> float | None:
        """FLOP/s of the card; beside GPUs, a CPU is not one."""
        return None if card is None or (mixed(placement) and "cpu" in names) else card.flops(precision)

    target_ms = per_bucket(plan, "target", target, measured, rate(placement.targets, precision))
    drafter_ms = per_bucket(plan, "drafter", drafter, measured, rate(placement.drafters, "own"))
    optimizer_ms = measured.get("optimizer")
    if optimizer_ms is not None and evidence:
        # Of several drafters each updates its slice.
        optimizer_ms *= sum(row["step"] == "optimizer" for row in evidence["graphs"])
    elif card is not None:
        optimizer_ms = card.memory_ms(OPTIMIZER_BYTES * plan.shape.num_parameters)
    if target_ms is None or drafter_ms is None or optimizer_ms is None:
        return None
    return Costs(plan, card, target_ms, drafter_ms, optimizer_ms, frozenset(measured))


def mixed(placement: PlacementSection) -> bool:
    """Whether some targets or drafters are on GPUs and others on the CPU."""
    devices = {*placement.targets, *placement.drafters}
    return "cpu" in devices and len(devices) > 1


def why_unknown(placement: PlacementSection) -> str:
    """What to do where there are no costs."""
    return (
        "No prediction of time: what a CPU takes is measured, never estimated. Name a --warmup of this placement, with "
        "capture.warmup_rounds = 2 or more (the first round is not timed)"
    ) + ("." if mixed(placement) else ", or a --gpu.")


def per_bucket(
    plan: Plan, step: str, flops: Mapping[str, float], measured: Mapping[str, float], flops_per_s: float | None
) -> dict[Bucket, float] | None:
    """Milliseconds of one step in every bucket, measured or estimated; None where neither is possible."""
    known = [b for b in plan.buckets if f"{step} {b.name}" in measured]
    if known:
        ms_per_flop = median(measured[f"{step} {b.name}"] / flops[b.name] for b in known)
    elif flops_per_s is not None:
        ms_per_flop = 1e3 / flops_per_s
    else:
        return None
    return {b: measured.get(f"{step} {b.name}", ms_per_flop * flops[b.name]) for b in plan.buckets}
