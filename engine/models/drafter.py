"""The DFlash drafter: a small Qwen3-style decoder over draft blocks, conditioned on the target's tapped layers.

Promises: parameter names and arithmetic of the z-lab checkpoints (3 + 11 * layers tensors); fixed shapes, no host
syncs, so that forward and backward can be captured; the same code in float32 on CPU and bf16 on a GPU.
Does not do: embedding, lm_head, loss (the target's embedding and lm_head are frozen and shared).
Source: DFlash paper (arXiv 2602.06036); shapes use R rows, S context, A anchors, K block, D hidden, N taps,
H/G query/kv heads, C head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftgraph.engine.models.stacked_linear import stacked_linear
from draftgraph.kernels import fused, reference


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors; written into exports and checkpoints."""

    hidden_size: int  # D
    intermediate_size: int
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # C
    block_size: int  # K
    vocab_size: int  # V
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # N taps
    num_target_layers: int
    layer_types: tuple[str, ...]  # "full_attention" or "sliding_attention", one per layer
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float
    sliding_rule: str = "served"  # see `reference.anchor_attention`

    @property
    def num_parameters(self) -> int:
        d, f, c = self.hidden_size, self.intermediate_size, self.head_dim
        layer = d * c * (2 * self.num_heads + 2 * self.num_kv_heads) + 2 * c + 3 * d * f + 2 * d
        return len(self.target_layer_ids) * d * d + 2 * d + self.num_layers * layer


def default_target_layer_ids(num_taps: int, num_target_layers: int) -> tuple[int, ...]:
    """The tapped layers that the DFlash authors use for a target of `num_target_layers` layers."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


# Keys and values of one layer over the context, [R, S, G, C] each.
ContextKeys = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Context:
    """Context tokens that every layer projects to keys and values of its own."""

    ops: Any  # `fused`, the Triton kernels, or `reference`, their twins
    hidden: Tensor  # [R, S, D]
    positions: Tensor  # [S] or [R, S] int32
    cos: Tensor  # [positions, C] float32
    sin: Tensor


@dataclass(frozen=True)
class Blocks:
    """What every layer is given besides the residual stream."""

    ops: Any
    context: Context | Sequence[ContextKeys]  # or what the layers projected before
    block_positions: Tensor  # [R, A, K] int32
    anchor_positions: Tensor  # [R, A] int32
    anchor_valid: Tensor  # [R, A] bool
    cos: Tensor
    sin: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, ops: Any, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of the residual stream, and the stream, once the last update is added."""
        if update is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(update, x, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, made once: a captured step only reads rows of them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, num_positions: int, head_dim: int, theta: float):
        super().__init__()
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * torch.cat([inverse, inverse])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


