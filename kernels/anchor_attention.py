"""Attention of draft blocks over the context before their anchor and over themselves: the mask of a DFlash drafter.

Promises: the same bits on every run, no wait for the device, a grid that depends on shapes alone (so that it can be
captured), every output element written. The mask takes no memory; context tiles that no anchor sees are skipped, and
those that all anchors of a tile see are computed without it.
Does not: tune itself (tiles are a fixed table, a part of the bits), or take other head sizes than the table's.
"""

from dataclasses import dataclass
from math import gcd
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
    """Extents of a tile in queries (16 or more, so that a block fits) and in context keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel. That of the block gradient uses no block_n: its keys are the queries' own."""

    forward: Tile
    query_gradient: Tile
    context_gradient: Tile
    block_gradient: Tile


def same_tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Tiles:
    """One tile for all kernels."""
    return Tiles(*[Tile(block_m, block_n, num_warps, num_stages)] * 4)


# By bytes of an element and head_dim. Every entry fits a block's shared memory on sm_80, sm_90 and sm_120 (tested).
# float32 is for verification: its products do not use tensor cores, so small tiles that compile fast are enough.
TILES = {
    (2, 16): same_tiles(64, 64, 4, 2),
    (2, 32): same_tiles(64, 64, 4, 2),
    (2, 64): same_tiles(64, 64, 4, 2),
    (2, 128): same_tiles(64, 64, 4, 2),
    (2, 256): same_tiles(32, 32, 4, 2),
    (4, 16): same_tiles(32, 32, 8, 1),
    (4, 32): same_tiles(32, 32, 8, 1),
    (4, 64): same_tiles(32, 32, 8, 1),
    (4, 128): same_tiles(16, 16, 8, 1),
    (4, 256): same_tiles(16, 16, 8, 1),
}
# What Hopper (sm_90) takes instead: 128 rows of the operand that stays, so that the one that streams is read half as
# often. The context gradient holds two accumulators of its 128 keys, which leaves registers for 64 queries. Those of
# head_dim 128 were the fastest of 35 on one NVIDIA H200 (R2 S4096 A512 K16 H32 G8); 64 follows them, unmeasured.
HOPPER_TILES = {
    (2, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 2)),
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 3)),
}


def tiles_for(q: Tensor) -> Tiles:
    """The tiles of q's element size and head_dim on q's device."""
    key = q.element_size(), q.shape[-1]
    is_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return HOPPER_TILES.get(key, TILES[key]) if is_hopper else TILES[key]


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
    rule: str = "served",
) -> Tensor:
    """Attend from every draft block to the context before its anchor and to the block itself.

    Args:
        q: [R, A, K, H, C], float32 or bfloat16 like the keys and values; K at most 16, C one of the table's.
        context_k, context_v: [R, S, G, C], H a multiple of G. Positions at or after a row's last anchor are never used.
        block_k, block_v: [R, A, K, G, C], the draft blocks' own keys and values.
        anchor_positions: [R, A] int32, ascending among the valid ones, which come first.
        anchor_valid: [R, A] bool. False in pad slots.
        window: None for a full layer: context kv < a, and the whole block. W for a sliding layer: context kv < a within
            what `rule` says, and the block up to and including slot k.
        scale: positive factor on q.k before the softmax.
        rule: of sliding layers. "served", as engines run it: kv >= a + k - (W - 1). "speculators": kv >= a - W for
            every slot. "bidirectional": the same, and all of the block.
    Returns:
        [R, A, K, H, C] in q's dtype. Zero in invalid blocks, and so are all gradients from and to them.
    Stream: the current one of the current device, which is the tensors'.
    Error: float32 uses ieee products, 1e-4 of the largest element; bfloat16 inputs accumulate in float32, 2e-2.
    Cost: 4 * C FLOPs forward and 14 * C backward per head and visible query-key pair, and as much for the hidden ones
        of tiles on the mask's border: about half a tile of keys per tile of queries. Keeps out and 4 bytes per query
        and head for the backward. Tensors that are not contiguous are copied first.
    """
    return _AnchorAttention.apply(
        q, context_k, context_v, block_k, block_v, anchor_positions, anchor_valid, window, scale, rule
    )


def launch(tile: Tile, constants: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Heads of a group and draft blocks that share a tile of queries, and what its kernel is specialised for.

    As many heads as fit when a block has 16 tokens, the largest K.
    """
    fold = gcd(constants["H"] // constants["G"], tile.block_m // 16)
    options = {"FOLD": fold, "BLOCK_M": tile.block_m, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return fold, tile.block_m // (fold * constants["DRAFT_BLOCK"]), constants | options


class _AnchorAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        tensors = [tensor.contiguous() for tensor in args[:7]]
        window, scale, rule = args[7:]
        q, context_k = tensors[:2]
        R, A, K, H, C = q.shape
        S, G = context_k.shape[1:3]
        assert K <= 16 and H % G == 0
        ctx.tiles, ctx.scale = tiles_for(q), scale
        ctx.constants = {"H": H, "G": G, "C": C, "DRAFT_BLOCK": K, "WINDOW": window, "RULE": rule}
        out = torch.empty_like(q)
        lse = torch.empty(R, G, A * K, H // G, dtype=torch.float32, device=q.device)
        tile = ctx.tiles.forward
        fold, blocks, options = launch(tile, ctx.constants)
        anchor_forward_kernel[H // fold, triton.cdiv(A, blocks), R](
            *tensors, out, lse, S, A, scale, BLOCK_N=tile.block_n, **options
        )
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, positions, valid, out, lse = ctx.saved_tensors
        q, context_k, context_v, block_k, block_v = inputs
        R, A, _, H, _ = q.shape
        S, G = context_k.shape[1:3]
        scale = ctx.scale
        dout = dout.contiguous()
        grads = [torch.empty_like(tensor) for tensor in inputs]
        dq, context_dk, context_dv, block_dk, block_dv = grads
        delta = torch.empty_like(lse)
        # NOTE: the first kernel writes delta, which the other two read.
        tile = ctx.tiles.query_gradient
        fold, blocks, options = launch(tile, ctx.constants)
        anchor_query_gradient_kernel[H // fold, triton.cdiv(A, blocks), R](
            *inputs, positions, valid, out, lse, dout, delta, dq, S, A, scale, BLOCK_N=tile.block_n, **options
        )
        rest = (positions, valid, lse, dout, delta)
        tile = ctx.tiles.context_gradient
        _, _, options = launch(tile, ctx.constants)
        all_anchors = triton.next_power_of_2(A)
        anchor_context_gradient_kernel[G, triton.cdiv(S, tile.block_n), R](
            q, context_k, context_v, *rest, context_dk, context_dv, S, A, scale,
            ALL_ANCHORS=all_anchors, BLOCK_N=tile.block_n, **options,
        )  # fmt: skip
        _, blocks, options = launch(ctx.tiles.block_gradient, ctx.constants)
        anchor_block_gradient_kernel[G, triton.cdiv(A, blocks), R](
            q, block_k, block_v, *rest, block_dk, block_dv, A, scale, **options
        )
        return *grads, None, None, None, None, None
