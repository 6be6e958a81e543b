"""Softmax cross-entropy over rows of logits: statistics, and the gradient in place of the logits, in one kernel or two;
and the divergence from another row's distribution, likewise.

Promises: float32 arithmetic whatever the logits' dtype, the same bits on every run, no wait for the device, no memory
besides the results. Does not: make logits, or decide weights. Weights that depend on the statistics of a whole block
need the two kernels; all others take `cross_entropy_gradient_`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# One row per program, two programs per SM: while one waits for memory, for its threads to meet or for the special
# function unit, the other computes. The 16 columns of a thread share the instructions of the loop itself.
BLOCK_N = 8192
NUM_WARPS = 16
# By element size: tiles of a row on their way, and one that is computed, within half of sm_120's shared memory.
STAGES = {2: 4, 4: 2}
# Columns that share a maximum and a sum: the 16 bytes that a thread loads at once.
GROUP = tl.constexpr(8)
GRADIENT_BLOCK_N = 4096
GRADIENT_NUM_WARPS = 8
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x, shift):
    """exp(x) * 2^shift, in one fused multiply-add and one exponential.

    Triton's own exp takes three instructions more, for results below 1e-38, which count for nothing here.
    NOTE: exp(x, -LOG2_E * x) is near 1, not 1, and inf for a huge x: of the two products one is rounded.
    """
    return tl.exp2(x * LOG2_E + shift)


@triton.jit
def add_tile(x, start, top, total, tile):
    """Take the logits x [groups, GROUP] of the tile at `start` into the groups' maxima and sums."""
    x = x.to(tl.float32)
    tile_top = tl.max(x, axis=1)
    # Strictly larger: of equal logits the first stays.
    larger = tile_top > top
    new_top = tl.where(larger, tile_top, top)
    shift = -LOG2_E * new_top
    # Of the difference, so that a total whose maximum stays keeps its bits, tile after tile.
    total = total * tl.exp2((top - new_top) * LOG2_E) + tl.sum(exp(x, shift[:, None]), axis=1)
    return new_top, total, tl.where(larger, start, tile)


