"""Numbers going bad: when a run gives up, and what its user is told."""

import io
import json
import shlex
import shutil
import weakref

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_profile

from draftgraph.engine.build import build
from draftgraph.engine.cli import parser
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import RunError, UsageError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.health import RECENT, Health
from draftgraph.engine.run.metrics import StepFigures
from draftgraph.engine.run.optimizer import OptimizerShard
from draftgraph.engine.run.writer import CheckpointWriter
from draftgraph.engine.train import train


def figures(step, loss=3.0, skipped=0):
    return StepFigures(step, loss, None, [], None, None, 0.0, skipped)


def watch(max_skipped=3, skipped=0, checkpoints=(1, 2), on_not_finite="stop"):
    said = []
    rows_of = "rows of {}".format
    return Health(max_skipped, on_not_finite, skipped, rows_of, lambda: checkpoints, said.append), said


def test_skipped_updates_in_a_row_end_the_run_and_a_good_one_starts_the_count_again():
    health, said = watch()
    health.look(figures(step, skipped=count) for step, count in enumerate([0, 1, 2, 2, 3, 4]))
    with pytest.raises(RunError, match=r"of 3 steps in a row, up to step 6, .*rows of 6.*: go on from step 2 with"):
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
    command = engine.rows_of(4).removeprefix("to see its rows: ")
    args = parser().parse_args(shlex.split(command)[1:])
    named = args.show_rows
    micro_steps = range(6, 8)  # of step 4, two a step
    expected = {int(row) + 1 for m in micro_steps for row in batches[m // reuse].row_ids}
    assert set(named) == expected and args.inputs == [profile.data.shards] and args.target == profile.target.model
    lengths = ShardReader(profile.data.shards).lengths
    assert all(lengths[row] == rows[row][0] for row in named)
    engine.close()


def test_a_run_gives_up_without_writing(tmp_path, capsys):
    # The first steps are fine; the rate then rises until the weights overflow and every gradient is not finite.
    profile = tiny_profile(
        tmp_path,
        run={"steps": 40},
        optim={"lr": 1e37, "warmup": 1.0, "max_skipped": 4, "clip": 1e30},
        checkpoint={"every": 1, "keep": 40},
    )
    with pytest.raises(RunError, match=r"of 4 steps in a row, up to step \d+, ") as stopped:
        train(profile, tmp_path / "run", False, Console(stderr=True, width=400))
    assert "its update was skipped" in capsys.readouterr().err
    steps = [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run" / "checkpoints")]
    logged = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert steps == list(range(1, logged - 3))  # of the skipped ones, none
    assert "no checkpoint is old enough" in str(stopped.value)  # the first update made the second overflow
    checkpoint.newest(tmp_path / "run" / "checkpoints")


def test_kept_on_the_count_begins_again_and_the_line_is_told_each_time():
    health, said = watch(max_skipped=3, on_not_finite="keep")
    health.look(figures(step, skipped=step) for step in range(1, 8))
    assert [line.split(", were")[0] for line in said[1:]] == [
        f"the updates of 3 steps in a row, up to step {step}" for step in (3, 6)
    ]
    assert said[1].endswith("optim.on_not_finite = 'keep': the run goes on")


@pytest.mark.parametrize(
    ("checkpoints", "advice"),
    [
        ((3, 5), "go on from step 5 with --resume --set optim.lr=LOWER"),
        ((5, 6, 7), "remove step-000006, step-000007 from checkpoints/, then go on from step 5 with --resume"),
        ((6, 7), "no checkpoint is old enough to go on from: start anew"),
        ((), "no checkpoint is old enough to go on from: start anew"),
    ],
)
def test_a_run_that_gives_up_names_a_checkpoint_with_a_good_update_behind_it(checkpoints, advice):
    health, _ = watch(checkpoints=checkpoints)
    with pytest.raises(RunError) as stopped:
        health.look(figures(step, skipped=max(0, step - 6)) for step in range(1, 10))  # from step 7 on
    assert f"Nothing was written since: {advice}" in str(stopped.value)


def test_while_updates_are_skipped_none_is_worth_a_checkpoint():
    health, _ = watch(max_skipped=0)
    health.look(figures(step, skipped=max(0, step - 4)) for step in range(1, 8))  # from step 5 on
    assert [health.worth_keeping(step) for step in (4, 5, 6, 7)] == [True, False, False, False]
    health.look([figures(8, skipped=3)])
    assert health.worth_keeping(8)


ROLLS_BACK = {"max_skipped": 2, "on_not_finite": "roll-back"}


def not_finite_from(monkeypatch, step, lowest_share):
    """Gradients are not finite from a step on, at that share of the rate and above."""
    real = OptimizerShard.measure

    def measure(self):
        real(self)
        bad = (self.step_count >= step - 1) & (self.rate_share >= lowest_share)
        self.norm_squared.copy_(torch.where(bad, float("nan"), self.norm_squared))

    monkeypatch.setattr(OptimizerShard, "measure", measure)


def rates(run):
    return [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("every", "back_to"), [(1, 5), (3, 3)])
def test_a_run_rolls_back_behind_a_good_update_and_goes_on_at_half_the_rate(tmp_path, monkeypatch, every, back_to):
    # Three repeats of an extraction and two micro-steps a step: it goes back into the middle of one.
    changes = {"run": {"steps": 12}, "drafter": {"reuse": 3}, "checkpoint": {"every": every, "keep": 3}}
    profile = tiny_profile(tmp_path, optim=ROLLS_BACK, **changes)
    assert train(profile, tmp_path / "good", False, Console(quiet=True))["rate_share"] == 1.0
    not_finite_from(monkeypatch, step=7, lowest_share=1.0)
    said = Console(record=True, width=800, file=io.StringIO())
    summary = train(profile, tmp_path / "run", False, said)
    assert f"Rolled back to step-{back_to:06d}; the rate is 0.5 of the profile's" in said.export_text()
    assert (summary["steps"], summary["first_step"], summary["rate_share"]) == (12, back_to, 0.5)
    assert summary["skipped_updates"] == 0
    good = rates(tmp_path / "good")
    assert rates(tmp_path / "run") == good[:back_to] + [rate / 2 for rate in good[back_to:]]
    # A resume keeps to the lower rate: the same bits.
    state = tmp_path / "run" / "checkpoints" / "step-000012" / "state.safetensors"
    whole = load_file(state)
    shutil.rmtree(state.parent)
    assert train(profile, tmp_path / "run", True, Console(quiet=True))["rate_share"] == 0.5
    resumed = load_file(state)
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())


def test_a_run_that_no_lower_rate_helps_stops_and_one_with_nothing_to_go_back_to_too(tmp_path, monkeypatch):
    profile = tiny_profile(tmp_path, run={"steps": 12}, optim=ROLLS_BACK, checkpoint={"every": 1, "keep": 3})
    not_finite_from(monkeypatch, step=7, lowest_share=0.0)
    real, writers = CheckpointWriter.__init__, []

    def take_memory(self, *arguments):
        assert not [writer for writer in writers if writer()]  # that of the attempt before is free
        writers.append(weakref.ref(self))
        real(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "__init__", take_memory)
    said = Console(record=True, width=800, file=io.StringIO())
    with pytest.raises(RunError, match=r"the rate was halved often: lower optim\.lr"):
        train(profile, tmp_path / "run", False, said)
    assert len(writers) == 7
    assert said.export_text().count("Rolled back to step-000005") == 6
    checkpoint.newest(tmp_path / "run" / "checkpoints")
    writers.clear()  # what ended the run above may hold its last one until the next collection
    not_finite_from(monkeypatch, step=2, lowest_share=1.0)
    with pytest.raises(RunError, match="no checkpoint is old enough to go back to"):
        train(profile, tmp_path / "early", False, said)


def test_a_run_that_stops_says_which_checkpoints_lead_back_into_the_trouble(tmp_path, monkeypatch):
    optim = ROLLS_BACK | {"on_not_finite": "stop"}
    profile = tiny_profile(tmp_path, run={"steps": 12}, optim=optim, checkpoint={"every": 1, "keep": 2})
    not_finite_from(monkeypatch, step=7, lowest_share=0.0)
    with pytest.raises(RunError, match=r"remove step-000006 from checkpoints/, then go on from step 5 with --resume"):
        train(profile, tmp_path / "run", False, Console(quiet=True))


def test_a_roll_back_needs_three_checkpoints(tmp_path):
    with pytest.raises(UsageError, match=r"needs checkpoint\.keep = 3, found 2"):
        tiny_profile(tmp_path, optim=ROLLS_BACK, checkpoint={"keep": 2})
