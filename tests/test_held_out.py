"""Evaluation inside a run: it measures what decoding by its definition does, and changes nothing that trains."""

import json
import os
import signal
import time

import pytest
import torch
from plain_decoding import speculative
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_profile

from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.build import build
from draftgraph.engine.config import from_values
from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.errors import Interrupted, UsageError
from draftgraph.engine.held_out import HeldOut, prompts_of
from draftgraph.engine.models.cached_drafter import with_positions
from draftgraph.engine.models.target import load_model
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run import checkpoint
from draftgraph.engine.saved import load_saved
from draftgraph.engine.train import train
from draftgraph.profiles.load import DATA

EVAL = {"every": 2, "count": 3, "new_tokens": 12}


def run(folder, name, resume=False, family="llama", **changes):
    changes = {"eval": EVAL, "checkpoint": {"every": 2, "keep": 9}, **changes}
    profile = tiny_profile(folder, family, **changes)
    return profile, train(profile, folder / name, resume, Console(quiet=True))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_run_logs_the_acceptance_of_its_weights_at_every_evaluation(tmp_path, family):
    profile, summary = run(tmp_path, "run", family=family)
    model = load_model(profile.target.model, torch.float32, torch.device("cpu"), profile.run.seed)
    prompts = prompts_of(make_plan(profile))
    assert len(prompts) == 3
    for line in lines_of(tmp_path / "run"):
        if line["step"] % 2:
            assert "real_acceptance" not in line
            continue
        drafter = with_positions(load_saved(tmp_path / "run", checkpoint_step=line["step"]).drafter, 128)
        counts = [speculative(model, drafter, prompt, EVAL["new_tokens"])[1] for prompt in prompts]
        forwards, *accepted = (sum(column) for column in zip(*counts, strict=True))
        assert line["real_acceptance"] == pytest.approx(1 + sum(accepted) / forwards)
        assert line["real_acceptance_per_slot"] == pytest.approx([count / forwards for count in accepted])
    assert summary["real_acceptance"] == line["real_acceptance"]


def test_a_run_that_evaluates_trains_the_bits_of_one_that_does_not(tmp_path):
    run(tmp_path, "with")
    run(tmp_path, "without", eval={"every": 0})
    found, expected = (
        load_file(tmp_path / name / "checkpoints/step-000006/state.safetensors") for name in ("with", "without")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_steps_that_still_run_are_no_time_of_the_evaluation_that_waits_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(HeldOut, "await_steps", lambda self: time.sleep(0.3))
    _, summary = run(tmp_path, "run")  # three evaluations
    assert summary["seconds"] - summary["evaluation_seconds"] >= 3 * 0.3


def test_the_best_checkpoint_stays_beside_the_newest_also_over_a_resume(tmp_path, monkeypatch):
    resumed = False
    measured = {1: 1.2, 2: 1.9, 3: 1.4, 4: 1.1, 5: 1.8, 6: 1.5}
    real = "draftgraph.engine.run.metrics.Tally.measured"

    def judge(self, step, found):
        if step == 4 and not resumed:
            os.kill(os.getpid(), signal.SIGTERM)
        self.real[step] = type(found)(measured[step], found.acceptance_per_slot)
        return self.judge(step, measured[step])

    monkeypatch.setattr(real, judge)
    options = {"eval": {**EVAL, "every": 1}, "checkpoint": {"every": 2, "keep": 1, "keep_best": True}}
    with pytest.raises(Interrupted):
        run(tmp_path, "run", **options)
    steps = [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run/checkpoints")]
    assert steps == [2, 4]
    resumed = True
    _, summary = run(tmp_path, "run", resume=True, **options)
    steps = [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run/checkpoints")]
    assert steps == [2, 6]
    assert (summary["real_acceptance_best"], summary["real_acceptance_best_step"]) == (1.9, 2)
    assert load_saved(tmp_path / "run", best=True).step == 2


def test_the_best_checkpoint_needs_evaluations():
    with pytest.raises(UsageError, match=r"eval\.every"):
        from_values({"checkpoint": {"keep_best": True}, "data": {"shards": "x"}})


def test_prompts_that_are_missing_are_said_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.engine.build.load_targets", None)
    with pytest.raises(UsageError, match=r"prompts: cannot read .*nothing\.jsonl"):
        build(make_plan(tiny_profile(tmp_path, eval={**EVAL, "prompts": str(tmp_path / "nothing.jsonl")})))


def test_the_shipped_held_out_prompts_are_no_training_prompts():
    held_out = load_prompts(str(DATA / "smollm2-held-out.jsonl"))
    asked = set(load_prompts(str(DATA / "smollm2-code-prompts.jsonl")))
    assert len(held_out) >= 8 and not asked & set(held_out)


def test_answers_beyond_the_targets_positions_are_refused_before_it_is_loaded(tmp_path):
    profile = tiny_profile(tmp_path, eval={**EVAL, "new_tokens": 10_000})
    with pytest.raises(UsageError, match=r"eval.new_tokens = 10000 behind a prompt of \d+ tokens .* write \d+ or less"):
        prompts_of(make_plan(profile))


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_no_step_depends_on_what_ran_before_it_also_where_the_drafter_trains(tmp_path, family):
    engine = build(make_plan(tiny_profile(tmp_path, family, eval=EVAL)))
    for lane in engine.lanes:
        lane.warm_up(1)
    references = eager_references(engine.lanes, 2)
    for lane in engine.lanes:
        lane.capture()
    compare(engine.lanes, references)
    engine.close()
