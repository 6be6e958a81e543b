"""The summary of `draftgraph plan`: what is known of a run before a device is touched."""

from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.engine.data.buckets import efficiency
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.arrange import COUNTS, Arrangement, arrangements, reuses
from draftgraph.engine.predict.cards import RESERVED_BYTES
from draftgraph.engine.predict.costs import Costs, costs, mixed, why_unknown
from draftgraph.engine.predict.measured import Evidence, gpu_name, notes
from draftgraph.engine.predict.memory import device_bytes, per_device
from draftgraph.engine.predict.recompute import estimate
from draftgraph.engine.predict.simulate import Outcome, simulate
from draftgraph.engine.predict.timeline import draw_timeline

SHOWN_STEPS = 2  # in the picture


def summary(
    plan: Plan, evidence: Evidence | None = None, gpu: str | None = None, picture: Path | None = None
) -> dict[str, Any]:
    """Args:
    evidence: a warm-up's, whose milliseconds replace estimates where it was of the same graphs.
    gpu: a card of the table.
    picture: where the timeline of the simulated schedule is drawn, as SVG.
    """
    placement = plan.profile.placement
    shares = efficiency(plan.lengths, plan.anchors, plan.buckets, plan.flops.row)
    contexts = np.array([b.context for b in plan.buckets])[plan.assignment]
    held = np.array([b.anchors for b in plan.buckets])[plan.assignment]
    target = plan.flops.target(contexts).sum() / len(placement.targets)
    drafter = plan.flops.reuse * plan.flops.drafter(contexts, held).sum() / len(placement.drafters)
    roles, known = device_bytes(plan), costs(plan, evidence, gpu)
    values = {
        "buckets": [{"rows": b.rows, "context": b.context, "anchors": b.anchors} for b in plan.buckets],
        "rows_per_bucket": np.bincount(plan.assignment, minlength=len(plan.buckets)).tolist(),
        "rows_without_anchor": plan.rows_without_anchor,
        "padding_efficiency": shares["token_efficiency"],
        "anchor_efficiency": shares["anchor_efficiency"],
        "flop_efficiency": shares["flop_efficiency"],
        "row_efficiency": plan.schedule.row_efficiency,
        "target_flop_share": float(target / (target + drafter)),
        "device_bytes": roles,
        "recompute": estimate(plan, known.card if known else None),
        "split": {"targets": len(placement.targets), "drafters": len(placement.drafters)},
        "bound_by": "target" if target > drafter else "drafter",
        "gpu": None,
        "step_ms": None,
        "tokens_per_s": None,
        "notes": notes(plan, evidence),
    }
    if known is None:
        values["notes"].append(why_unknown(placement))
        return values
    outcome = simulate(known)
    if picture is not None:
        title = f"{outcome.step_ms:,.0f} ms a step, {outcome.tokens_per_s:,.0f} real tokens/s, predicted"
        draw_timeline(outcome.timeline, title, SHOWN_STEPS * outcome.step_ms, picture)
        values["timeline"] = str(picture)
    found = predicted(plan, known, outcome, per_device(roles))
    return values | {"gpu": known.card.name if known.card else gpu_name(evidence) or "cpu"} | found


def predicted(plan: Plan, known: Costs, outcome: Outcome, bytes_per_device: dict[str, int]) -> dict[str, Any]:
    """What the simulation adds."""
    card = known.card
    limit = card.memory_bytes - RESERVED_BYTES if card else None
    per_step = [
        {
            "step": step,
            "bucket": bucket.name,
            "ms": ms[bucket],
            "measured": f"{step} {bucket.name}" in known.measured,
        }
        for step, ms in (("target", known.target_ms), ("drafter", known.drafter_ms))
        for bucket in plan.buckets
    ]
    optimizer = {"step": "optimizer", "bucket": "", "ms": known.optimizer_ms, "measured": "optimizer" in known.measured}
    on_gpus = [num_bytes for device, num_bytes in bytes_per_device.items() if device != "cpu"]
    others = arrangements(known) if card and not mixed(plan.profile.placement) else []
    best = [next(a for a in others if a.devices == count) for count in COUNTS] if others else []
    return {
        "graphs": [*per_step, optimizer],
        "figures": "measured" if all(row["measured"] for row in per_step) else "estimated",
        "step_ms": outcome.step_ms,
        "tokens_per_s": outcome.tokens_per_s,
        "busy": outcome.busy,
        "lanes": outcome.lanes,
        "data_wait_ms_per_step": outcome.data_wait_ms,
        "bound_by": outcome.bound_by,
        "memory_limit_bytes": limit,
        "fits": max(on_gpus or bytes_per_device.values()) <= limit if limit else None,
        "arrangements": [as_row(a) for a in others],
        "best": [as_row(a) for a in best],
        "reuse": [as_row(a) for a in reuses(known)] if others else [],
    }


def as_row(found: Arrangement) -> dict[str, Any]:
    outcome = found.outcome
    return {
        "devices": found.devices,
        "arrangement": found.name,
        "reuse": outcome.reuse,
        "tokens_per_s": outcome.tokens_per_s,
        "tokens_per_s_and_device": outcome.tokens_per_s / found.devices,
        "busy_min": min(outcome.busy.values()),
        "busy_max": max(outcome.busy.values()),
        "bound_by": outcome.bound_by,
        "micro_steps": outcome.accumulate,
        "micro_step_ms": outcome.step_ms / outcome.accumulate,
        "most_bytes": found.most_bytes,
        "fits": found.fits,
    }
