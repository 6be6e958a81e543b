"""Numbers going bad: when a run gives up, and what its user is told."""

import re

import pytest
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.build import build
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.health import RECENT, Health
from draftgraph.engine.run.metrics import StepFigures
from draftgraph.engine.train import train


def figures(step, loss=3.0, skipped=0):
    return StepFigures(step, loss, None, [], None, None, 0.0, skipped)


def watch(max_skipped=3, skipped=0, last=4):
    said = []
    return Health(max_skipped, skipped, lambda step: f"rows of {step}", lambda: last, said.append), said


def test_skipped_updates_in_a_row_end_the_run_and_a_good_one_starts_the_count_again():
    health, said = watch()
    health.look(figures(step, skipped=count) for step, count in enumerate([0, 1, 2, 2, 3, 4]))
    with pytest.raises(RunError, match=r"of 3 steps in a row, up to step 6, .* from step 4 with .*rows of 6"):
        health.look([figures(6, skipped=5)])
    assert len(said) == 1 and said[0].startswith("step 1: its update was skipped")
    never, _ = watch(max_skipped=0)
    never.look(figures(step, skipped=step) for step in range(1, 200))


def test_what_was_skipped_before_a_resume_is_not_counted_again():
    health, said = watch(max_skipped=1, skipped=7)
    health.look([figures(1, skipped=7)])
    assert not said
    with pytest.raises(RunError):
        health.look([figures(2, skipped=8)])


def test_a_spike_is_told_once_with_its_rows_and_an_early_or_falling_loss_is_none():
    health, said = watch()
    health.look(figures(step, loss=20.0 / step) for step in range(1, 60))
    health.look([figures(60, loss=0.5)])
    assert not said
    health.look(figures(step, loss=9.0 if step in (65, 66) else 0.4) for step in range(61, 70))
    assert said == ["step 65: its loss is 9.000, the recent median 0.506; rows of 65"]
    health.look(figures(step, loss=9.0 if step == 65 + RECENT else 0.4) for step in range(70, 66 + RECENT))
    assert [line.split(":")[0] for line in said] == ["step 65", f"step {65 + RECENT}"]


@pytest.mark.parametrize("reuse", [1, 3])
def test_the_rows_that_are_named_are_the_shards_rows_of_that_step(tmp_path, reuse):
    # Row 0 trains nothing, so the run's own numbering is another than the shards'.
    rows = [(20, []), *((n, list(range(n))) for n in range(5, 35))]
    profile = tiny_profile(tmp_path, rows=rows, drafter={"reuse": reuse})
    engine = build(make_plan(profile))
    batches = [batch for batch, _ in zip(engine.schedule.at(0), range(20), strict=False)]
    named = [int(row) for row in re.findall(r"\d+(?=[, ])", engine.rows_of(4).split(" of ")[0] + " ")]
    micro_steps = range(6, 8)  # of step 4, two a step
    expected = {int(row) + 1 for m in micro_steps for row in batches[m // reuse].row_ids}
    assert set(named) == expected and engine.rows_of(4).endswith(profile.data.shards)
    lengths = ShardReader(profile.data.shards).lengths
    assert all(lengths[row] == rows[row][0] for row in named)
    engine.close()


def test_a_run_gives_up_without_writing_and_names_the_last_checkpoint(tmp_path, capsys):
    # The first steps are fine; the rate then rises until the weights overflow and every gradient is not finite.
    profile = tiny_profile(
        tmp_path,
        run={"steps": 40},
        optim={"lr": 1e37, "warmup": 1.0, "max_skipped": 4, "clip": 1e30},
        checkpoint={"every": 1, "keep": 40},
    )
    with pytest.raises(RunError, match=r"of 4 steps in a row, up to step \d+, .*from step (\d+) with --resume"):
        train(profile, tmp_path / "run", False, Console(stderr=True, width=400))
    assert "its update was skipped" in capsys.readouterr().err
    steps = [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run" / "checkpoints")]
    logged = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert steps == list(range(1, logged))  # the step that gave up wrote none
    checkpoint.newest(tmp_path / "run" / "checkpoints")
