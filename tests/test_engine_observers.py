"""Who looks at a run changes nothing of it; test_gpu_observers.py shows that nobody waits or allocates either."""

import dataclasses
import errno
import io
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_engine_steady import late_capture_at
from tiny import ordinary_rows, tiny_profile
from watched_run import bare, figures_of, watched

from draftgraph.engine import observers
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run.sampler import STEADY, Sampler
from draftgraph.engine.train import train

STATE = "checkpoints/step-000006/state.safetensors"


def test_a_run_that_is_watched_trains_the_bits_of_one_that_is_not(tmp_path, monkeypatch):
    summary, told = watched(tmp_path, monkeypatch)
    unwatched = bare(tmp_path)
    left, right = (load_file(tmp_path / name / STATE) for name in ("watched", "bare"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert figures_of(tmp_path / "watched") == figures_of(tmp_path / "bare")
    assert summary["loss_last"] == unwatched["loss_last"]
    assert [line["step"] for line in told("log") if "loss" in line] == list(range(1, 7))
    assert summary["log_messages_dropped"] == 0 and unwatched["log_messages_dropped"] is None
    samples = (tmp_path / "watched" / "devices.jsonl").read_text()
    assert '"device": "host"' in samples and "host" not in (tmp_path / "bare" / "devices.jsonl").read_text()


def test_loggers_get_every_evaluation_whatever_the_interval_of_other_figures(tmp_path, monkeypatch):
    changes = {"eval": {"every": 3, "count": 2, "new_tokens": 8}}
    _, told = watched(tmp_path, monkeypatch, every=4, **changes)
    lines = [json.loads(line) for line in (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()]
    sent = {line["step"]: line for line in told("log") if "loss" in line}
    assert sorted(sent) == [3, 4, 6]
    for step in (3, 6):
        line = lines[step - 1]
        assert sent[step]["real_acceptance"] == line["real_acceptance"]
        slots = [sent[step].get(f"real_acceptance/slot {slot}") for slot in (1, 2, 3)]
        assert slots == line["real_acceptance_per_slot"]
    assert "real_acceptance" not in sent[4] and sent[4]["accuracy/slot 1"] == lines[3]["accuracy_per_slot"][0]


def test_the_tokens_of_metrics_are_those_of_the_summary(tmp_path):
    summary = bare(tmp_path)
    tokens = sum(line["real_tokens"] for line in figures_of(tmp_path / "bare"))
    assert tokens == round(summary["real_tokens_per_s"] * summary["seconds"])


def test_buckets_json_says_how_the_rows_fill_them(tmp_path):
    bare(tmp_path)
    found = json.loads((tmp_path / "bare" / "buckets.json").read_text())
    lengths = found["lengths"]
    assert sum(lengths["counts"]) == lengths["rows"] == sum(found["rows_per_bucket"]) == 24
    assert sum(found["tokens_per_bucket"]) == lengths["tokens"] == sum(length for length, _ in ordinary_rows())
    assert set(found["buckets"][0]) == {"rows", "context", "anchors"}


def test_a_run_that_breaks_leaves_a_report_of_its_steps(tmp_path, monkeypatch):
    late_capture_at(3, monkeypatch)
    profile = tiny_profile(tmp_path, log={"every": 1, "wandb": "off"}, capture={"watch": "strict"})
    with pytest.raises(RunError, match="strict"):
        train(profile, tmp_path / "run", False, Console(quiet=True))
    assert "Step 3 of 6." in (tmp_path / "run" / "report.html").read_text()


def test_samples_that_end_with_a_full_disk_are_told_after_the_run(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Sampler, "_sample", lambda self, due=False: self._lost(full) if self.phase == STEADY else None)
    console = Console(file=io.StringIO(), width=200)
    assert train(tiny_profile(tmp_path), tmp_path / "run", False, console)["steps"] == 6
    assert console.file.getvalue().count("devices.jsonl is not written: No space left on device\n") == 1


def test_the_first_host_alone_sends_figures_to_loggers(tmp_path, monkeypatch):
    monkeypatch.setattr(observers, "wanted_sinks", lambda wandb, tensorboard: ["tensorboard"])
    plan = make_plan(tiny_profile(tmp_path))
    for host, sinks in ((0, ["tensorboard"]), (1, [])):
        seen = observers.Observers(dataclasses.replace(plan, host=host, hosts=2), [], tmp_path, Console(quiet=True), 0)
        assert seen.sinks == sinks


def test_a_new_run_in_a_folder_whose_checkpoints_were_moved_away_drops_what_the_older_one_left(tmp_path, monkeypatch):
    assert train(tiny_profile(tmp_path), tmp_path / "run", False, Console(quiet=True))["steps"] == 6
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    late_capture_at(3, monkeypatch)
    profile = tiny_profile(tmp_path, log={"every": 1, "wandb": "off"}, capture={"watch": "strict"})
    with pytest.raises(RunError, match="strict"):
        train(profile, tmp_path / "run", False, Console(quiet=True))
    assert not (tmp_path / "run" / "receipt.json").exists()
    assert "no receipt yet" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def broken(_):
        raise ZeroDivisionError("a picture")

    monkeypatch.setattr(observers, "write_report", broken)
    summary = train(tiny_profile(tmp_path), tmp_path / "run", False, Console(stderr=True))
    assert summary["steps"] == 6 and (tmp_path / "run" / "receipt.json").is_file()
    assert "no report (ZeroDivisionError('a picture'))" in capsys.readouterr().err.replace("\n", " ")