class Attention(nn.Module):
    def __init__(self, shape: DrafterShape, layer: int):
        super().__init__()
        d, c, h, g = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = h, g, c
        self.window = shape.sliding_window if shape.layer_types[layer] == "sliding_attention" else None
        self.rule = shape.sliding_rule
        # NOTE: q, k, v run as one product, and so do gate and up, without a copy because they are registered in a row.
        self.q_proj = nn.Linear(d, h * c, bias=False)
        self.k_proj = nn.Linear(d, g * c, bias=False)
        self.v_proj = nn.Linear(d, g * c, bias=False)
        self.o_proj = nn.Linear(h * c, d, bias=False)
        self.q_norm = RMSNorm(c, shape.rms_norm_eps)
        self.k_norm = RMSNorm(c, shape.rms_norm_eps)

    def forward(self, x: Tensor, blocks: Blocks) -> Tensor:
        ops, h, g = blocks.ops, self.num_heads, self.num_kv_heads
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        norms = (self.q_norm.weight, self.k_norm.weight)
        tables, eps = (blocks.cos, blocks.sin), self.q_norm.eps
        q, block_k, block_v = ops.norm_rope_split(
            stacked_linear(x, *weights), (h, g, g), norms, *tables, blocks.block_positions, eps
        )
        context = blocks.context
        context_k, context_v = self.context_keys(context) if isinstance(context, Context) else context[self.layer]
        anchors = (blocks.anchor_positions, blocks.anchor_valid)
        out = ops.anchor_attention(
            q, context_k, context_v, block_k, block_v, *anchors, self.window, self.head_dim**-0.5, self.rule
        )
        return stacked_linear(out.flatten(-2), self.o_proj.weight)

    def context_keys(self, context: Context) -> ContextKeys:
        weights, g = (self.k_proj.weight, self.v_proj.weight), self.num_kv_heads
        tables = (context.cos, context.sin, context.positions)
        projected = stacked_linear(context.hidden, *weights)
        k, v = context.ops.norm_rope_split(projected, (g, g), (self.k_norm.weight,), *tables, self.k_norm.eps)
        return k, v


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, ops: Any) -> Tensor:
        gated = ops.swiglu(stacked_linear(x, self.gate_proj.weight, self.up_proj.weight))
        return stacked_linear(gated, self.down_proj.weight)


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape, layer: int):
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, update: Tensor | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it: the next norm adds it in the same pass."""
        # NOTE: the context does not pass input_layernorm; only the block does.
        normed, x = self.input_layernorm(blocks.ops, x, update)
        normed, x = self.post_attention_layernorm(blocks.ops, x, self.self_attn(normed, blocks))
        return x, self.mlp(normed, blocks.ops)


class Drafter(nn.Module):
    """The trainable part. `max_context` sizes the rotary table; nothing else depends on it.

    Args:
        recompute: keep each layer's input for its backward, not its activations; the same bits.
    """

    def __init__(self, shape: DrafterShape, max_context: int, recompute: bool = False):
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape, i) for i in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = RotaryTable(max_context + shape.block_size, shape.head_dim, shape.rope_theta)

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Write fresh weights in place: normal(0, std) for matrices, ones for norms. The same bits on every device."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(
        self, target_hidden: Tensor, block_embeddings: Tensor, anchor_positions: Tensor, anchor_valid: Tensor
    ) -> Tensor:
        """One pass over all draft blocks.

        Args:
            target_hidden: [R, S, N*D], the taps of every context token; pads are never looked at by valid blocks.
            block_embeddings: [R, A, K, D], target embedding of [token at a, MASK x (K-1)].
            anchor_positions: [R, A] int32, ascending among the valid.
            anchor_valid: [R, A] bool.
        Returns:
            [R, A, K, D] after the last norm; without meaning in invalid blocks, whose gradient must be zero.
        """
        positions = torch.arange(target_hidden.shape[1], dtype=torch.int32, device=target_hidden.device)
        return self.draft(self.context(target_hidden, positions), block_embeddings, anchor_positions, anchor_valid)

    def context(self, target_hidden: Tensor, positions: Tensor) -> Context:
        """The taps [R, S, N*D] of context tokens, as layers take them."""
        ops = fused if target_hidden.is_cuda else reference
        hidden, _ = self.hidden_norm(ops, stacked_linear(target_hidden, self.fc.weight))
        return Context(ops, hidden, positions, self.rotary.cos, self.rotary.sin)

    def draft(
        self,
        context: Context | Sequence[ContextKeys],
        block_embeddings: Tensor,
        anchor_positions: Tensor,
        anchor_valid: Tensor,
    ) -> Tensor:
        """`forward` for a context that is projected here, or was before: then keys and values, layer by layer."""
        ops = fused if block_embeddings.is_cuda else reference
        blocks = Blocks(
            ops=ops,
            context=context,
            block_positions=anchor_positions[..., None]
            + torch.arange(self.shape.block_size, dtype=torch.int32, device=anchor_positions.device),
            anchor_positions=anchor_positions,
            anchor_valid=anchor_valid,
            cos=self.rotary.cos,
            sin=self.rotary.sin,
        )
        x, update = block_embeddings, None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                # NOTE: no state of a generator, which a capture would refuse; nothing here draws.
                x, update = checkpoint(layer, x, update, blocks, use_reentrant=False, preserve_rng_state=False)
            else:
                x, update = layer(x, update, blocks)
        return self.norm(ops, x, update)[0]


def block_tokens(input_ids: Tensor, anchor_positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions of every draft block.

    Args:
        input_ids: [R, S] int64.
        anchor_positions: [R, A] int32.
        block_size: K.
    Returns:
        tokens [R, A, K] int64 at a + k (the row's last token where a + k >= S); positions [R, A, K] int64, not clamped.
    """
    num_rows, num_context = input_ids.shape
    positions = anchor_positions.long()[..., None] + torch.arange(block_size, device=input_ids.device)
    inside = positions.clamp(max=num_context - 1)
    return input_ids.gather(1, inside.view(num_rows, -1)).view(inside.shape), positions
