"""The endless, deterministic stream of micro-batches: which rows, of which epoch, into which bucket.

Promises: the stream depends on (assignment, buckets, seed) alone; every epoch holds every row once; a batch is emitted
when its bucket has all its rows, and what is left over waits for the next epoch, so no row is dropped. `at(k)` starts
at micro-batch k without building those before it. One micro-batch is one target extraction; how often its taps are
reused is the collation's business.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.errors import DataError

# Keeps the key of an epoch's order apart from the keys (seed, epoch, row, repeat) of anchor draws.
_ORDER = 2**31


@dataclass(frozen=True)
class MicroBatch:
    """R rows of one bucket; `epochs` says for each row in which epoch it was dealt."""

    index: int
    bucket_index: int
    row_ids: np.ndarray  # [R] int64
    epochs: np.ndarray  # [R] int64


class Schedule:
    """Deals rows into micro-batches.

    Args:
        assignment: [rows] int, the bucket index of every row (`buckets.assign`).
        buckets: the bucket table.
        seed: of the run.
    """

    def __init__(self, assignment: np.ndarray, buckets: Sequence[Bucket], seed: int) -> None:
        if not len(assignment):
            raise DataError("no rows to train on")
        self.buckets = tuple(buckets)
        self.assignment = np.asarray(assignment, dtype=np.int32)
        self.seed = seed
        self._rows = np.array([bucket.rows for bucket in self.buckets], dtype=np.int64)
        self._counts = np.bincount(self.assignment, minlength=len(self.buckets)).astype(np.int64)

    def emitted(self, epochs: int) -> int:
        """How many micro-batches the first `epochs` epochs complete."""
        return int((epochs * self._counts // self._rows).sum())

    def at(self, index: int) -> Iterator[MicroBatch]:
        """The stream from micro-batch `index` on."""
        low, high = 0, 1
        while self.emitted(high) <= index:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.emitted(middle) <= index else (low, middle)
        return self._stream(low, index)

    def _stream(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        waiting = self._waiting(epoch)
        next_index = self.emitted(epoch)
        while True:
            batches = []
            for bucket, (at, rows) in enumerate(self._dealt(epoch)):
                row_ids = np.concatenate([waiting[bucket][0], rows])
                epochs = np.concatenate([waiting[bucket][1], np.full(len(rows), epoch)])
                size, carried = self._rows[bucket], len(waiting[bucket][0])
                full = len(row_ids) // size
                for number in range(full):
                    part = slice(number * size, (number + 1) * size)
                    # Its place in the stream: where in the epoch's order the row stood that completed it.
                    batches.append((at[part.stop - carried - 1], bucket, row_ids[part], epochs[part]))
                waiting[bucket] = (row_ids[full * size :], epochs[full * size :])
            for _, bucket, row_ids, epochs in sorted(batches, key=lambda batch: batch[0]):
                if next_index >= first:
                    yield MicroBatch(next_index, bucket, row_ids, epochs)
                next_index += 1
            epoch += 1

    def _dealt(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The epoch's rows by bucket: their places in the epoch's order, ascending, and their ids."""
        order = np.random.default_rng([self.seed, epoch, _ORDER]).permutation(len(self.assignment))
        by_bucket = np.argsort(self.assignment[order], kind="stable")
        places = np.split(by_bucket, np.cumsum(self._counts)[:-1])
        return [(place, order[place]) for place in places]

    def _waiting(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """What is left over in each bucket when `epoch` begins, found by dealing only the last few epochs again."""
        left = epoch * self._counts % self._rows
        back = int(np.max(-(-left // np.maximum(self._counts, 1)), initial=0))
        dealt = [(past, self._dealt(past)) for past in range(epoch - back, epoch)]
        waiting = []
        for bucket, count in enumerate(left):
            rows = [np.empty(0, dtype=np.int64)] + [buckets[bucket][1] for _, buckets in dealt]
            epochs = [np.empty(0, dtype=np.int64)] + [np.full(len(buckets[bucket][1]), past) for past, buckets in dealt]
            tail = slice(sum(map(len, rows)) - count, None)
            waiting.append((np.concatenate(rows)[tail], np.concatenate(epochs)[tail]))
        return waiting
