"""The bytes of a micro-batch."""

import numpy as np
import pytest

from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import ALIGN_BYTES, SlotLayout, collate
from draftgraph.engine.data.schedule import MicroBatch
from draftgraph.engine.data.shards import RandomRows

K = 4
LENGTHS = np.array([1, 2, K - 1, K, K + 1, 31, 40])
ROWS = RandomRows(LENGTHS, vocab_size=64, seed=0)
DRAW = AnchorDraw(seed=5, num_anchors=9, block_size=K)


def batch(*row_ids, epoch=0):
    return MicroBatch(0, 0, np.array(row_ids, dtype=np.int64), epoch)


def filled(bucket, micro_batch, reuse=1, fill=0xA5):
    layout = SlotLayout(bucket, reuse)
    buffer = np.full(layout.num_bytes, fill, dtype=np.uint8)
    views = layout.numpy_views(buffer)
    collate(micro_batch, ROWS, views, DRAW)
    return views


@pytest.mark.parametrize("reuse", [1, 3])
def test_fields_are_aligned_and_do_not_overlap(reuse):
    layout = SlotLayout(Bucket(3, 41, 9), reuse)
    ends = 0
    for _name, (dtype, shape, offset) in layout.fields.items():
        assert offset % ALIGN_BYTES == 0
        assert offset >= ends
        ends = offset + int(np.prod(shape)) * np.dtype(dtype).itemsize
    assert ends <= layout.num_bytes
    assert layout.fields["anchor_positions"][1] == (reuse, 3, 9)


def test_every_byte_of_every_field_is_written():
    first, second = (filled(Bucket(3, 48, 16), batch(0, 3, 6), reuse=2, fill=fill) for fill in (0xA5, 0x5A))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()


def test_a_slot_holds_the_rows_and_zeros_in_every_pad():
    views = filled(Bucket(7, 48, 16), batch(*range(7)))
    assert views["lengths"].tolist() == LENGTHS.tolist()
    for row, length in enumerate(LENGTHS):
        ids, mask = ROWS[row]
        assert views["input_ids"][row, :length].tolist() == ids.tolist()
        assert views["loss_mask"][row, :length].tolist() == mask.tolist()
        assert not views["input_ids"][row, length:].any()
        assert not views["loss_mask"][row, length:].any()
        assert not views["anchor_positions"][0, row][views["anchor_valid"][0, row] == 0].any()
    assert views["anchor_valid"][0].sum(axis=1).tolist() == np.minimum(ROWS.valid_anchors(DRAW.rule, K), 9).tolist()


@pytest.mark.parametrize("row_ids", [(), (3,), (6, 5)])
def test_a_slot_without_a_row_is_all_pad(row_ids):
    views = filled(Bucket(3, 48, 16), batch(*row_ids), reuse=2)
    assert views["lengths"].tolist() == [*LENGTHS[list(row_ids)].tolist(), *[0] * (3 - len(row_ids))]
    for name in ("input_ids", "loss_mask"):
        assert not views[name][len(row_ids) :].any()
    for name in ("anchor_positions", "anchor_valid"):
        assert not views[name][:, len(row_ids) :].any()
    full = filled(Bucket(3, 48, 16), batch(*row_ids, *[0] * (3 - len(row_ids))), reuse=2)
    for name in ("anchor_positions", "anchor_valid"):
        assert (views[name][:, : len(row_ids)] == full[name][:, : len(row_ids)]).all()


def test_a_rows_bytes_do_not_depend_on_its_bucket_or_its_neighbours():
    alone, mixed = filled(Bucket(1, 40, 9), batch(6, epoch=3)), filled(Bucket(4, 64, 24), batch(0, 5, 6, 1, epoch=3))
    valid = [views["anchor_valid"][0, row] == 1 for views, row in ((alone, 0), (mixed, 2))]
    assert alone["input_ids"][0].tolist() == mixed["input_ids"][2, :40].tolist()
    positions = [views["anchor_positions"][0, row] for views, row in ((alone, 0), (mixed, 2))]
    assert positions[0][valid[0]].tolist() == positions[1][valid[1]].tolist()


def test_each_repeat_draws_its_own_anchors():
    views = filled(Bucket(1, 40, 9), batch(6), reuse=3)
    assert len({positions.tobytes() for positions in views["anchor_positions"]}) == 3
    assert views["anchor_positions"][0].tolist() == filled(Bucket(1, 40, 9), batch(6))["anchor_positions"][0].tolist()
