"""Activations of the drafter: what its backward keeps, and what recomputing layers saves and costs.

Promises: counted from shapes, as everything in a plan. The milliseconds are at what steps reach of a card's data sheet,
as all estimates of a plan, not measured.
"""

from typing import Any

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.models.drafter import DrafterShape
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.cards import Card


def kept_bytes(shape: DrafterShape, draft_tokens: int, element_size: int, recompute: bool) -> int:
    """Bytes that the backward of one micro-step keeps of its layers.

    Inputs and outputs of both norms, q/k/v before and after rotation, attention, the MLP; with `recompute` those of one
    layer, and of every layer the residual stream and what is still to be added to it.
    """
    heads = (3 * shape.num_heads + 4 * shape.num_kv_heads) * shape.head_dim
    layer = 4 * shape.hidden_size + heads + 3 * shape.intermediate_size
    held = layer + shape.num_layers * 2 * shape.hidden_size if recompute else shape.num_layers * layer
    return draft_tokens * held * element_size


def extra_flops(plan: Plan, bucket: Bucket) -> float:
    """Of one micro-step: its layers' forward again."""
    tokens = bucket.rows * bucket.anchors * plan.shape.block_size
    context = plan.flops.context_parameters - len(plan.shape.target_layer_ids) * plan.shape.hidden_size**2
    return 2.0 * (plan.flops.block_parameters * tokens + context * bucket.rows * bucket.context)


def estimate(plan: Plan, card: Card | None) -> dict[str, Any]:
    """What `drafter.recompute` saves and costs in the largest micro-step, whether it is on or not.

    Args:
        card: None: where no rate is known, the milliseconds are None.
    """
    shape, size = plan.shape, plan.element_size
    largest = max(plan.buckets, key=lambda bucket: (bucket.rows * bucket.anchors, bucket.rows * bucket.context))
    tokens = largest.rows * largest.anchors * shape.block_size
    kept = [kept_bytes(shape, tokens, size, recompute) for recompute in (False, True)]
    flops = extra_flops(plan, largest)
    # Of an extraction, its share: it feeds `reuse` micro-steps.
    extraction = plan.flops.target(largest.context) / plan.flops.reuse
    micro_step = largest.rows * (extraction + plan.flops.drafter(largest.context, largest.anchors))
    return {
        "on": plan.profile.drafter.recompute,
        "bucket": largest.name,
        "saves_bytes": kept[0] - kept[1],
        "costs_flop_share": flops / micro_step,
        "costs_ms": 1e3 * flops / card.flops() if card else None,
        "at_tflops": card.flops() / 1e12 if card else None,
    }
