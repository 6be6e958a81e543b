"""Attention of draft blocks over the context before their anchor and over themselves: the mask of a DFlash drafter.

Promises: the same bits on every run, no wait for the device, a grid that depends on shapes alone (so that it can be
captured), every output element written. The mask takes no memory, and context tiles that no anchor sees are skipped.
Does not: tune itself (tiles are a fixed table, a part of the bits), or take other head sizes than the table's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftgraph.kernels.anchor_attention_kernels import (
    anchor_block_gradient_kernel,
    anchor_context_gradient_kernel,
    anchor_forward_kernel,
    anchor_query_gradient_kernel,
)


@dataclass(frozen=True)
class Tile:
    """Extents of a tile in queries (whole draft blocks, so at least K) and in context keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element and head_dim. Every entry fits a block's shared memory on sm_80, sm_90 and sm_120 (tested).
# float32 is for verification: its products do not use tensor cores, so small tiles that compile fast are enough.
TILES = {
    (2, 16): Tile(64, 64, 4, 2),
    (2, 32): Tile(64, 64, 4, 2),
    (2, 64): Tile(64, 64, 4, 2),
    (2, 128): Tile(64, 64, 4, 2),
    (2, 256): Tile(32, 32, 4, 2),
    (4, 16): Tile(32, 32, 8, 1),
    (4, 32): Tile(32, 32, 8, 1),
    (4, 64): Tile(32, 32, 8, 1),
    (4, 128): Tile(16, 16, 8, 1),
    (4, 256): Tile(16, 16, 8, 1),
}


def anchor_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchor_positions: Tensor,
    anchor_valid: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attend from every draft block to the context before its anchor and to the block itself.

    Args:
        q: [R, A, K, H, C], float32 or bfloat16 like the keys and values; K at most 16, C one of the table's.
        context_k, context_v: [R, S, G, C], H a multiple of G. Positions at or after a row's last anchor are never used.
        block_k, block_v: [R, A, K, G, C], the draft blocks' own keys and values.
        anchor_positions: [R, A] int32, ascending among the valid ones, which come first.
        anchor_valid: [R, A] bool. False in pad slots.
        window: None for a full layer: context kv < a, and the whole block. W for a sliding layer: context kv < a within
            the W newest positions that slot k may see, kv >= a + k - (W - 1), and the block up to and including slot k.
        scale: factor on q.k before the softmax.
    Returns:
        [R, A, K, H, C] in q's dtype. Zero in invalid blocks, and so are all gradients from and to them.
    Stream: the current one of the current device, which is the tensors'.
    Error: float32 uses ieee products, 1e-4 of the largest element; bfloat16 inputs accumulate in float32, 2e-2.
    Cost: about 4 * C FLOPs forward and 14 * C backward per head and visible query-key pair, in tiles; keeps out and
        4 bytes per query and head for the backward. Tensors that are not contiguous are copied first.
    """
    return _AnchorAttention.apply(
        q, context_k, context_v, block_k, block_v, anchor_positions, anchor_valid, window, scale
    )


class _AnchorAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        tensors = [tensor.contiguous() for tensor in args[:7]]
        window, scale = args[7:]
        q, context_k = tensors[:2]
        R, A, K, H, C = q.shape
        S, G = context_k.shape[1:3]
        tile = TILES[q.element_size(), C]
        assert tile.block_m >= K and H % G == 0
        constants = {"H": H, "G": G, "C": C, "DRAFT_BLOCK": K, "WINDOW": window, "BLOCK_M": tile.block_m}
        launch = constants | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        out = torch.empty_like(q)
        lse = torch.empty(R, H, A * K, dtype=torch.float32, device=q.device)
        grid = (triton.cdiv(A, tile.block_m // K), H, R)
        anchor_forward_kernel[grid](*tensors, out, lse, S, A, scale, BLOCK_N=tile.block_n, **launch)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.tile, ctx.launch, ctx.scale = tile, launch, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, positions, valid, out, lse = ctx.saved_tensors
        q, context_k, context_v, block_k, block_v = inputs
        R, A, K, H, _ = q.shape
        S, G = context_k.shape[1:3]
        tile, launch, scale = ctx.tile, ctx.launch, ctx.scale
        dout = dout.contiguous()
        grads = [torch.empty_like(tensor) for tensor in inputs]
        dq, context_dk, context_dv, block_dk, block_dv = grads
        delta = torch.empty_like(lse)
        query_tiles = triton.cdiv(A, tile.block_m // K)
        # NOTE: the first kernel writes delta, which the other two read.
        anchor_query_gradient_kernel[query_tiles, H, R](
            *inputs, positions, valid, out, lse, dout, delta, dq, S, A, scale, BLOCK_N=tile.block_n, **launch
        )
        rest = (positions, valid, lse, dout, delta)
        all_anchors = triton.next_power_of_2(A)
        anchor_context_gradient_kernel[triton.cdiv(S, tile.block_n), G, R](
            q, context_k, context_v, *rest, context_dk, context_dv, S, A, scale,
            ALL_ANCHORS=all_anchors, BLOCK_N=tile.block_n, **launch,
        )  # fmt: skip
        anchor_block_gradient_kernel[query_tiles, G, R](
            q, block_k, block_v, *rest, block_dk, block_dv, A, scale, **launch
        )
        return *grads, None, None, None, None
