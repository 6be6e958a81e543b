"""Bucket edges against brute force, and what buckets promise."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from draftgraph.engine.config import load_profile
from draftgraph.engine.data.buckets import Bucket, assign, choose_buckets, efficiency
from draftgraph.engine.errors import DataError
from draftgraph.engine.plan import make_plan

PEERS_LENGTHS = Path(__file__).parents[1] / "profiles" / "peers" / "lengths.json"
BUDGETS = {"context_tokens": 8192, "draft_tokens": 4096, "block_size": 8}


def flops(context, anchors):
    """The two terms of a real step: per context token, and per draft token."""
    return 3.0 * context + 8 * 2.0 * anchors


def least_costs(lengths, anchors, shapes, tables):
    """For each table of indices into shapes: the cost of every row in the cheapest shape that holds it."""
    holds = (lengths[:, None] <= shapes[:, 0]) & (anchors[:, None] <= shapes[:, 1])
    costs = np.where(holds, flops(shapes[:, 0], shapes[:, 1]), np.inf)
    return costs[:, tables].min(axis=2).sum(axis=0)


def choose(lengths, anchors, count, **changes):
    settings = {**BUDGETS, "context_multiple": 1, "row_flops": flops, **changes}
    return choose_buckets(np.array(lengths), np.array(anchors), count=count, **settings)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_edges_equal_brute_force_on_small_histograms(seed, count):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 40, 30)
    anchors = np.minimum(lengths, 8 * generator.integers(1, 4, 30))
    slots = np.minimum(-(-anchors // 8) * 8, anchors.max())
    shapes = np.array(list(itertools.product(np.unique(lengths), np.unique(slots))))
    best = least_costs(lengths, slots, shapes, list(itertools.combinations(range(len(shapes)), count))).min()
    table = np.array([(bucket.context, bucket.anchors) for bucket in choose(lengths, anchors, count)])
    assert len(table) <= count
    (found,) = least_costs(lengths, anchors, table, [list(range(len(table)))])
    assert best <= found <= best * 1.005


@pytest.mark.parametrize("budgets", [(120, 10**6), (10**6, 300), (150, 600)])
@pytest.mark.parametrize("seed", range(6))
def test_rows_equal_brute_force_under_both_budgets(seed, budgets):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 40, 60)
    anchors = np.minimum(lengths, generator.integers(1, 30, 60))
    context_tokens, draft_tokens = budgets
    buckets = choose(lengths, anchors, 4, context_tokens=context_tokens, draft_tokens=draft_tokens)
    counts = np.bincount(assign(lengths, anchors, buckets, flops), minlength=len(buckets)).tolist()
    assert sum(counts) == 60 and min(counts) > 0
    for bucket, count in zip(buckets, counts, strict=True):
        fits = [
            rows
            for rows in range(1, count + 1)
            if rows == 1 or (rows * bucket.context <= context_tokens and rows * bucket.anchors * 8 <= draft_tokens)
        ]
        # The fewest micro-batches in an epoch, and among those the fewest slots without a row.
        assert bucket.rows == min(fits, key=lambda rows: (-(-count // rows), -(-count // rows) * rows))


def test_a_row_goes_to_the_cheapest_bucket_that_holds_it():
    buckets = [Bucket(1, 64, 8), Bucket(1, 32, 32), Bucket(1, 64, 32)]
    lengths, anchors = np.array([30, 30, 60, 60]), np.array([8, 20, 8, 20])
    assert assign(lengths, anchors, buckets, flops).tolist() == [0, 1, 0, 2]


def test_a_row_that_no_bucket_holds_is_a_readable_error():
    with pytest.raises(DataError, match=r"row 1 has 65 tokens and 3 anchors.*r1-s64-a8"):
        assign(np.array([5, 65]), np.array([3, 3]), [Bucket(1, 64, 8)], flops)


@pytest.mark.parametrize("relation", ["tied", "free"])
def test_every_row_gets_a_bucket_whole_and_both_budgets_hold(relation):
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 3000, 5000)
    anchors = np.minimum(lengths if relation == "tied" else generator.integers(0, 200, 5000), 100)
    buckets = choose(lengths, anchors, 8, context_multiple=64)
    chosen = assign(lengths, anchors, buckets, flops)
    counts = np.bincount(chosen, minlength=len(buckets))
    assert counts.sum() == 5000
    for index, bucket in enumerate(buckets):
        assert (lengths[chosen == index] <= bucket.context).all()
        assert (anchors[chosen == index] <= bucket.anchors).all()
        assert bucket.context % 64 == 0
        assert bucket.anchors % 8 == 0 or bucket.anchors == 100
        assert 1 <= bucket.rows <= counts[index]
        assert bucket.rows * bucket.context <= BUDGETS["context_tokens"]
        assert bucket.rows * bucket.anchors * BUDGETS["block_size"] <= BUDGETS["draft_tokens"]


def test_a_row_beyond_a_budget_still_gets_a_bucket_of_one_row():
    (bucket,) = choose([9000], [600], 3)
    assert bucket == Bucket(1, 9000, 600)


def test_rows_without_anchors_get_a_bucket():
    assert choose([5, 7], [0, 0], 1) == [Bucket(2, 7, 1)]


def test_no_rows_are_a_readable_error():
    with pytest.raises(DataError, match="no rows"):
        choose(np.zeros(0, dtype=int), np.zeros(0, dtype=int), 2)


def test_efficiency_is_real_over_padded():
    buckets = [Bucket(2, 10, 8)]
    found = efficiency(np.array([5, 10]), np.array([4, 8]), buckets, flops)
    assert found["token_efficiency"] == 15 / 20
    assert found["anchor_efficiency"] == 12 / 16
    assert found["flop_efficiency"] == pytest.approx((3 * 15 + 16 * 12) / (3 * 20 + 16 * 16))


def split_in_order(lengths, anchors, count, multiple, row_flops):
    """The optimum where anchors grow with length: intervals of the sorted rows, by plain dynamic programming."""
    shapes = np.stack([-(-lengths // multiple) * multiple, np.minimum(-(-anchors // 8) * 8, anchors.max())], axis=1)
    unique, weights = np.unique(shapes, axis=0, return_counts=True)
    below = np.concatenate([[0], np.cumsum(weights)])
    cost = row_flops(unique[:, 0], unique[:, 1])
    best = np.where(below == 0, 0.0, np.inf)
    for _ in range(count):
        ends = range(1, len(below))
        best = np.array([0.0] + [np.min(best[:j] + (below[j] - below[:j]) * cost[j - 1]) for j in ends])
    return float(row_flops(lengths, anchors).sum() / best[-1])


def real_flops(context, anchors):
    """Predicted FLOPs of a row at 27B shapes: target and context projections, then draft tokens."""
    return (2 * 24.36e9 + 0.84e9) * context + 16 * (6 * 1.6e9 + 4 * 1.27e9) * anchors


# The exact optimum of token efficiency on the bench lengths, for so many buckets with edges at any length.
BEST_TOKENS = {6: 0.866, 8: 0.899, 11: 0.925, 12: 0.932}


@pytest.mark.parametrize("multiple", [1, 64, 128])
@pytest.mark.parametrize("count", BEST_TOKENS)
def test_buckets_on_the_bench_lengths_are_within_half_a_percent_of_the_optimum(count, multiple):
    lengths = np.array(json.loads(PEERS_LENGTHS.read_text())["lengths"])
    anchors = np.minimum(512, lengths - lengths // 4 - 1)
    found = {}
    for name, row_flops in (("flops", real_flops), ("tokens", lambda context, anchors: context + 0.0 * anchors)):
        buckets = choose(lengths, anchors, count, context_multiple=multiple, row_flops=row_flops)
        chosen = assign(lengths, anchors, buckets, row_flops)
        # No row is dropped, split or shortened.
        assert len(chosen) == len(lengths) == np.bincount(chosen, minlength=len(buckets)).sum()
        assert (lengths <= np.array([bucket.context for bucket in buckets])[chosen]).all()
        assert (anchors <= np.array([bucket.anchors for bucket in buckets])[chosen]).all()
        found[name] = efficiency(lengths, anchors, buckets, row_flops)
        best = split_in_order(lengths, anchors, count, multiple, row_flops)
        if (name, multiple) == ("tokens", 1):
            assert best == pytest.approx(BEST_TOKENS[count], abs=5e-4)
        assert best - 0.005 <= found[name]["flop_efficiency"] <= best + 1e-9
    # Edges that minimise FLOPs give up a little of it for anchors.
    assert BEST_TOKENS[count] - 0.006 <= found["tokens"]["token_efficiency"]
    assert BEST_TOKENS[count] - 0.018 <= found["flops"]["token_efficiency"]


def test_a_million_rows_take_seconds():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 4097, 1_000_000)
    anchors = np.minimum(512, generator.integers(0, lengths))
    start = time.perf_counter()
    buckets = choose(lengths, anchors, 12, context_multiple=64)
    assign(lengths, anchors, buckets, flops)
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("name", ["qwen3.6-27b-1gpu", "qwen3.5-0.8b-1gpu"])
def test_short_rows_run_in_wide_batches_and_anchors_are_what_rows_can_hold(name):
    plan = make_plan(load_profile(name))
    section = plan.profile.buckets
    for index, bucket in enumerate(plan.buckets):
        inside = plan.assignment == index
        fitting = min(section.context_tokens // bucket.context, section.draft_tokens // (bucket.anchors * 16))
        # As many rows as both budgets allow, or, dealt evenly, as many micro-batches as those need.
        assert bucket.rows <= fitting and -(-inside.sum() // bucket.rows) == -(-inside.sum() // fitting)
        most = plan.anchors[inside].max()
        assert most <= bucket.anchors < most + 8 and most < plan.lengths[inside].max() <= bucket.context
    rows = [bucket.rows for bucket in plan.buckets]
    assert max(rows[:3]) > min(rows)
