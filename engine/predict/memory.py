"""Predicted bytes per logical device and part, counted from shapes. The pools are estimates; capture measures them."""

from draftgraph.engine.config import PlacementSection
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.recompute import kept_bytes

PARTS = ("weights", "gradients", "states", "inputs", "slots", "reduction", "pool")
Bytes = dict[str, dict[str, int]]  # "target 0 on cuda:0" -> part -> bytes


def device_bytes(plan: Plan, placement: PlacementSection | None = None) -> Bytes:
    """Bytes of every role of the plan's placement, or of another one."""
    profile, shape = plan.profile, plan.shape
    placement = placement or profile.placement
    size = 2 if profile.target.dtype == "bfloat16" else 4
    largest_context = max(b.rows * b.context for b in plan.buckets)
    inputs = max(layout.num_bytes for layout in plan.layouts.values()) + largest_context * plan.taps_size * size
    embedding = shape.vocab_size * shape.hidden_size * size
    head = 0 if getattr(plan.target_config, "tie_word_embeddings", False) else embedding
    parameters = shape.num_parameters
    state = 8 if size == 4 else 12  # moments, and masters where the parameters are not float32
    draft_tokens = max(b.rows * b.anchors * shape.block_size for b in plan.buckets)
    activations = kept_bytes(shape, draft_tokens, size, profile.drafter.recompute)
    logits = profile.drafter.chunk_slots * shape.vocab_size * size * (2 if plan.rule.labels == "target" else 1)
    # Hidden, MLP and attention activations of one layer; a layer's are freed before the next.
    target_pool = largest_context * (4 * shape.hidden_size + 4 * plan.target_config.intermediate_size) * size
    num_drafters = len(placement.drafters)
    roles: Bytes = {}
    for t, device in enumerate(placement.targets):
        first = device not in placement.targets[:t]  # targets on one device share its model
        roles[f"target {t} on {device}"] = {
            "weights": plan.target_bytes if first else 0,
            "inputs": inputs,
            "pool": target_pool,
        }
    for d, device in enumerate(placement.drafters):
        copied = device not in placement.targets  # the target's embedding and lm_head
        roles[f"drafter {d} on {device}"] = {
            "weights": parameters * size + (embedding + head if copied else 0),
            "gradients": parameters * 4,
            "states": parameters * state // num_drafters,
            "inputs": inputs if placement.look_ahead else 0,
            "slots": inputs * placement.look_ahead,
            "reduction": parameters * 4 // num_drafters if num_drafters > 1 else 0,
            "pool": activations + logits,
        }
    return roles


def per_device(roles: Bytes) -> dict[str, int]:
    """All roles of a device together."""
    totals: dict[str, int] = {}
    for role, parts in roles.items():
        device = role.split(" on ")[1]
        totals[device] = totals.get(device, 0) + sum(parts.values())
    return totals
