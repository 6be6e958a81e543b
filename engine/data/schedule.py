"""The endless, deterministic stream of micro-batches: which rows, of which epoch, into which bucket.

Promises: the stream depends on (assignment, buckets, seed, group) alone; hosts take its micro-batches in turn. Epochs
follow each other whole: each deals every row once, in an order of its own, and a micro-batch never mixes two. `group`
micro-batches side by side, from a multiple of `group` on, are of one bucket: as many drafters finish them together.
`at(k)` starts at micro-batch k without building those before it. One micro-batch is one target extraction; how often
its taps are reused is the collation's business.

How: the rows of a bucket are dealt evenly to the fewest groups that hold them, so a micro-batch may have fewer rows
than its bucket; the other slots are pads, which weigh nothing. Where a bucket has fewer rows than such micro-batches,
some have none. The price is less than `group` micro-batches of each bucket per epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.errors import DataError

# How rows are dealt; a checkpoint of a run that dealt them otherwise is refused.
ORDER = "whole epochs"

# Keeps the key of an epoch's order apart from the keys (seed, epoch, row, repeat) of anchor draws.
_ORDER_KEY = 2**31


@dataclass(frozen=True)
class MicroBatch:
    """Up to R rows of one bucket, all dealt in one epoch."""

    index: int
    bucket_index: int
    row_ids: np.ndarray  # [<= R] int64
    epoch: int


class Schedule:
    """Deals rows into micro-batches.

    Args:
        assignment: [rows] int, the bucket index of every row (`buckets.assign`).
        buckets: the bucket table.
        seed: of the run.
        group: drafters that work side by side, D of every host.
        host, hosts: micro-batch k of this stream is number k * hosts + host of all.
    """

    def __init__(
        self,
        assignment: np.ndarray,
        buckets: Sequence[Bucket],
        seed: int,
        group: int = 1,
        host: int = 0,
        hosts: int = 1,
    ) -> None:
        if not len(assignment):
            raise DataError("no rows to train on")
        self.buckets = tuple(buckets)
        self.assignment = np.asarray(assignment, dtype=np.int32)
        self.seed, self.group, self.host, self.hosts = seed, group, host, hosts
        counts = np.bincount(self.assignment, minlength=len(self.buckets)).astype(np.int64)
        rows = np.array([bucket.rows for bucket in self.buckets], dtype=np.int64)
        groups = -(-counts // (rows * group))
        self._bucket_of_group = np.repeat(np.arange(len(self.buckets)), groups)
        # Where each micro-batch begins, and the last one ends, among an epoch's rows sorted by bucket.
        within = [
            np.arange(n) * count // n for n, count in zip((groups * group).tolist(), counts.tolist(), strict=True)
        ]
        starts = [first + start for first, start in zip(np.cumsum(counts) - counts, within, strict=True)]
        self._edges = np.concatenate([*starts, [len(self.assignment)]])
        self.batches_per_epoch = len(self._edges) - 1
        self.row_efficiency = len(self.assignment) / int((groups * group * rows).sum())

    @property
    def batches_per_bucket(self) -> list[int]:
        """Of all hosts, in one epoch."""
        return (self.group * np.bincount(self._bucket_of_group, minlength=len(self.buckets))).tolist()

    def at(self, index: int) -> Iterator[MicroBatch]:
        """This host's stream from its micro-batch `index` on."""
        return islice(self._all_hosts(index * self.hosts + self.host), 0, None, self.hosts)

    def _all_hosts(self, index: int) -> Iterator[MicroBatch]:
        epoch, skipped = divmod(index, self.batches_per_epoch)
        while True:
            yield from self._epoch(epoch, skipped)
            epoch, skipped = epoch + 1, 0

    def _epoch(self, epoch: int, skipped: int) -> Iterator[MicroBatch]:
        generator = np.random.default_rng([self.seed, epoch, _ORDER_KEY])
        order = generator.permutation(len(self.assignment))
        rows = order[np.argsort(self.assignment[order], kind="stable")]
        groups = generator.permutation(len(self._bucket_of_group))
        for number in range(skipped, self.batches_per_epoch):
            group = int(groups[number // self.group])
            batch = group * self.group + number % self.group
            yield MicroBatch(
                index=epoch * self.batches_per_epoch + number,
                bucket_index=int(self._bucket_of_group[group]),
                row_ids=rows[self._edges[batch] : self._edges[batch + 1]],
                epoch=epoch,
            )
