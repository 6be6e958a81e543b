"""The Triton kernels behind `anchor_attention`: one forward, three backward.

A tile of queries is a run of whole draft blocks of one row: BLOCK_M // DRAFT_BLOCK of them, one after the other, the
last rows of the tile idle where DRAFT_BLOCK does not divide BLOCK_M. Anchors ascend, so a tile's context ends at its
last anchor. All loop bounds are read on the device; the grid depends on shapes alone.

Every output element is written by exactly one program, in a fixed order and without atomics: two runs give equal bits.
Masked keys, values, queries and gradients are loaded as zero, so whatever the pads hold stays out of every product.
Scores and log-sum-exp are kept in base 2. Shapes (contiguous): q, out, dq [R, A, K, H, C]; context [R, S, G, C];
block [R, A, K, G, C]; lse, delta [R, H, A * K]; anchors [R, A].
"""

import triton
import triton.language as tl

# exp(x) = exp2(x * LOG2E)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_anchors(positions, valid, index, A):
    """Anchor positions by index, -1 where the anchor is invalid or out of range."""
    inside = index < A
    is_valid = tl.load(valid + index, mask=inside, other=0) != 0
    return tl.where(is_valid, tl.load(positions + index, mask=inside, other=0), -1)


@triton.jit
def tile_tokens(positions, valid, first, end, DRAFT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Draft tokens of the tile that starts at anchor `first`: token, block within the tile, slot, anchor, inside."""
    m = tl.arange(0, BLOCK_M)
    block = m // DRAFT_BLOCK
    slot = m % DRAFT_BLOCK
    index = first + block
    inside = (block < BLOCK_M // DRAFT_BLOCK) & (index < end)
    anchor = tl.where(inside, load_anchors(positions, valid, index, end), -1)
    return index * DRAFT_BLOCK + slot, block, slot, anchor, inside


@triton.jit
def context_range(anchor, S, WINDOW: tl.constexpr):
    """First and end position of the context that any token of a tile may see; empty without a valid anchor."""
    end = tl.minimum(tl.max(anchor, 0), S)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(tl.min(tl.where(anchor >= 0, anchor, S), 0) - (WINDOW - 1), 0)
    return first, end


@triton.jit
def sees_context(anchor, slot, kv, WINDOW: tl.constexpr):
    """Mask of the context part; the three arguments broadcast."""
    visible = kv < anchor
    if WINDOW is not None:
        visible = visible & (kv >= anchor + slot - (WINDOW - 1))
    return visible


@triton.jit
def sees_block(query_block, query_slot, key_block, key_slot, WINDOW: tl.constexpr):
    """Mask of the draft-block part. A token always sees itself, so no softmax is empty, not even an invalid block's."""
    visible = query_block == key_block
    if WINDOW is not None:
        visible = visible & (key_slot <= query_slot)
    return visible


@triton.jit
def anchor_forward_kernel(
    q, context_k, context_v, block_k, block_v, positions, valid, out, lse, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query tile of one head. The draft block comes first: it gives every row a finite maximum.

    NOTE: a name assigned before a loop and inside it must keep its shape, so the block's part has names of its own.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (H // G)
    positions += row * A
    valid += row * A
    token, block, slot, anchor, inside = tile_tokens(
        positions, valid, tl.program_id(0) * (BLOCK_M // DRAFT_BLOCK), A, DRAFT_BLOCK, BLOCK_M
    )
    alive = (anchor >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    # Offsets within a row fit 32 bits, those of rows may not.
    query_offset = row * A * DRAFT_BLOCK * H * C + (token[:, None] * H + head) * C + c
    block_offset = row * A * DRAFT_BLOCK * G * C + (token[:, None] * G + kv_head) * C + c
    context_offset = row * S * G * C + kv_head * C + c

    queries = tl.load(q + query_offset, mask=alive, other=0.0)
    own_keys = tl.load(block_k + block_offset, mask=alive, other=0.0)
    own_values = tl.load(block_v + block_offset, mask=alive, other=0.0)
    own_scores = tl.dot(queries, tl.trans(own_keys), input_precision="ieee") * (scale * LOG2E)
    own_visible = sees_block(block[:, None], slot[:, None], block[None, :], slot[None, :], WINDOW)
    own_scores = tl.where(own_visible, own_scores, float("-inf"))
    peak = tl.max(own_scores, 1)
    own_weights = tl.exp2(own_scores - peak[:, None])
    total = tl.sum(own_weights, 1)
    acc = tl.dot(own_weights.to(own_values.dtype), own_values, input_precision="ieee")

    first, end = context_range(anchor, S, WINDOW)
    for start in range(first, end, BLOCK_N):
        kv = start + tl.arange(0, BLOCK_N)
        loaded = (kv < end)[:, None]
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        visible = sees_context(anchor[:, None], slot[:, None], kv[None, :], WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        peak = new_peak

    tl.store(out + query_offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + (row * H + head) * A * DRAFT_BLOCK + token, peak + tl.log2(total), mask=inside)


@triton.jit
def softmax_gradient(left, right, left_grad, right_grad, lse, delta, visible, scale):
    """Weights and gradient of the scaled scores left @ right.T, either way round.

    Queries on the left: (q, k, dout, v). Keys on the left: (k, q, v, dout), which gives both transposed.
    """
    scores = tl.dot(left, tl.trans(right), input_precision="ieee") * (scale * LOG2E)
    weights = tl.where(visible, tl.exp2(scores - lse), 0.0)
    weights_grad = tl.dot(left_grad, tl.trans(right_grad), input_precision="ieee")
    return weights, weights * (weights_grad - delta)


@triton.jit
def anchor_query_gradient_kernel(
    q, context_k, context_v, block_k, block_v, positions, valid, out, lse, dout, delta, dq, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head, and delta = sum(out * dout), which the other two kernels read."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (H // G)
    positions += row * A
    valid += row * A
    token, block, slot, anchor, inside = tile_tokens(
        positions, valid, tl.program_id(0) * (BLOCK_M // DRAFT_BLOCK), A, DRAFT_BLOCK, BLOCK_M
    )
    alive = (anchor >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    query_offset = row * A * DRAFT_BLOCK * H * C + (token[:, None] * H + head) * C + c
    block_offset = row * A * DRAFT_BLOCK * G * C + (token[:, None] * G + kv_head) * C + c
    context_offset = row * S * G * C + kv_head * C + c
    row_offset = (row * H + head) * A * DRAFT_BLOCK + token

    queries = tl.load(q + query_offset, mask=alive, other=0.0)
    out_grad = tl.load(dout + query_offset, mask=alive, other=0.0)
    outputs = tl.load(out + query_offset, mask=alive, other=0.0)
    row_delta = tl.sum(outputs.to(tl.float32) * out_grad.to(tl.float32), 1)
    tl.store(delta + row_offset, row_delta, mask=inside)
    row_lse = tl.load(lse + row_offset, mask=inside, other=0.0)[:, None]
    row_delta = row_delta[:, None]

    own_keys = tl.load(block_k + block_offset, mask=alive, other=0.0)
    own_values = tl.load(block_v + block_offset, mask=alive, other=0.0)
    own_visible = sees_block(block[:, None], slot[:, None], block[None, :], slot[None, :], WINDOW)
    _, own_score_grad = softmax_gradient(
        queries, own_keys, out_grad, own_values, row_lse, row_delta, own_visible, scale
    )
    acc = tl.dot(own_score_grad.to(own_keys.dtype), own_keys, input_precision="ieee")

    first, end = context_range(anchor, S, WINDOW)
    for start in range(first, end, BLOCK_N):
        kv = start + tl.arange(0, BLOCK_N)
        loaded = (kv < end)[:, None]
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        visible = sees_context(anchor[:, None], slot[:, None], kv[None, :], WINDOW)
        _weights, score_grad = softmax_gradient(queries, keys, out_grad, values, row_lse, row_delta, visible, scale)
        acc = tl.dot(score_grad.to(keys.dtype), keys, acc, input_precision="ieee")

    tl.store(dq + query_offset, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None])


@triton.jit
def anchor_context_gradient_kernel(
    q, context_k, context_v, positions, valid, lse, dout, delta, dk, dv, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    ALL_ANCHORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one context tile of one kv head, from the anchors that can see it and all heads of the group.

    ALL_ANCHORS is A rounded up to a power of two.
    """
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    first_kv = tl.program_id(0) * BLOCK_N
    positions += row * A
    valid += row * A
    anchors = load_anchors(positions, valid, tl.arange(0, ALL_ANCHORS), A)
    # Anchors ascend: those that see any of this tile are the run [first_anchor, end_anchor).
    first_anchor = tl.sum(((anchors >= 0) & (anchors <= first_kv)).to(tl.int32), 0)
    last_seen = S
    if WINDOW is not None:
        last_seen = first_kv + BLOCK_N - 1 + (WINDOW - 1)
    end_anchor = tl.sum(((anchors >= 0) & (anchors <= last_seen)).to(tl.int32), 0)

    c = tl.arange(0, C)[None, :]
    kv = first_kv + tl.arange(0, BLOCK_N)
    context_offset = row * S * G * C + (kv[:, None] * G + kv_head) * C + c
    loaded = (kv < tl.minimum(tl.max(anchors, 0), S))[:, None]
    keys = tl.load(context_k + context_offset, mask=loaded, other=0.0)
    values = tl.load(context_v + context_offset, mask=loaded, other=0.0)
    acc_k = tl.zeros([BLOCK_N, C], tl.float32)
    acc_v = tl.zeros([BLOCK_N, C], tl.float32)

    for member in range(H // G):
        head = kv_head * (H // G) + member
        for first in range(first_anchor, end_anchor, BLOCK_M // DRAFT_BLOCK):
            token, _, slot, anchor, inside = tile_tokens(positions, valid, first, end_anchor, DRAFT_BLOCK, BLOCK_M)
            query_offset = row * A * DRAFT_BLOCK * H * C + (token[:, None] * H + head) * C + c
            row_offset = (row * H + head) * A * DRAFT_BLOCK + token
            queries = tl.load(q + query_offset, mask=inside[:, None], other=0.0)
            out_grad = tl.load(dout + query_offset, mask=inside[:, None], other=0.0)
            row_lse = tl.load(lse + row_offset, mask=inside, other=0.0)[None, :]
            row_delta = tl.load(delta + row_offset, mask=inside, other=0.0)[None, :]
            visible = sees_context(anchor[None, :], slot[None, :], kv[:, None], WINDOW)
            weights, score_grad = softmax_gradient(keys, queries, values, out_grad, row_lse, row_delta, visible, scale)
            acc_v = tl.dot(weights.to(out_grad.dtype), out_grad, acc_v, input_precision="ieee")
            acc_k = tl.dot(score_grad.to(queries.dtype), queries, acc_k, input_precision="ieee")

    tl.store(dk + context_offset, (acc_k * scale).to(dk.dtype.element_ty), mask=(kv < S)[:, None])
    tl.store(dv + context_offset, acc_v.to(dv.dtype.element_ty), mask=(kv < S)[:, None])


@triton.jit
def anchor_block_gradient_kernel(
    q, block_k, block_v, positions, valid, lse, dout, delta, dk, dv, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk and dv of the draft blocks of one tile and one kv head, summed over the heads of the group."""
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    positions += row * A
    valid += row * A
    token, block, slot, anchor, inside = tile_tokens(
        positions, valid, tl.program_id(0) * (BLOCK_M // DRAFT_BLOCK), A, DRAFT_BLOCK, BLOCK_M
    )
    alive = (anchor >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    block_offset = row * A * DRAFT_BLOCK * G * C + (token[:, None] * G + kv_head) * C + c
    keys = tl.load(block_k + block_offset, mask=alive, other=0.0)
    values = tl.load(block_v + block_offset, mask=alive, other=0.0)
    visible = sees_block(block[None, :], slot[None, :], block[:, None], slot[:, None], WINDOW)
    acc_k = tl.zeros([BLOCK_M, C], tl.float32)
    acc_v = tl.zeros([BLOCK_M, C], tl.float32)

    for member in range(H // G):
        head = kv_head * (H // G) + member
        query_offset = row * A * DRAFT_BLOCK * H * C + (token[:, None] * H + head) * C + c
        row_offset = (row * H + head) * A * DRAFT_BLOCK + token
        queries = tl.load(q + query_offset, mask=alive, other=0.0)
        out_grad = tl.load(dout + query_offset, mask=alive, other=0.0)
        row_lse = tl.load(lse + row_offset, mask=inside, other=0.0)[None, :]
        row_delta = tl.load(delta + row_offset, mask=inside, other=0.0)[None, :]
        weights, score_grad = softmax_gradient(keys, queries, values, out_grad, row_lse, row_delta, visible, scale)
        acc_v = tl.dot(weights.to(out_grad.dtype), out_grad, acc_v, input_precision="ieee")
        acc_k = tl.dot(score_grad.to(queries.dtype), queries, acc_k, input_precision="ieee")

    tl.store(dk + block_offset, (acc_k * scale).to(dk.dtype.element_ty), mask=inside[:, None])
    tl.store(dv + block_offset, acc_v.to(dv.dtype.element_ty), mask=inside[:, None])
