"""Warm-up, capture and verification of a whole rig, and the evidence of it.

Promises: in the graph mode every graph was replayed on changing inputs, buckets interleaved, and gave the bits of the
eager run; in the eager mode the static buffers, NaN in every pad, gave what fresh unpadded tensors give. Otherwise
there is no run. It waits for the devices, and leaves weights behind that the caller overwrites.
"""

import time
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from draftgraph.capture import tuning
from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.build import Engine
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.errors import CaptureError
from draftgraph.engine.evidence import DeviceBefore, check_ops, device_row, graph_rows, lane_rows
from draftgraph.engine.run.buffers import BatchViews
from draftgraph.engine.run.lanes import DrafterLane

# Largest allowed max|difference| / max|reference| of a padded bucket against its rows alone.
PADDING_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Phases:
    """Seconds per phase, and a bar that names the present one."""

    NAMES = ("warm up", "verification", "capture")

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress = progress
        self.task = progress.add_task("warm up", total=total)
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self.name, self.since = self.NAMES[0], time.perf_counter()

    def enter(self, name: str, description: str) -> None:
        self.close()
        self.name, self.since = name, time.perf_counter()
        self.progress.update(self.task, advance=1, description=description)

    def close(self) -> None:
        self.seconds[self.name] += time.perf_counter() - self.since


def warm_up(
    engine: Engine, progress: Progress, before: dict[str, DeviceBefore], tuned: tuning.Choices | None = None
) -> dict[str, Any]:
    """Warm up, capture, verify; returns the content of warmup.json.

    Args:
        before: every device as it was before the models were loaded.
        tuned: what kernels must have been tuned to: the choices of the run that is resumed.
    Raises:
        CaptureFailure: a graph cannot be captured, or does not replay to the eager run's bits; a kernel that should
            have taken an earlier choice tuned itself anew.
        CaptureError: padding leaks, or an op is not implemented as the profile demands.
    """
    section = engine.plan.profile.capture
    lanes, captured = engine.lanes, section.mode == "graph"
    phases = Phases(progress, total=4 if captured else 3)
    worst, references = None, None
    try:
        with torch.random.fork_rng(devices=[]):
            persistent = {d: torch.cuda.memory_allocated(d) if captured else None for d in engine.devices}
            for lane in lanes:
                lane.warm_up(section.warmup_rounds)
            if tuned is not None:
                tuning.refuse_new(tuned)
            if captured:
                phases.enter("verification", "eager references")
                references = eager_references(lanes, section.verify_rounds)
            else:
                phases.enter("verification", "verify padding")
                worst = check_padding(engine, section.verify_rounds)
            phases.enter("capture", "capture" if captured else "eager steps")
            for lane in lanes:
                lane.capture()
            if references is not None:
                phases.enter("verification", "compare replays")
                compare(lanes, references)
            phases.enter("warm up", "initialise")
            if len(engine.rig.drafters) > 1 or engine.plan.hosts > 1:
                # Sums and copies between drafters are in no graph: kernels load and hosts connect here, not in step 1.
                engine.rig.reduction.step()
            engine.initialise()
    finally:
        phases.close()
        progress.remove_task(phases.task)
    graphs = graph_rows(lanes, before)
    if captured:
        check_ops(section.ops, graphs, section.allow_fallback)
    # Targets tune themselves when they are loaded, before what they are compared with runs.
    tuning_seconds = sum(target.tuning_seconds for target in dict.fromkeys(engine.targets))
    seconds = {"tuning": tuning_seconds, **phases.seconds}
    return {
        "mode": section.mode,
        "made_of": engine.plan.graphs_made_of,
        "graphs": graphs,
        "lanes": lane_rows(lanes, graphs),
        "devices": [device_row(d, graphs, before[str(d)], persistent[d]) for d in engine.devices],
        "pool_bytes": sum(row["pool_bytes"] or 0 for row in graphs) if captured else None,
        "ops": engine.targets[0].ops,
        "tap_errors": {str(layer): error for layer, error in engine.targets[0].tap_errors.items()} or None,
        "seconds": round(sum(seconds.values()), 3),
        "seconds_by_phase": {name.replace(" ", "_"): round(value, 3) for name, value in seconds.items()},
        "verified": True,
        "verification": {
            "rounds": section.verify_rounds,
            "replay_against_eager": "bit-equal" if captured else None,
            "padded_against_unpadded_relative_difference": worst,
        },
    }


