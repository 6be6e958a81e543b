"""The DFlash drafter: a small Qwen3-style decoder over draft blocks, conditioned on the target's tapped layers.

Promises: parameter names and arithmetic of the z-lab checkpoints (3 + 11 * layers tensors); fixed shapes, no host
syncs, so that forward and backward can be captured; the same code in float32 on CPU and bf16 on a GPU.
Does not do: embedding, lm_head, loss (the target's embedding and lm_head are frozen and shared).
Source: DFlash paper (arXiv 2602.06036); shapes use R rows, S context, A anchors, K block, D hidden, N taps,
H/G query/kv heads, C head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftgraph.kernels.anchor_attention import anchor_attention
from draftgraph.kernels.reference import anchor_attention as anchor_attention_reference


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


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, made once: a captured step only gathers rows of them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, num_positions: int, head_dim: int, theta: float):
        super().__init__()
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * torch.cat([inverse, inverse])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [*positions.shape, 1, C], to be multiplied with [..., heads, C]."""
        return self.cos[positions].unsqueeze(-2).to(dtype), self.sin[positions].unsqueeze(-2).to(dtype)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half RoPE over the full head dim."""
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: DrafterShape, layer: int):
        super().__init__()
        d, c, h, g = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
        self.head_dim = c
        self.window = shape.sliding_window if shape.layer_types[layer] == "sliding_attention" else None
        self.q_proj = nn.Linear(d, h * c, bias=False)
        self.k_proj = nn.Linear(d, g * c, bias=False)
        self.v_proj = nn.Linear(d, g * c, bias=False)
        self.o_proj = nn.Linear(h * c, d, bias=False)
        self.q_norm = RMSNorm(c, shape.rms_norm_eps)
        self.k_norm = RMSNorm(c, shape.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, context: Tensor, block_rope, context_rope, anchors, attend: Callable) -> Tensor:
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), block_rope)
        block_k = rotate(self.k_norm(self.heads(self.k_proj(x))), block_rope)
        context_k = rotate(self.k_norm(self.heads(self.k_proj(context))), context_rope)
        block_v, context_v = self.heads(self.v_proj(x)), self.heads(self.v_proj(context))
        out = attend(q, context_k, context_v, block_k, block_v, *anchors, self.window, self.head_dim**-0.5)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape, layer: int):
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, block_rope, context_rope, anchors, attend: Callable) -> Tensor:
        # NOTE: the context does not pass input_layernorm; only the block does.
        x = x + self.self_attn(self.input_layernorm(x), context, block_rope, context_rope, anchors, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part. `max_context` sizes the rotary table; nothing else depends on it."""

    def __init__(self, shape: DrafterShape, max_context: int):
        super().__init__()
        self.shape = shape
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
            [R, A, K, D] after the last norm; exactly zero in invalid blocks.
        """
        num_context, block_size = target_hidden.shape[1], self.shape.block_size
        dtype = self.fc.weight.dtype
        context = self.hidden_norm(self.fc(target_hidden))
        offsets = torch.arange(block_size, device=target_hidden.device)
        block_rope = self.rotary.at(anchor_positions.long()[..., None] + offsets, dtype)
        context_rope = self.rotary.at(torch.arange(num_context, device=target_hidden.device), dtype)
        attend = anchor_attention if target_hidden.is_cuda else anchor_attention_reference
        anchors = (anchor_positions, anchor_valid)
        x = block_embeddings
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, anchors, attend)
        return torch.where(anchor_valid[..., None, None], self.norm(x), 0.0)


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
