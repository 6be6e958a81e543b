"""Predicted bytes per logical device and part, counted from shapes. The pools are estimates; capture measures them."""

from typing import Any

from draftgraph.engine.config import PlacementSection
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.recompute import kept_bytes
from draftgraph.engine.run.decoding import slots_for

PARTS = ("weights", "gradients", "states", "inputs", "slots", "reduction", "evaluation", "pool")
Bytes = dict[str, dict[str, int]]  # "target 0 on cuda:0" -> part -> bytes


def device_bytes(plan: Plan, placement: PlacementSection | None = None) -> Bytes:
    """Bytes of every role of the plan's placement, or of another one."""
    profile, shape = plan.profile, plan.shape
    placement = placement or profile.placement
    size = plan.element_size
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
            "evaluation": 0 if t else evaluation_bytes(plan, size, device == placement.drafters[0]),
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


def evaluation_bytes(plan: Plan, element_size: int, same_device: bool) -> int:
    """Of evaluations during the run: caches, for prompts as long as any row, logits, a drafter of another device."""
    section, shape = plan.profile.eval, plan.shape
    if not section.every:
        return 0
    slots = slots_for(max(b.context for b in plan.buckets), section.new_tokens, shape.block_size)
    drafter_caches = shape.num_layers * 2 * slots * shape.num_kv_heads * shape.head_dim * element_size
    # The drafter's and then the target's, of a block.
    logits = 2 * shape.block_size * shape.vocab_size * element_size
    row = cache_bytes(plan.target_config, slots, element_size) + drafter_caches + logits
    return section.count * row + (0 if same_device else shape.num_parameters * element_size)


def cache_bytes(config: Any, slots: int, element_size: int) -> int:
    """Of one row of a target that decodes: keys and values of a slot, and states of gated delta layers."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = sum(kind != "linear_attention" for kind in kinds)
    total *= 2 * slots * config.num_key_value_heads * head_dim * element_size
    if num_linear := kinds.count("linear_attention"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        memory = 4 * values * config.linear_key_head_dim
        convolution = (2 * keys + values) * (config.linear_conv_kernel_dim - 1) * element_size
        total += num_linear * (memory + convolution)
    return total


def per_device(roles: Bytes) -> dict[str, int]:
    """All roles of a device together."""
    totals: dict[str, int] = {}
    for role, parts in roles.items():
        device = role.split(" on ")[1]
        totals[device] = totals.get(device, 0) + sum(parts.values())
    return totals
