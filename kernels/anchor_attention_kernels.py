"""The Triton kernels behind `anchor_attention`: one forward, three backward.

The grid depends on shapes alone, and starts the longest loops of a row first. Every loop over tiles comes twice: over
the inner tiles, which the mask leaves whole and which are computed without it, and over those of the border. Invalid
blocks do not make a tile a border: their queries are loaded as zero and weigh real keys, so their outputs are set to
zero at the end; with zero for dout, so are their gradients.

Every output element is written by exactly one program, in a fixed order and without atomics: two runs give equal bits.
Masked keys, values, queries and gradients are loaded as zero, so whatever the pads hold stays out of every product.
Scores and log-sum-exp are kept in base 2. Shapes (contiguous): q, out, dq [R, A, K, H, C]; context [R, S, G, C];
block [R, A, K, G, C]; lse, delta [R, G, A * K, H // G]; anchors [R, A].
"""

import triton
import triton.language as tl

from draftgraph.kernels.anchor_attention_mask import (
    border_start,
    context_range,
    load_anchors,
    reach,
    sees_block,
    sees_context,
    tile_tokens,
)

# exp(x) = exp2(x * LOG2E)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(queries, keys, values, visible, peak, total, acc, scale):
    """One step of the running softmax over a tile of keys. All of them are visible where `visible` is None."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * (scale * LOG2E))
    weights = tl.exp2(scores * (scale * LOG2E) - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def anchor_forward_kernel(
    q, context_k, context_v, block_k, block_v, positions, valid, out, lse, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    RULE: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query tile. The draft block comes first: it gives every row a finite maximum.

    NOTE: a name assigned before a loop and inside it must keep its shape, so the block's part has names of its own.
    """
    row = tl.program_id(2).to(tl.int64)
    first_head = tl.program_id(0) * FOLD
    kv_head = first_head // (H // G)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    first_anchor = tile * (BLOCK_M // (FOLD * DRAFT_BLOCK))
    positions += row * A
    valid += row * A
    member, token, slot, index, inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, FOLD, BLOCK_M)
    anchor = load_anchors(positions, valid, index, inside)
    alive = (anchor >= 0)[:, None]
    _, own_token, own_slot, own_index, own_inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, 1, BLOCK_M // FOLD)
    own_alive = (load_anchors(positions, valid, own_index, own_inside) >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    # Offsets within a row fit 32 bits, those of rows may not.
    query_offset = row * A * DRAFT_BLOCK * H * C + ((token * H + first_head + member) * C)[:, None] + c
    statistic = (row * G + kv_head) * A * DRAFT_BLOCK * (H // G) + token * (H // G) + first_head % (H // G) + member
    block_offset = row * A * DRAFT_BLOCK * G * C + (own_token[:, None] * G + kv_head) * C + c
    context_offset = row * S * G * C + kv_head * C + c

    queries = tl.load(q + query_offset, mask=alive, other=0.0)
    own_keys = tl.load(block_k + block_offset, mask=own_alive, other=0.0)
    own_values = tl.load(block_v + block_offset, mask=own_alive, other=0.0)
    own_visible = sees_block(index[:, None], slot[:, None], own_index[None, :], own_slot[None, :], WINDOW, RULE)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, C], tl.float32)
    peak, total, acc = attend(queries, own_keys, own_values, own_visible, peak, total, acc, scale)

    first, inner, inner_end, end, before, borders = context_range(anchor, S, DRAFT_BLOCK, WINDOW, RULE, BLOCK_N)
    for start in range(inner, inner_end, BLOCK_N):
        kv = start + tl.arange(0, BLOCK_N)
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C))
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C))
        peak, total, acc = attend(queries, keys, values, None, peak, total, acc, scale)
    for i in range(0, borders):
        kv = border_start(i, first, inner_end, before, BLOCK_N) + tl.arange(0, BLOCK_N)
        loaded = (kv < end)[:, None]
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        visible = sees_context(anchor[:, None], slot[:, None], kv[None, :], WINDOW, RULE)
        peak, total, acc = attend(queries, keys, values, visible, peak, total, acc, scale)

    outputs = tl.where(alive, acc / total[:, None], 0.0)
    tl.store(out + query_offset, outputs.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + statistic, peak + tl.log2(total), mask=inside)


