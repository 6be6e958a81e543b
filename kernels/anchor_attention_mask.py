"""The mask of anchor attention in tiles: which tokens a tile holds, what they see, and which tiles need no mask.

A tile of queries is a run of whole draft blocks of one row, in FOLD heads that share a kv head: row m of the tile is
token m // FOLD, head m % FOLD. So a tile holds few anchors, which keeps its border narrow and its own keys few. Its
last rows are idle where the block does not divide it. Anchors ascend, so a tile's context ends at its last anchor.

Called inside kernels only. Allocates nothing; every bound is computed on the device.
"""

import triton
import triton.language as tl


@triton.jit
def load_anchors(positions, valid, index, inside):
    """Anchor positions by index, -1 where the anchor is invalid or not inside."""
    is_valid = tl.load(valid + index, mask=inside, other=0) != 0
    return tl.where(is_valid, tl.load(positions + index, mask=inside, other=0), -1)


@triton.jit
def tile_tokens(first, end, DRAFT_BLOCK: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows of the tile that starts at anchor `first`: head of the fold, token, slot, index of the anchor, inside."""
    m = tl.arange(0, BLOCK_M)
    token = m // FOLD
    block = token // DRAFT_BLOCK
    inside = (block < BLOCK_M // (FOLD * DRAFT_BLOCK)) & (first + block < end)
    return m % FOLD, first * DRAFT_BLOCK + token, token % DRAFT_BLOCK, first + block, inside


@triton.jit
def sees_context(anchor, slot, kv, WINDOW: tl.constexpr, RULE: tl.constexpr):
    """Mask of the context part; the three arguments broadcast. RULE as in the twin."""
    visible = kv < anchor
    if WINDOW is not None:
        if RULE == "served":
            visible = visible & (kv >= anchor + slot - (WINDOW - 1))
        else:
            visible = visible & (kv >= anchor - WINDOW)
    return visible


@triton.jit
def sees_block(query_block, query_slot, key_block, key_slot, WINDOW: tl.constexpr, RULE: tl.constexpr):
    """Mask of the draft-block part. A token always sees itself, so no softmax is empty, not even an invalid block's."""
    visible = query_block == key_block
    if WINDOW is not None:
        visible = visible & ((key_slot <= query_slot) | (RULE == "bidirectional"))
    return visible


@triton.jit
def reach(DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr, RULE: tl.constexpr):
    """How far back from its anchor slot 0 sees, and the last slot."""
    if RULE == "served":
        return WINDOW - 1, WINDOW - DRAFT_BLOCK
    else:
        return WINDOW, WINDOW


@triton.jit
def context_range(
    anchor, S, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr, RULE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Context that some row of a tile sees, [first, end), and of that the inner tiles, [inner, inner_end).

    Border tiles are `before` and after the inner ones, `borders` in all. Empty without a valid anchor.
    """
    end = tl.minimum(tl.max(anchor, 0), S)
    oldest = tl.min(tl.where(anchor >= 0, anchor, S), 0)
    first = 0
    inner = 0
    if WINDOW is not None:
        farthest, nearest = reach(DRAFT_BLOCK, WINDOW, RULE)
        first = tl.maximum(oldest - farthest, 0)
        newest_start = tl.maximum(end - nearest, first)
        inner = first + tl.cdiv(newest_start - first, BLOCK_N) * BLOCK_N
    inner_end = inner + tl.maximum(tl.minimum(oldest, end) - inner, 0) // BLOCK_N * BLOCK_N
    before = (inner - first) // BLOCK_N
    borders = before + tl.cdiv(tl.maximum(end - inner_end, 0), BLOCK_N)
    return first, inner, inner_end, end, before, borders


@triton.jit
def border_start(i, first, inner_end, before, STEP: tl.constexpr):
    """Where border tile i starts."""
    return tl.where(i < before, first + i * STEP, inner_end + (i - before) * STEP)