def check_padding(engine: Engine, rounds: int) -> float:
    """Run every bucket on its static buffers with NaN in every pad, and its rows alone on fresh unpadded tensors.

    Returns:
        The largest max|difference| / max|reference| over taps, sums and gradients of all rounds.
    Raises:
        CaptureError: it is larger than rounding explains.
    """
    worst = 0.0
    for round_index in range(rounds):
        for bucket in engine.plan.buckets:
            for index in range(max(len(engine.rig.targets), len(engine.rig.drafters))):
                target_index = index % len(engine.rig.targets)
                drafter = engine.rig.drafters[index % len(engine.rig.drafters)]
                worst = max(worst, padding_difference(engine, target_index, drafter, bucket, round_index))
    return worst


def padding_difference(
    engine: Engine, target_index: int, drafter: DrafterLane, bucket: Bucket, round_index: int
) -> float:
    target, target_lane = engine.targets[target_index], engine.rig.targets[target_index]
    views = target_lane.batch.views[bucket]
    with target_lane.lane.on_stream():
        target_lane.batch.taps.fill_(float("nan"))
        engine.data.fill(bucket, round_index, views)
        target.extract(views.input_ids, views.taps)
        slots = views.lengths.tolist()
        lengths = [length for length in slots if length]  # slots without a row are the last ones
        alone = []
        for r, length in enumerate(lengths):
            taps = torch.empty_like(views.taps[r : r + 1, :length])
            target.extract(views.input_ids[r : r + 1, :length].contiguous(), taps)
            alone.append(taps)
        differences = [relative_difference(views.taps[r, :n], alone[r][0]) for r, n in enumerate(lengths)]
        for r, length in enumerate(slots):
            views.taps[r, length:].fill_(float("nan"))
    target_lane.lane.synchronize()
    static = drafter.batch.views[bucket]
    with drafter.lane.on_stream():
        if static is not views:
            drafter.batch.read(bucket, target_lane.batch)
        drafter.random_weights(round_index)
        gradients, sums = run_micro_step(drafter, static)
        total_gradients, total_sums = torch.zeros_like(gradients), torch.zeros_like(sums)
        for r, length in enumerate(lengths):
            row_gradients, row_sums = run_micro_step(
                drafter, unpadded_row(static, r, length, alone[r].to(drafter.device))
            )
            total_gradients += row_gradients
            total_sums += row_sums
        differences += [relative_difference(gradients, total_gradients), relative_difference(sums, total_sums)]
        drafter.clear()
    drafter.lane.synchronize()
    allowed = PADDING_TOLERANCE[target.dtype]
    # NOTE: max() would lose a NaN; a comparison with one is false.
    if not all(difference <= allowed for difference in differences):
        worst = next((d for d in differences if d != d), max(differences))
        raise CaptureError(
            f"bucket {bucket.name}: padded rows differ from the rows alone by {worst:.1e} (allowed {allowed:.0e}): a "
            f"pad reaches real tokens in target family {target.config.model_type!r} or in the drafter"
        )
    return max(differences)


def run_micro_step(drafter: DrafterLane, views: BatchViews) -> tuple[Tensor, Tensor]:
    """Gradients and sums of one eager micro-step from zero."""
    drafter.clear()
    drafter.forward_backward(views)
    return drafter.flat.grads.clone(), drafter.sums.clone()


def unpadded_row(views: BatchViews, r: int, length: int, taps: Tensor) -> BatchViews:
    """Row r of a bucket as fresh tensors of its own size: R = 1, S = its length, A = its valid anchors."""
    valid = int(views.anchor_valid[0, r].sum())
    return BatchViews(
        input_ids=views.input_ids[r : r + 1, :length].clone(),
        loss_mask=views.loss_mask[r : r + 1, :length].clone(),
        lengths=views.lengths[r : r + 1].clone(),
        anchor_positions=views.anchor_positions[:1, r : r + 1, :valid].clone(),
        anchor_valid=views.anchor_valid[:1, r : r + 1, :valid].clone(),
        taps=taps,
    )


def relative_difference(found: Tensor, reference: Tensor) -> float:
    scale = reference.abs().max().clamp(min=1e-20)
    return float((found.float() - reference.float()).abs().max() / scale.float())