@triton.jit
def softmax_gradient(left, right, left_grad, right_grad, lse, delta, visible, scale):
    """Weights and gradient of the scaled scores left @ right.T, either way round. All visible where `visible` is None.

    Queries on the left: (q, k, dout, v). Keys on the left: (k, q, v, dout), which gives both transposed.
    """
    scores = tl.dot(left, tl.trans(right), input_precision="ieee")
    weights = tl.exp2(scores * (scale * LOG2E) - lse)
    if visible is not None:
        weights = tl.where(visible, weights, 0.0)
    weights_grad = tl.dot(left_grad, tl.trans(right_grad), input_precision="ieee")
    return weights, weights * (weights_grad - delta)


@triton.jit
def anchor_query_gradient_kernel(
    q, context_k, context_v, block_k, block_v, positions, valid, out, lse, dout, delta, dq, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    RULE: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one query tile, and delta = sum(out * dout), which the other two kernels read."""
    row = tl.program_id(2).to(tl.int64)
    first_head = tl.program_id(0) * FOLD
    kv_head = first_head // (H // G)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    first_anchor = tile * (BLOCK_M // (FOLD * DRAFT_BLOCK))
    positions += row * A
    valid += row * A
    member, token, slot, index, inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, FOLD, BLOCK_M)
    anchor = load_anchors(positions, valid, index, inside)
    alive = (anchor >= 0)[:, None]
    _, own_token, own_slot, own_index, own_inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, 1, BLOCK_M // FOLD)
    own_alive = (load_anchors(positions, valid, own_index, own_inside) >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    query_offset = row * A * DRAFT_BLOCK * H * C + ((token * H + first_head + member) * C)[:, None] + c
    statistic = (row * G + kv_head) * A * DRAFT_BLOCK * (H // G) + token * (H // G) + first_head % (H // G) + member
    block_offset = row * A * DRAFT_BLOCK * G * C + (own_token[:, None] * G + kv_head) * C + c
    context_offset = row * S * G * C + kv_head * C + c

    queries = tl.load(q + query_offset, mask=alive, other=0.0)
    out_grad = tl.load(dout + query_offset, mask=alive, other=0.0)
    outputs = tl.load(out + query_offset, mask=alive, other=0.0)
    row_delta = tl.sum(outputs.to(tl.float32) * out_grad.to(tl.float32), 1)
    tl.store(delta + statistic, row_delta, mask=inside)
    row_lse = tl.load(lse + statistic, mask=inside, other=0.0)[:, None]
    row_delta = row_delta[:, None]

    own_keys = tl.load(block_k + block_offset, mask=own_alive, other=0.0)
    own_values = tl.load(block_v + block_offset, mask=own_alive, other=0.0)
    own_visible = sees_block(index[:, None], slot[:, None], own_index[None, :], own_slot[None, :], WINDOW, RULE)
    _, own_grad = softmax_gradient(queries, own_keys, out_grad, own_values, row_lse, row_delta, own_visible, scale)
    acc = tl.dot(own_grad.to(own_keys.dtype), own_keys, input_precision="ieee")

    first, inner, inner_end, end, before, borders = context_range(anchor, S, DRAFT_BLOCK, WINDOW, RULE, BLOCK_N)
    for start in range(inner, inner_end, BLOCK_N):
        kv = start + tl.arange(0, BLOCK_N)
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C))
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C))
        _w, score_grad = softmax_gradient(queries, keys, out_grad, values, row_lse, row_delta, None, scale)
        acc = tl.dot(score_grad.to(keys.dtype), keys, acc, input_precision="ieee")
    for i in range(0, borders):
        kv = border_start(i, first, inner_end, before, BLOCK_N) + tl.arange(0, BLOCK_N)
        loaded = (kv < end)[:, None]
        keys = tl.load(context_k + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        values = tl.load(context_v + context_offset + kv[:, None] * (G * C), mask=loaded, other=0.0)
        visible = sees_context(anchor[:, None], slot[:, None], kv[None, :], WINDOW, RULE)
        _w, score_grad = softmax_gradient(queries, keys, out_grad, values, row_lse, row_delta, visible, scale)
        acc = tl.dot(score_grad.to(keys.dtype), keys, acc, input_precision="ieee")

    tl.store(dq + query_offset, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None])


@triton.jit
def key_gradient(
    q, lse, dout, delta, token, head, loaded, keys, values, visible, acc_k, acc_v, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add what a tile of queries gives to the gradients of a tile of keys and values. Queries not loaded give zero.

    q, dout start at the row and kv head, lse and delta too; `head` counts within the group.
    """
    query_offset = ((token * H + head) * C)[:, None] + tl.arange(0, C)[None, :]
    statistic = token * (H // G) + head
    queries = tl.load(q + query_offset, mask=loaded[:, None], other=0.0)
    out_grad = tl.load(dout + query_offset, mask=loaded[:, None], other=0.0)
    row_lse = tl.load(lse + statistic, mask=loaded, other=0.0)[None, :]
    row_delta = tl.load(delta + statistic, mask=loaded, other=0.0)[None, :]
    weights, score_grad = softmax_gradient(keys, queries, values, out_grad, row_lse, row_delta, visible, scale)
    acc_v = tl.dot(weights.to(out_grad.dtype), out_grad, acc_v, input_precision="ieee")
    acc_k = tl.dot(score_grad.to(queries.dtype), queries, acc_k, input_precision="ieee")
    return acc_k, acc_v


@triton.jit
def anchor_context_gradient_kernel(
    q, context_k, context_v, positions, valid, lse, dout, delta, dk, dv, S, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    RULE: tl.constexpr, FOLD: tl.constexpr, ALL_ANCHORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one context tile of one kv head, from the anchors that can see it and all heads of the group.

    ALL_ANCHORS is A rounded up to a power of two.
    """
    STEP: tl.constexpr = BLOCK_M // (FOLD * DRAFT_BLOCK)
    FOLDS: tl.constexpr = H // G // FOLD
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(0)
    first_kv = tl.program_id(1) * BLOCK_N
    positions += row * A
    valid += row * A
    every = tl.arange(0, ALL_ANCHORS)
    anchors = load_anchors(positions, valid, every, every < A)
    # Anchors ascend: those that see any of this tile are the run [first, end), those that see all of it another.
    first = tl.sum(((anchors >= 0) & (anchors <= first_kv)).to(tl.int32), 0)
    num_partial = tl.sum(((anchors > first_kv) & (anchors < first_kv + BLOCK_N)).to(tl.int32), 0)
    inner = first + tl.cdiv(num_partial, STEP) * STEP
    end = tl.sum((anchors >= 0).to(tl.int32), 0)
    # A last inner tile may be a part: what it does not load gives zero.
    inner_end = tl.maximum(inner, end)
    if WINDOW is not None:
        farthest, nearest = reach(DRAFT_BLOCK, WINDOW, RULE)
        end = tl.sum(((anchors >= 0) & (anchors <= first_kv + BLOCK_N - 1 + farthest)).to(tl.int32), 0)
        all_seen = tl.sum(((anchors >= 0) & (anchors <= first_kv + nearest)).to(tl.int32), 0)
        inner_end = inner + tl.maximum(all_seen - inner, 0) // STEP * STEP
    before = (inner - first) // STEP
    borders = before + tl.cdiv(tl.maximum(end - inner_end, 0), STEP)

    c = tl.arange(0, C)[None, :]
    kv = first_kv + tl.arange(0, BLOCK_N)
    context_offset = row * S * G * C + (kv[:, None] * G + kv_head) * C + c
    loaded = (kv < tl.minimum(tl.max(anchors, 0), S))[:, None]
    keys = tl.load(context_k + context_offset, mask=loaded, other=0.0)
    values = tl.load(context_v + context_offset, mask=loaded, other=0.0)
    acc_k = tl.zeros([BLOCK_N, C], tl.float32)
    acc_v = tl.zeros([BLOCK_N, C], tl.float32)
    q += (row * A * DRAFT_BLOCK * G + kv_head) * (H // G * C)
    dout += (row * A * DRAFT_BLOCK * G + kv_head) * (H // G * C)
    lse += (row * G + kv_head) * A * DRAFT_BLOCK * (H // G)
    delta += (row * G + kv_head) * A * DRAFT_BLOCK * (H // G)

    for i in range(0, tl.cdiv(inner_end - inner, STEP) * FOLDS):
        tile = inner + i // FOLDS * STEP
        member, token, slot, index, inside = tile_tokens(tile, end, DRAFT_BLOCK, FOLD, BLOCK_M)
        head = i % FOLDS * FOLD + member
        acc_k, acc_v = key_gradient(
            q, lse, dout, delta, token, head, inside, keys, values, None, acc_k, acc_v, scale, H, G, C
        )
    for i in range(0, borders * FOLDS):
        tile = border_start(i // FOLDS, first, inner_end, before, STEP)
        member, token, slot, index, inside = tile_tokens(tile, end, DRAFT_BLOCK, FOLD, BLOCK_M)
        head = i % FOLDS * FOLD + member
        anchor = tl.load(positions + index, mask=inside, other=-1)
        visible = sees_context(anchor[None, :], slot[None, :], kv[:, None], WINDOW, RULE)
        acc_k, acc_v = key_gradient(
            q, lse, dout, delta, token, head, inside, keys, values, visible, acc_k, acc_v, scale, H, G, C
        )

    tl.store(dk + context_offset, (acc_k * scale).to(dk.dtype.element_ty), mask=(kv < S)[:, None])
    tl.store(dv + context_offset, acc_v.to(dv.dtype.element_ty), mask=(kv < S)[:, None])


@triton.jit
def anchor_block_gradient_kernel(
    q, block_k, block_v, positions, valid, lse, dout, delta, dk, dv, A, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DRAFT_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    RULE: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk and dv of the draft blocks of one tile and one kv head, summed over the heads of the group."""
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(0)
    first_anchor = tl.program_id(1) * (BLOCK_M // (FOLD * DRAFT_BLOCK))
    positions += row * A
    valid += row * A
    member, token, slot, index, inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, FOLD, BLOCK_M)
    alive = load_anchors(positions, valid, index, inside) >= 0
    _, own_token, own_slot, own_index, own_inside = tile_tokens(first_anchor, A, DRAFT_BLOCK, 1, BLOCK_M // FOLD)
    own_alive = (load_anchors(positions, valid, own_index, own_inside) >= 0)[:, None]
    c = tl.arange(0, C)[None, :]
    block_offset = row * A * DRAFT_BLOCK * G * C + (own_token[:, None] * G + kv_head) * C + c
    keys = tl.load(block_k + block_offset, mask=own_alive, other=0.0)
    values = tl.load(block_v + block_offset, mask=own_alive, other=0.0)
    visible = sees_block(index[None, :], slot[None, :], own_index[:, None], own_slot[:, None], WINDOW, RULE)
    acc_k = tl.zeros([BLOCK_M // FOLD, C], tl.float32)
    acc_v = tl.zeros([BLOCK_M // FOLD, C], tl.float32)
    q += (row * A * DRAFT_BLOCK * G + kv_head) * (H // G * C)
    dout += (row * A * DRAFT_BLOCK * G + kv_head) * (H // G * C)
    lse += (row * G + kv_head) * A * DRAFT_BLOCK * (H // G)
    delta += (row * G + kv_head) * A * DRAFT_BLOCK * (H // G)

    for head in range(0, H // G, FOLD):
        acc_k, acc_v = key_gradient(
            q, lse, dout, delta, token, head + member, alive, keys, values, visible, acc_k, acc_v, scale, H, G, C
        )

    tl.store(dk + block_offset, (acc_k * scale).to(dk.dtype.element_ty), mask=own_inside[:, None])
    tl.store(dv + block_offset, acc_v.to(dv.dtype.element_ty), mask=own_inside[:, None])
