"""Predicted matrix-product FLOPs of a row, counted from shapes."""

from dataclasses import dataclass
from typing import Any

from draftgraph.engine.config import DrafterSection
from draftgraph.engine.models.drafter import DrafterShape
from draftgraph.engine.models.layers import num_experts
from draftgraph.engine.models.target import decoder_on_meta


@dataclass(frozen=True)
class FlopModel:
    """Predicted GEMM FLOPs of a row; attention and elementwise work are left out.

    Source: 2 per parameter and token forward, 6 forward and backward; the frozen lm_head 4 per parameter and slot.
    """

    target_parameters: int  # seen by a context token
    context_parameters: int  # fc and k/v of every layer, seen by a context token
    block_parameters: int  # seen by a draft token
    head_parameters: int  # V*D
    block_size: int
    reuse: int

    def target(self, context: Any) -> Any:
        return 2.0 * self.target_parameters * context

    def drafter(self, context: Any, anchors: Any) -> Any:
        block = 6.0 * self.block_parameters * self.block_size + 4.0 * self.head_parameters * (self.block_size - 1)
        return 6.0 * self.context_parameters * context + block * anchors

    def row(self, context: Any, anchors: Any) -> Any:
        return self.target(context) + self.reuse * self.drafter(context, anchors)


def flop_model(config: Any, shape: DrafterShape, section: DrafterSection) -> FlopModel:
    from_target = section.labels != "data"  # all layers of the target run, and its logits are computed
    d, c, h, g = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
    kv = shape.num_layers * 2 * d * g * c
    block = kv + shape.num_layers * (2 * d * h * c + 3 * d * shape.intermediate_size)
    decoder = decoder_on_meta(config)
    return FlopModel(
        target_parameters=matrix_parameters(config, decoder, -1 if from_target else max(shape.target_layer_ids)),
        context_parameters=len(shape.target_layer_ids) * d * d + kv,
        block_parameters=block,
        head_parameters=shape.vocab_size * d * (3 if from_target else 2) // 2,
        block_size=shape.block_size,
        reuse=section.reuse,
    )


def matrix_parameters(config: Any, decoder: Any, last_layer: int) -> int:
    """Parameters of the target's layers up to `last_layer` (-1: all) that a token's GEMMs read."""
    layers = decoder.layers[: last_layer + 1 or None]
    dense = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    experts = sum(p.numel() for name, p in layers.named_parameters() if p.dim() == 3 and ".experts." in name)
    return dense + (experts * config.num_experts_per_tok // num_experts(config) if experts else 0)
