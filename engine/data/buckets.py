"""Buckets: the few padded shapes (rows R, context S, anchors A) that every row of a run fits into.

Promises: every row gets a bucket, whole; the edges minimise the predicted FLOPs of the padded rows for a given number
of buckets.
Does not: know what a row costs; `row_flops(context, anchors)` is given, and works on arrays that broadcast.

How: the joint histogram of length and anchors on a grid of candidate edges. Exact dynamic programming splits one axis
into intervals and each interval along the other axis, sharing the buckets out among them, for both orders of the axes.
That is the optimum where anchors grow with length. Where they do not, better tables exist that are no splits of splits:
edges then move one by one while that helps. Each row goes to the cheapest bucket that holds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftgraph.engine.errors import DataError

RowFlops = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Candidate edges per axis; time grows with the cube. Exact for 4096 tokens in steps of 64 and 512 anchors in eights.
MAX_EDGES = 64
ANCHOR_MULTIPLE = 8


@dataclass(frozen=True, order=True)
class Bucket:
    """One shape, one graph: R rows of S context tokens with A anchors each."""

    rows: int
    context: int
    anchors: int

    @property
    def name(self) -> str:
        return f"r{self.rows}-s{self.context}-a{self.anchors}"


def choose_buckets(
    lengths: np.ndarray,
    anchors: np.ndarray,
    *,
    count: int,
    context_tokens: int,
    draft_tokens: int,
    block_size: int,
    row_flops: RowFlops,
    context_multiple: int,
) -> list[Bucket]:
    """Choose at most `count` buckets for the rows of a data set.

    Args:
        lengths: [rows] int, tokens.
        anchors: [rows] int, how many anchors each row draws (at most the profile's).
        count: the most buckets.
        context_tokens: budget, R * S at most (a single row may exceed it).
        draft_tokens: budget, R * A * K at most (a single row may exceed it).
        block_size: K, tokens.
        row_flops: predicted FLOPs of one row padded to (context, anchors).
        context_multiple: S is a multiple of it.
    Returns:
        Buckets by context, then anchors, ascending; R as large as both budgets allow, then evened out.
    """
    if not len(lengths):
        raise DataError("no rows to choose buckets for")
    contexts = -(-np.asarray(lengths) // context_multiple) * context_multiple
    most_anchors = max(1, int(np.max(anchors)))
    slots = np.clip(-(-np.asarray(anchors) // ANCHOR_MULTIPLE) * ANCHOR_MULTIPLE, 1, most_anchors)
    keys, weights = np.unique(contexts.astype(np.int64) << 32 | slots, return_counts=True)
    shapes = np.stack([keys >> 32, keys & 0xFFFFFFFF], axis=1)

    splits = [
        _split(shapes, weights, count, row_flops),
        _split(shapes[:, ::-1], weights, count, lambda slot, context: row_flops(context, slot))[:, ::-1],
    ]
    tables = [_polish(split, shapes, weights, row_flops) for split in splits]
    edges = min(tables, key=lambda table: float(weights @ _cheapest(shapes, table, row_flops)[1]))
    filled = np.bincount(_cheapest(shapes, edges, row_flops)[0], weights, minlength=len(edges))
    buckets = []
    # An edge pair whose rows found a cheaper one, once that had shrunk to its own rows, is no bucket.
    for (context, slot), in_bucket in zip(edges[filled > 0].tolist(), filled[filled > 0].tolist(), strict=True):
        fitting = max(1, min(context_tokens // context, draft_tokens // (slot * block_size)))
        buckets.append(Bucket(_even_rows(fitting, int(in_bucket)), context, slot))
    return sorted(buckets, key=lambda bucket: (bucket.context, bucket.anchors))


def assign(lengths: np.ndarray, anchors: np.ndarray, buckets: Sequence[Bucket], row_flops: RowFlops) -> np.ndarray:
    """Give each row the cheapest bucket that holds it.

    Returns:
        [rows] int32, indices into `buckets`.
    Raises:
        DataError: no bucket holds a row.
    """
    rows = np.stack([lengths, anchors], axis=1)
    chosen, cost = _cheapest(rows, np.array([(bucket.context, bucket.anchors) for bucket in buckets]), row_flops)
    if not np.isfinite(cost).all():
        row = int(np.argmin(np.isfinite(cost)))
        names = ", ".join(bucket.name for bucket in buckets)
        raise DataError(
            f"row {row} has {lengths[row]} tokens and {anchors[row]} anchors, and no bucket holds it ({names}); "
            "add a larger bucket"
        )
    return chosen


def efficiency(
    lengths: np.ndarray, anchors: np.ndarray, buckets: Sequence[Bucket], row_flops: RowFlops
) -> dict[str, float]:
    """How much of what the buckets compute is real: tokens, anchors and FLOPs, each real over padded."""
    chosen = assign(lengths, anchors, buckets, row_flops)
    contexts = np.array([bucket.context for bucket in buckets])[chosen]
    slots = np.array([bucket.anchors for bucket in buckets])[chosen]
    return {
        "token_efficiency": float(np.sum(lengths) / contexts.sum()),
        "anchor_efficiency": float(np.sum(anchors) / slots.sum()),
        "flop_efficiency": float(row_flops(lengths, anchors).sum() / row_flops(contexts, slots).sum()),
    }


def _even_rows(most: int, in_data: int) -> int:
    """R with which as few micro-batches as R = `most` needs hold `in_data` rows with the fewest pads."""
    return -(-in_data // -(-in_data // most))


def _cheapest(rows: np.ndarray, edges: np.ndarray, row_flops: RowFlops) -> tuple[np.ndarray, np.ndarray]:
    """For each (length, anchors): the cheapest edge pair that holds it, and its cost; infinite where none does."""
    costs = row_flops(edges[:, 0], edges[:, 1])
    chosen = np.zeros(len(rows), dtype=np.int32)
    cost = np.full(len(rows), np.inf)
    for index in np.argsort(-costs, kind="stable"):
        fits = (rows[:, 0] <= edges[index, 0]) & (rows[:, 1] <= edges[index, 1])
        chosen[fits], cost[fits] = index, costs[index]
    return chosen, cost


def _polish(edges: np.ndarray, shapes: np.ndarray, weights: np.ndarray, row_flops: RowFlops) -> np.ndarray:
    """Move one edge of one bucket at a time to where the rows cost least, while that helps; then shrink to the rows."""
    edges, moved = edges.copy(), True
    while moved:
        moved = False
        for bucket, axis in np.ndindex(edges.shape):
            others = _cheapest(shapes, np.delete(edges, bucket, axis=0), row_flops)[1]
            now = edges[bucket, axis]
            totals = {}
            for value in [now, *_edges(shapes[:, axis], weights)]:
                edges[bucket, axis] = value
                alone = _cheapest(shapes, edges[bucket][None], row_flops)[1]
                totals[int(value)] = float(weights @ np.minimum(others, alone))
            best = min(totals, key=lambda value: totals[value])
            better = totals[best] < totals[int(now)] * (1 - 1e-9)
            edges[bucket, axis], moved = (best, True) if better else (now, moved)
    chosen = _cheapest(shapes, edges, row_flops)[0]
    return np.unique([shapes[chosen == bucket].max(axis=0) for bucket in np.unique(chosen)], axis=0)


def _split(shapes: np.ndarray, weights: np.ndarray, count: int, row_flops: RowFlops) -> np.ndarray:
    """Split the first axis into intervals and each of them along the second axis, with `count` parts in all.

    Letters here: i < j bound an interval of the outer axis, p <= r one of the inner axis, b parts.
    Returns:
        edges [<= count, 2], the largest outer and inner value of each part.
    """
    outer, inner = (_edges(shapes[:, axis], weights) for axis in (0, 1))
    cost = row_flops(outer[:, None], inner[None, :]).astype(np.float64)
    cells = np.zeros((len(outer) + 1, len(inner) + 1))
    np.add.at(cells, (np.searchsorted(outer, shapes[:, 0]) + 1, np.searchsorted(inner, shapes[:, 1]) + 1), weights)
    below = cells.cumsum(axis=0).cumsum(axis=1)  # rows at the first i outer and the first p inner values

    best = np.full((count + 1, len(outer) + 1, len(outer) + 1), np.inf)  # [b, i, j]: an interval in b parts
    for j in range(1, len(outer) + 1):
        for b, done in enumerate(_split_interval(below[j] - below[:j], cost[j - 1], count)):
            best[b, :j, j] = done[:, -1]

    total = np.full((count + 1, len(outer) + 1), np.inf)  # [b, j]: the first j outer values in b parts
    total[:, 0] = 0.0
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    for b in range(1, count + 1):
        for parts in range(1, b + 1):
            candidate = total[b - parts][:, None] + best[parts]
            start, value = candidate.argmin(axis=0), candidate.min(axis=0)
            for j in np.flatnonzero(value < total[b]).tolist():
                total[b, j], choice[b, j] = value[j], (int(start[j]), parts)

    edges, b, j = [], count, len(outer)
    while j > 0:
        i, parts = choice[b, j]
        within = below[j] - below[i]
        steps = _split_interval(within[None], cost[j - 1], parts)
        r = len(inner)
        for part in range(parts, 0, -1):
            r = int(np.searchsorted(within, within[r]))
            if r == 0:
                break
            edges.append((outer[j - 1], inner[r - 1]))
            r = int(np.argmin(steps[part - 1][0, :r] + (within[r] - within[:r]) * cost[j - 1, r - 1]))
        b, j = b - parts, i
    return np.unique(edges, axis=0)


def _split_interval(within: np.ndarray, cost: np.ndarray, count: int) -> list[np.ndarray]:
    """Split the inner axis, for many intervals of the outer axis at once.

    Args:
        within: [i, p] rows of interval i at the first p inner values.
        cost: [inner] of one row at an inner edge.
        count: the most parts.
    Returns:
        for b = 0..count parts: [i, r] least cost of the rows at the first r inner values.
    """
    # Inner values without a row cost nothing and need no part.
    done = [np.where(within == 0, 0.0, np.inf)]
    for _ in range(count):
        least = np.zeros_like(within)
        for r in range(1, within.shape[1]):
            step = (within[:, r, None] - within[:, :r]) * cost[r - 1]
            cut = (done[-1][:, :r] + step).min(axis=1)
            least[:, r] = np.where(within[:, r] == within[:, r - 1], least[:, r - 1], cut)
        done.append(least)
    return done


def _edges(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Candidate edges of one axis, ascending: all values, or those at equal steps of the rows' summed size."""
    unique, index = np.unique(values, return_inverse=True)
    if len(unique) <= MAX_EDGES:
        return unique
    mass = np.cumsum(np.bincount(index, weights) * unique)
    marks = np.linspace(0, mass[-1], MAX_EDGES + 1)[1:]
    return unique[np.unique(np.minimum(np.searchsorted(mass, marks), len(unique) - 1))]
