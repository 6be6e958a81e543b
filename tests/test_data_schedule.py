"""The stream of micro-batches."""

import itertools

import numpy as np
import pytest

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.errors import DataError

BUCKETS = [Bucket(4, 16, 8), Bucket(3, 32, 8), Bucket(7, 64, 8), Bucket(2, 128, 8)]


def schedule(rows=50, seed=1):
    # The third bucket wants 7 rows and has 2 or 3; the fourth has none.
    return Schedule(np.where(np.arange(rows) % 20 == 0, 2, np.arange(rows) % 2), BUCKETS, seed)


def take(stream, count):
    return list(itertools.islice(stream, count))


def as_text(batch):
    return (batch.index, batch.bucket_index, batch.row_ids.tolist(), batch.epochs.tolist())


def test_a_batch_holds_the_rows_of_its_bucket():
    plan = schedule()
    for number, batch in enumerate(take(plan.at(0), 100)):
        assert batch.index == number
        assert len(batch.row_ids) == len(batch.epochs) == BUCKETS[batch.bucket_index].rows
        assert (plan.assignment[batch.row_ids] == batch.bucket_index).all()


def test_every_epoch_holds_every_row_once_and_nothing_is_dropped():
    dealt = [
        (epoch, row)
        for batch in take(schedule().at(0), 400)
        for epoch, row in zip(batch.epochs.tolist(), batch.row_ids.tolist(), strict=True)
    ]
    assert len(set(dealt)) == len(dealt)
    for epoch in range(20):
        assert sorted(row for e, row in dealt if e == epoch) == list(range(50))


def test_starting_at_k_equals_skipping_k():
    plan = schedule()
    whole = [as_text(batch) for batch in take(plan.at(0), 300)]
    for first in (0, 1, 7, 13, 14, 15, 100, 251):
        assert [as_text(batch) for batch in take(plan.at(first), 20)] == whole[first : first + 20]


def test_the_stream_depends_on_the_seed_alone():
    same = [[as_text(batch) for batch in take(schedule(seed=seed).at(0), 30)] for seed in (1, 1, 2)]
    assert same[0] == same[1]
    assert same[0] != same[2]


def test_epochs_are_in_different_orders():
    plan = Schedule(np.zeros(40, dtype=int), [Bucket(40, 16, 8)], 0)
    first, second = (batch.row_ids.tolist() for batch in take(plan.at(0), 2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_one_row_in_a_large_bucket_waits_for_enough_epochs():
    batches = take(Schedule(np.zeros(1, dtype=int), [Bucket(3, 16, 8)], 0).at(0), 2)
    assert [batch.epochs.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def test_starting_late_in_a_large_data_set_is_quick():
    plan = Schedule(np.arange(200_000) % 2, BUCKETS, 0)
    (batch,) = take(plan.at(10_000_000), 1)
    assert batch.index == 10_000_000


def test_no_rows_are_a_readable_error():
    with pytest.raises(DataError, match="no rows"):
        Schedule(np.zeros(0, dtype=int), BUCKETS, 0)
