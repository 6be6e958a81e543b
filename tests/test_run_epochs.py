"""Epochs as a run sees them: micro-batches that are not full weigh nothing more, and no row is missed or repeated."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny import ordinary_rows, tiny_profile

from draftgraph.engine.build import build
from draftgraph.engine.data.collate import collate
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.data.schedule import MicroBatch
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.run.metrics import BLOCKS, WEIGHT
from draftgraph.engine.train import train
from draftgraph.engine.warmup import padding_difference, run_micro_step


def micro_step(engine, bucket, row_ids):
    """Gradients and sums of one micro-step over these rows, everything stale before it."""
    lane, target = engine.rig.drafters[0], engine.rig.targets[0]
    views = lane.batch.views[bucket]
    layout = engine.plan.layouts[bucket]
    host = layout.numpy_views(np.full(layout.num_bytes, 0xA5, dtype=np.uint8))
    collate(MicroBatch(0, 0, np.array(row_ids, dtype=np.int64), 0), engine.plan.rows, host, engine.plan.draw)
    for name, values in host.items():
        view = getattr(views, name)
        view.copy_(torch.from_numpy(values).view(view.dtype))
    views.taps.fill_(float("nan"))
    target.replay(bucket)
    return run_micro_step(lane, views)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_slots_without_a_row_weigh_nothing_in_gradients_loss_and_metrics(tmp_path, kind):
    engine = build(make_plan(tiny_profile(tmp_path, drafter={"loss": kind})))
    for lane in engine.rig.lanes:
        lane.warm_up(1)
        lane.capture()
    engine.initialise()
    bucket = max(engine.plan.buckets, key=lambda bucket: bucket.rows)
    rows = np.flatnonzero(engine.plan.assignment == engine.plan.buckets.index(bucket))[: bucket.rows].tolist()
    assert len(rows) == bucket.rows >= 3
    gradients, sums = micro_step(engine, bucket, rows)
    head, tail = micro_step(engine, bucket, rows[:-2]), micro_step(engine, bucket, rows[-2:])
    torch.testing.assert_close(head[0] + tail[0], gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head[1] + tail[1], sums, rtol=1e-5, atol=1e-6)
    assert head[1][BLOCKS] == engine.plan.anchors[rows[:-2]].sum()
    if kind == "dpace":  # which divides by rows
        assert (sums[WEIGHT], head[1][WEIGHT], tail[1][WEIGHT]) == (bucket.rows, bucket.rows - 2, 2)
    nothing = micro_step(engine, bucket, [])
    assert not nothing[0].any() and not nothing[1].any()
    engine.close()


def test_verification_covers_micro_batches_that_are_not_full(tmp_path):
    # One row in a micro-batch: the odd round has none at all.
    engine = build(make_plan(tiny_profile(tmp_path, buckets={"context_tokens": 64, "draft_tokens": 64})))
    for bucket in engine.plan.buckets:
        for number, rows in ((0, bucket.rows), (1, bucket.rows - 1)):
            assert len(engine.data.rows_of(bucket, number).row_ids) == rows
            assert padding_difference(engine, 0, engine.rig.drafters[0], bucket, number) < 1e-4
            assert (engine.rig.targets[0].batch.views[bucket].lengths > 0).sum() == rows
    assert min(bucket.rows for bucket in engine.plan.buckets) == 1
    engine.close()


@pytest.mark.parametrize("num_drafters", [1, 2])
def test_a_run_trains_every_row_once_per_epoch_also_where_it_is_resumed(tmp_path, monkeypatch, num_drafters):
    seen: Counter[tuple[int, int]] = Counter()
    real = Loader.next

    def watched(self):
        slot, batch = real(self)
        seen.update((batch.epoch, row) for row in batch.row_ids.tolist())
        return slot, batch

    monkeypatch.setattr(Loader, "next", watched)
    placement = {"drafters": ["cpu"] * num_drafters, "look_ahead": 1}
    rows = ordinary_rows(23)
    (tmp_path / "sizes").mkdir()
    plan = make_plan(tiny_profile(tmp_path / "sizes", rows=rows, placement=placement))
    steps = -(-3 * plan.schedule.batches_per_epoch // 2)
    changes = {"rows": rows, "placement": placement, "checkpoint": {"every": 4, "keep": 9}}
    profile = tiny_profile(tmp_path, run={"steps": steps}, **changes)
    train(profile, tmp_path / "run", False, Console(quiet=True))
    for epoch in range(3):
        assert {row: seen[epoch, row] for row in range(23)} == dict.fromkeys(range(23), 1)
    seen.clear()
    for path in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:  # as if it had died after step 4
        shutil.rmtree(path)
    train(profile, tmp_path / "run", True, Console(quiet=True))
    before = Counter(
        (batch.epoch, row)
        for batch, _ in zip(plan.schedule.at(0), range(8), strict=False)
        for row in batch.row_ids.tolist()
    )
    for epoch in range(3):
        assert {row: (before + seen)[epoch, row] for row in range(23)} == dict.fromkeys(range(23), 1)


def test_a_checkpoint_of_rows_dealt_in_another_way_is_refused(tmp_path, monkeypatch):
    profile = tiny_profile(tmp_path)
    identity = Plan.identity.fget
    with monkeypatch.context() as older:
        older.setattr(
            Plan, "identity", property(lambda plan: {k: v for k, v in identity(plan).items() if k != "order"})
        )
        train(profile, tmp_path / "run", False, Console(quiet=True))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    with pytest.raises(RunError, match=r"order = None \(the profile gives 'whole epochs'\)"):
        train(profile, tmp_path / "run", True, Console(quiet=True))