@triton.jit
def tile_columns(BLOCK_N: tl.constexpr):
    """Columns [groups, GROUP] of a tile, from 0."""
    return GROUP * tl.arange(0, BLOCK_N // GROUP)[:, None] + tl.arange(0, GROUP)[None, :]


@triton.jit
def row_statistics(base, V, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """Log of the sum of exponentials, and argmax, of the V logits at `base`; and the logits of the last, partial tile.

    A group of columns of each tile keeps its maximum, the tile it came from and the sum below it: groups meet once,
    after the last tile, and the winning one is read again to find the column.
    """
    first = GROUP * tl.arange(0, BLOCK_N // GROUP)
    columns = tile_columns(BLOCK_N)
    # Finite, so that a pad's -inf minus it is no NaN.
    top = tl.full((BLOCK_N // GROUP,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_N // GROUP,), tl.float32)
    tile = tl.zeros((BLOCK_N // GROUP,), tl.int32)
    whole = V // BLOCK_N * BLOCK_N
    # On its way while the whole tiles are computed.
    last = tl.load(base + whole + columns, mask=whole + columns < V, other=-float("inf"))
    for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        top, total, tile = add_tile(tl.load(base + start + columns), start, top, total, tile)
    top, total, tile = add_tile(last, whole, top, total, tile)
    row_top = tl.max(top, axis=0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2_E), axis=0)
    candidates = tl.min(tl.where(top == row_top, tile + first, V), axis=0) + tl.arange(0, GROUP)
    x = tl.load(base + candidates, mask=candidates < V, other=-float("inf")).to(tl.float32)
    winner = tl.min(tl.where(x == row_top, candidates, V), axis=0)
    return row_top + tl.log(row_total), winner.to(tl.int64), last


@triton.jit
def softmax_statistics_kernel(
    logits, labels, cross_entropy, log_sum, best, V, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * V
    chosen = tl.load(base + tl.load(labels + row)).to(tl.float32)
    log_total, winner, _last = row_statistics(base, V, BLOCK_N, STAGES)
    tl.store(cross_entropy + row, log_total - chosen)
    tl.store(log_sum + row, log_total)
    tl.store(best + row, winner)


@triton.jit
def softmax_gradient_kernel(logits, labels, log_sum, weights, V, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < V
    address = logits + row * V + columns
    weight, label, log_total = tl.load(weights + row), tl.load(labels + row), tl.load(log_sum + row)
    if weight == 0.0:
        # Zero whatever its logits hold.
        tl.store(address, tl.zeros((BLOCK_N,), logits.dtype.element_ty), mask=inside)
    else:
        # To the bits of `cross_entropy_gradient_kernel`.
        x = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        shift = tl.log2(weight) - LOG2_E * log_total
        gradient = exp(x, shift) - tl.where(columns == label, weight, 0.0)
        tl.store(address, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_gradient_kernel(
    logits, labels, weights, cross_entropy, best, V, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * V
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    # Before the row is overwritten.
    chosen = tl.load(base + label).to(tl.float32)
    log_total, winner, last = row_statistics(base, V, BLOCK_N, STAGES)
    tl.store(cross_entropy + row, log_total - chosen)
    tl.store(best + row, winner)
    # The search for the column reads the row once more, in every warp; none may overwrite it before.
    tl.debug_barrier()
    whole = V // BLOCK_N
    columns = tile_columns(BLOCK_N)
    inside = whole * BLOCK_N + columns < V
    if weight == 0.0:
        zeros = tl.zeros((BLOCK_N // GROUP, GROUP), logits.dtype.element_ty)
        for tile in tl.range(0, whole):
            tl.store(base + tile * BLOCK_N + columns, zeros)
        tl.store(base + whole * BLOCK_N + columns, zeros, mask=inside)
    else:
        # The weight is a part of the exponent: one multiplication less for each logit.
        shift = tl.log2(weight) - LOG2_E * log_total
        gradient = exp(last.to(tl.float32), shift)
        tl.store(base + whole * BLOCK_N + columns, gradient.to(logits.dtype.element_ty), mask=inside)
        # Backwards: the end of the row was read last and is the likeliest to be in the L2 cache still. What is done
        # leaves it first, to keep what other programs have yet to read again.
        for tile in tl.range(0, whole, num_stages=STAGES):
            address = base + (whole - 1 - tile) * BLOCK_N + columns
            gradient = exp(tl.load(address, eviction_policy="evict_first").to(tl.float32), shift)
            tl.store(address, gradient.to(logits.dtype.element_ty), eviction_policy="evict_first")
        # The label's own, after the threads that wrote its probability.
        tl.debug_barrier()
        tl.store(base + label, (exp(chosen, shift) - weight).to(logits.dtype.element_ty))


@triton.jit
def divergence_gradient_kernel(
    logits, others, weights, divergence, best, other_best, V, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    GRADIENT_BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base, other = logits + row * V, others + row * V
    weight = tl.load(weights + row)
    log_total, winner, _last = row_statistics(base, V, BLOCK_N, STAGES)
    other_total, other_winner, _last = row_statistics(other, V, BLOCK_N, STAGES)
    tl.store(best + row, winner)
    tl.store(other_best + row, other_winner)
    # The search for the column reads the row once more, in every warp; none may overwrite it before.
    tl.debug_barrier()
    # Logarithms of both to the base 2: one fused multiply-add each.
    shift, other_shift = -LOG2_E * log_total, -LOG2_E * other_total
    total = tl.zeros((GRADIENT_BLOCK_N,), tl.float32)
    for start in tl.range(0, V, GRADIENT_BLOCK_N):
        columns = start + tl.arange(0, GRADIENT_BLOCK_N)
        inside = columns < V
        q = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32) * LOG2_E + shift
        p = tl.load(other + columns, mask=inside, other=0.0).to(tl.float32) * LOG2_E + other_shift
        share = tl.exp2(p)
        total += tl.where(inside, share * (p - q), 0.0)
        # A weightless row is zero whatever its logits hold.
        gradient = tl.where(weight == 0.0, 0.0, weight * (tl.exp2(q) - share))
        tl.store(base + columns, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(divergence + row, tl.sum(total, 0) / LOG2_E)


def softmax_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, log of the sum of exponentials, and argmax of every row.

    Args:
        logits: [M, V] contiguous, float32 or bfloat16.
        labels: [M] int64, each in 0..V-1.
    Returns:
        cross_entropy [M] float32; log_sum [M] float32; best [M] int64, the first of equal logits.
    Error: 1e-6 of the largest logit against float32. Cost: reads the logits once.
    """
    M, V = logits.shape
    cross_entropy, log_sum = logits.new_empty(2, M, dtype=torch.float32)
    best = torch.empty_like(labels)
    softmax_statistics_kernel[(M,)](
        logits,
        labels,
        cross_entropy,
        log_sum,
        best,
        V,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES[logits.element_size()],
        num_warps=NUM_WARPS,
    )
    return cross_entropy, log_sum, best


def softmax_gradient_(logits: Tensor, labels: Tensor, log_sum: Tensor, weights: Tensor) -> None:
    """Overwrite the logits with the gradient of sum(weights * cross_entropy).

    Args:
        logits: [M, V] contiguous; labels [M] int64; log_sum [M] float32, of `softmax_statistics`.
        weights: [M] float32, not negative; a row of weight 0 becomes exactly zero.
    Cost: reads and writes the logits once.
    """
    M, V = logits.shape
    grid = (M, triton.cdiv(V, GRADIENT_BLOCK_N))
    softmax_gradient_kernel[grid](
        logits, labels, log_sum, weights, V, BLOCK_N=GRADIENT_BLOCK_N, num_warps=GRADIENT_NUM_WARPS
    )


def cross_entropy_gradient_(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax_statistics` and `softmax_gradient_` in one kernel, for weights known before.

    Args: as theirs.
    Returns:
        cross_entropy [M] float32; best [M] int64, the first of equal logits. The logits hold their gradient.
    Cost: reads the logits once from memory and once more from the L2 cache as far as it holds them, writes them once;
        the second read is left out for rows of weight 0.
    """
    M, V = logits.shape
    cross_entropy = logits.new_empty(M, dtype=torch.float32)
    best = torch.empty_like(labels)
    cross_entropy_gradient_kernel[(M,)](
        logits,
        labels,
        weights,
        cross_entropy,
        best,
        V,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES[logits.element_size()],
        num_warps=NUM_WARPS,
    )
    return cross_entropy, best


def divergence_gradient_(logits: Tensor, others: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence KL(softmax(others) || softmax(logits)) of every row, and its weighted gradient in place of the logits.

    Args:
        logits, others: [M, V] contiguous, of one dtype, float32 or bfloat16; `others` is left as it is.
        weights: [M] float32; a row of weight 0 becomes exactly zero.
    Returns:
        divergence [M] float32; best [M] and other_best [M] int64, the first of equal logits of each.
    Cost: reads both once from memory and once more from the L2 cache as far as it holds them, writes one.
    """
    M, V = logits.shape
    divergence = logits.new_empty(M, dtype=torch.float32)
    best, other_best = torch.empty(2, M, dtype=torch.int64, device=logits.device)
    divergence_gradient_kernel[(M,)](
        logits,
        others,
        weights,
        divergence,
        best,
        other_best,
        V,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES[logits.element_size()],
        GRADIENT_BLOCK_N=GRADIENT_BLOCK_N,
        num_warps=NUM_WARPS,
    )
    return divergence, best, other_best
