"""The stream of micro-batches."""

import itertools

import numpy as np
import pytest

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.errors import DataError

BUCKETS = [Bucket(4, 16, 8), Bucket(3, 32, 8), Bucket(7, 64, 8), Bucket(2, 128, 8)]


def schedule(rows=50, seed=1, group=1):
    # The third bucket wants 7 rows and has 2 or 3; the fourth has none.
    return Schedule(np.where(np.arange(rows) % 20 == 0, 2, np.arange(rows) % 2), BUCKETS, seed, group)


def take(stream, count):
    return list(itertools.islice(stream, count))


def as_text(batch):
    return (batch.index, batch.bucket_index, batch.row_ids.tolist(), batch.epoch)


def one_epoch(plan, epoch=0):
    return take(plan.at(epoch * plan.batches_per_epoch), plan.batches_per_epoch)


@pytest.mark.parametrize("num_drafters", [1, 2, 3])
@pytest.mark.parametrize("num_targets", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 7, 50, 333])
def test_lanes_get_every_row_once_per_epoch_also_across_resumes(rows, num_targets, num_drafters):
    plan = schedule(rows, group=num_drafters)
    total = 4 * plan.batches_per_epoch
    whole = take(plan.at(0), total)
    # The run is cut at random positions and goes on from each in a fresh schedule, as a resume does.
    cuts = sorted(np.random.default_rng(rows).integers(0, total, 6).tolist())
    parts = [
        take(schedule(rows, group=num_drafters).at(start), stop - start)
        for start, stop in itertools.pairwise([0, *cuts, total])
    ]
    assert [as_text(batch) for part in parts for batch in part] == [as_text(batch) for batch in whole]
    for epoch in range(4):
        batches = whole[epoch * plan.batches_per_epoch : (epoch + 1) * plan.batches_per_epoch]
        assert all(batch.epoch == epoch for batch in batches)
        assert sorted(row for batch in batches for row in batch.row_ids.tolist()) == list(range(rows))
    # What a target or a drafter works on beside the others, from micro-batch k * D on, costs the same.
    for first in range(0, total, num_drafters):
        assert len({batch.bucket_index for batch in whole[first : first + num_drafters]}) == 1
    assert {batch.index % num_targets for batch in whole} == set(range(min(num_targets, total)))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_batch_holds_rows_of_its_bucket_dealt_evenly(group):
    plan = schedule(group=group)
    counts = np.bincount(plan.assignment, minlength=len(BUCKETS)).tolist()
    for epoch in range(3):
        batches = one_epoch(plan, epoch)
        for index, (bucket, count) in enumerate(zip(BUCKETS, counts, strict=True)):
            sizes = [len(batch.row_ids) for batch in batches if batch.bucket_index == index]
            # The fewest micro-batches that hold the rows and make whole groups.
            assert len(sizes) == -(-count // (bucket.rows * group)) * group
            assert sum(sizes) == count and max(sizes, default=0) <= bucket.rows
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
        for batch in batches:
            assert (plan.assignment[batch.row_ids] == batch.bucket_index).all()


def test_micro_batches_without_a_row_appear_only_where_rows_are_fewer_than_a_group():
    assert all(len(batch.row_ids) for batch in one_epoch(schedule()))
    assert [len(batch.row_ids) for batch in one_epoch(Schedule(np.zeros(2, dtype=int), BUCKETS, 0, 3))] == [0, 1, 1]
    longest = Schedule(np.zeros(4, dtype=int), [Bucket(1, 64, 8)], 0, 3)
    assert sorted(len(batch.row_ids) for batch in one_epoch(longest)) == [0, 0, 1, 1, 1, 1]


def test_starting_at_k_equals_skipping_k():
    plan = schedule(group=2)
    whole = [as_text(batch) for batch in take(plan.at(0), 300)]
    assert [index for index, *_ in whole] == list(range(300))
    for first in (0, 1, 7, 13, 14, 15, 100, 251):
        assert [as_text(batch) for batch in take(plan.at(first), 20)] == whole[first : first + 20]


def test_the_stream_depends_on_the_seed_alone():
    same = [[as_text(batch) for batch in take(schedule(seed=seed).at(0), 30)] for seed in (1, 1, 2)]
    assert same[0] == same[1]
    assert same[0] != same[2]


def test_epochs_differ_in_the_order_of_rows_and_of_buckets():
    epochs = [one_epoch(schedule(), epoch) for epoch in range(2)]
    rows = [[row for batch in epoch for row in batch.row_ids.tolist()] for epoch in epochs]
    buckets = [[batch.bucket_index for batch in epoch] for epoch in epochs]
    assert rows[0] != rows[1] and buckets[0] != buckets[1]
    assert sorted(buckets[0]) == sorted(buckets[1])
    # Buckets are mixed over an epoch, not one after the other.
    assert len(list(itertools.groupby(buckets[0]))) > len(set(buckets[0]))


def test_row_efficiency_counts_the_slots_without_a_row():
    # 22 rows by 4, 25 by 3, 3 by 7: 6, 9 and 1 micro-batches; in groups of two 6, 10 and 2.
    assert schedule().row_efficiency == 50 / (6 * 4 + 9 * 3 + 7)
    assert schedule(group=2).row_efficiency == 50 / (6 * 4 + 10 * 3 + 2 * 7)


def test_starting_late_in_a_large_data_set_is_quick():
    plan = Schedule(np.arange(200_000) % 2, BUCKETS, 0, 3)
    (batch,) = take(plan.at(10_000_000), 1)
    assert batch.index == 10_000_000


def test_no_rows_are_a_readable_error():
    with pytest.raises(DataError, match="no rows"):
        Schedule(np.zeros(0, dtype=int), BUCKETS, 0)
