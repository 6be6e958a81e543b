"""The peer of anchor attention: torch's flex_attention, compiled, on the same mask as `draftgraph.kernels.reference`.

`draftgraph bench attention` loads this file by its path. Keys of the context and of the blocks are laid end to end
beforehand, in flex_attention's own layout, so that only attention is timed; building the block mask is timed apart.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@functools.cache
def compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(positions: Tensor, valid: Tensor, num_context: int, block_size: int, window: int | None) -> BlockMask:
    """Queries are the A*K draft tokens; keys are the S context tokens, then the draft tokens."""
    num_rows, num_anchors = positions.shape
    num_queries = num_anchors * block_size

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = positions[row, block]
        in_context = (key < num_context) & (key < anchor)
        own = key - num_context
        in_block = (own >= 0) & (own // block_size == block)
        if window is not None:
            in_context = in_context & (key >= anchor + slot - (window - 1))
            in_block = in_block & (own % block_size <= slot)
        return valid[row, block] & (in_context | in_block)

    return create_block_mask(
        visible, num_rows, None, num_queries, num_context + num_queries, device=str(positions.device)
    )


def layout(q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> list[Tensor]:
    """Ours to flex_attention's: q [R, H, A*K, C]; k, v [R, G, S + A*K, C]; contiguous leaves."""
    keys = [torch.cat([c, b.flatten(1, 2)], 1) for c, b in ((context_k, block_k), (context_v, block_v))]
    return [t.transpose(1, 2).contiguous().requires_grad_(t.is_cuda) for t in (q.flatten(1, 2), *keys)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Returns [R, H, A*K, C]. Without a GPU it runs uncompiled, and has no backward."""
    if q.is_cuda:
        return compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to compile
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
