"""Which tokens may be anchors, and the draw."""

import numpy as np
import pytest

from draftgraph.engine.data.anchors import RULES, AnchorDraw, choose_anchors, count_valid_anchors, valid_anchors
from draftgraph.engine.errors import DataError

K = 4


def plainly_valid(mask, rule):
    """The rules of the design, word for word."""
    size = len(mask)
    if rule == "next-supervised":
        return [a for a in range(size) if a <= size - 2 and mask[a] and mask[a + 1]]
    return [a for a in range(size) if mask[a] and a <= size - K]


def masks():
    for size in (1, 2, K - 1, K, K + 1, 3 * K):
        nothing = np.zeros(size, dtype=bool)
        first, last = nothing.copy(), nothing.copy()
        first[0], last[-1] = True, True
        yield from (nothing, first, last, ~nothing)
        yield from np.random.default_rng(size).random((5, size)) < 0.6


@pytest.mark.parametrize("rule", RULES)
def test_valid_anchors_are_those_of_the_rule(rule):
    for mask in masks():
        assert np.flatnonzero(valid_anchors(mask, rule, K)).tolist() == plainly_valid(mask, rule), (mask, rule)


@pytest.mark.parametrize("rule", RULES)
def test_counting_many_rows_equals_counting_each(rule):
    rows = list(masks())
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    counts = count_valid_anchors(np.concatenate(rows), offsets, rule, K)
    assert counts.tolist() == [len(plainly_valid(row, rule)) for row in rows]


def test_the_loss_mask_itself_is_left_alone():
    mask = np.ones(8, dtype=bool)
    valid_anchors(mask, "in-row", K)
    assert mask.all()


def test_a_draw_is_ascending_without_repeats_among_valid_anchors():
    mask = np.random.default_rng(0).random(100) < 0.8
    valid = plainly_valid(mask, "next-supervised")
    positions, kept = AnchorDraw(seed=3, num_anchors=20, block_size=K).draw(mask, 24, epoch=0, row=5, repeat=0)
    drawn = positions[kept]
    assert positions.dtype == np.int32
    assert len(drawn) == 20
    assert (np.diff(drawn) > 0).all()
    assert set(drawn.tolist()) <= set(valid)
    assert not positions[~kept].any()
    assert kept[:20].all()


def test_a_row_with_few_valid_anchors_gives_all_of_them():
    mask = np.array([0, 1, 1, 1, 0, 1, 1], dtype=bool)
    positions, kept = AnchorDraw(seed=3, num_anchors=20, block_size=K).draw(mask, 8, epoch=0, row=5, repeat=0)
    assert positions.tolist() == [1, 2, 5, 0, 0, 0, 0, 0]
    assert kept.tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("mask", [[False], [True], [True, False], [False, True], [False] * 9, [False] * 8 + [True]])
def test_a_row_without_a_valid_anchor_draws_none_and_raises_nothing(mask):
    positions, kept = AnchorDraw(seed=3, num_anchors=20, block_size=K).draw(np.array(mask), 8, epoch=0, row=0, repeat=0)
    assert not positions.any()
    assert not kept.any()


def test_the_draw_does_not_depend_on_the_bucket():
    mask = np.ones(200, dtype=bool)
    draw = AnchorDraw(seed=3, num_anchors=20, block_size=K)
    narrow, wide = (draw.draw(mask, slots, epoch=1, row=2, repeat=0) for slots in (20, 64))
    assert narrow[0][narrow[1]].tolist() == wide[0][wide[1]].tolist()


def test_seed_epoch_row_and_repeat_each_change_the_draw():
    mask = np.ones(200, dtype=bool)
    keys = [(3, 1, 2, 0), (4, 1, 2, 0), (3, 2, 2, 0), (3, 1, 3, 0), (3, 1, 2, 1)]
    draws = [
        AnchorDraw(seed=seed, num_anchors=20, block_size=K).draw(mask, 20, epoch=epoch, row=row, repeat=repeat)[0]
        for seed, epoch, row, repeat in keys
    ]
    assert len({positions.tobytes() for positions in draws}) == len(keys)


def test_every_valid_anchor_is_drawn_about_equally_often():
    mask = np.ones(41, dtype=bool)
    draw = AnchorDraw(seed=0, num_anchors=10, block_size=K)
    counts = np.zeros(41)
    for epoch in range(800):
        counts[draw.draw(mask, 10, epoch=epoch, row=0, repeat=0)[0]] += 1
    # 200 expected, standard deviation 12.2.
    assert counts[:40].min() > 150
    assert counts[:40].max() < 250
    assert counts[40] == 0


def test_a_bucket_with_too_few_slots_is_a_readable_error():
    with pytest.raises(DataError, match="12 anchors"):
        choose_anchors(np.ones(13, dtype=bool), 8, 20, K, "next-supervised", np.random.default_rng(0))
