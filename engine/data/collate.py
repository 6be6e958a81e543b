"""The bytes of a micro-batch: one flat buffer with a fixed layout per bucket, and the code that fills it.

Promises: every byte of every field is written on each collate, pads included, so nothing stale of an earlier batch
leaks. The same layout describes a host slot and a device buffer: one copy moves a micro-batch.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.schedule import MicroBatch

# Every dtype may be viewed at a field's start, and copies move whole vectors.
ALIGN_BYTES = 16


class Rows(Protocol):
    """Where token rows come from: shards on disk, or random rows."""

    lengths: np.ndarray  # [rows] int64
    vocab_size: int

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids [n] int32, loss_mask [n] bool."""

    def valid_anchors(self, rule: str, block_size: int) -> np.ndarray:
        """[rows] int64."""


@dataclass(frozen=True)
class SlotLayout:
    """Where each field of a bucket's micro-batch lies in a flat uint8 buffer; `reuse` draws of anchors share it."""

    bucket: Bucket
    reuse: int = 1

    @property
    def fields(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Per field: dtype name (the same in numpy and torch), shape, byte offset."""
        rows, context, anchors = self.bucket.rows, self.bucket.context, self.bucket.anchors
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "input_ids": ("int64", (rows, context)),
            "loss_mask": ("uint8", (rows, context)),
            "lengths": ("int32", (rows,)),
            "anchor_positions": ("int32", (self.reuse, rows, anchors)),
            "anchor_valid": ("uint8", (self.reuse, rows, anchors)),
        }
        fields, offset = {}, 0
        for name, (dtype, shape) in shapes.items():
            fields[name] = (dtype, shape, offset)
            offset += _aligned(math.prod(shape) * np.dtype(dtype).itemsize)
        return fields

    @property
    def num_bytes(self) -> int:
        dtype, shape, offset = list(self.fields.values())[-1]
        return offset + _aligned(math.prod(shape) * np.dtype(dtype).itemsize)

    def numpy_views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as arrays over the same bytes of `buffer` [bytes] uint8."""
        return {
            name: buffer[offset : offset + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for name, (dtype, shape, offset) in self.fields.items()
        }


def collate(batch: MicroBatch, rows: Rows, views: dict[str, np.ndarray], draw: AnchorDraw) -> None:
    """Write a micro-batch into a slot.

    Args:
        batch: the rows, at most R, and the epoch that keys their anchors; slots without a row become pads.
        rows: where the tokens are.
        views: `SlotLayout.numpy_views` of the batch's bucket; every byte of every field is overwritten.
        draw: how anchors are drawn.
    Raises:
        DataError: a row's tokens are damaged, or the row draws more anchors than the bucket has slots.
    """
    num_anchors = views["anchor_positions"].shape[-1]
    num_rows = len(batch.row_ids)
    for slot, row in enumerate(batch.row_ids.tolist()):
        ids, mask = rows[row]
        for name, values in (("input_ids", ids), ("loss_mask", mask)):
            views[name][slot, : len(ids)] = values
            views[name][slot, len(ids) :] = 0
        views["lengths"][slot] = len(ids)
        for repeat in range(len(views["anchor_positions"])):
            positions, valid = draw.draw(mask, num_anchors, epoch=batch.epoch, row=row, repeat=repeat)
            views["anchor_positions"][repeat, slot] = positions
            views["anchor_valid"][repeat, slot] = valid
    for name in ("input_ids", "loss_mask", "lengths"):
        views[name][num_rows:] = 0
    for name in ("anchor_positions", "anchor_valid"):
        views[name][:, num_rows:] = 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
