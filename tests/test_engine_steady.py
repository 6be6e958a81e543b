"""What a run does where its steady state breaks; test_gpu_drills.py breaks it with real allocations and waits."""

import os
import signal

import pytest
from test_engine_run import run
from tiny import tiny_profile

from draftgraph.capture.graph import CapturedGraph
from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.metrics import LateFigures


def late_capture_at(step, monkeypatch, then=lambda: None):
    """What a graph that is captured during the run does to the counter that is watched."""
    real = LateFigures.publish

    def publish(self, published_step, *arguments):
        real(self, published_step, *arguments)
        if published_step == step:
            CapturedGraph.num_captures += 1
            then()

    monkeypatch.setattr(LateFigures, "publish", publish)


def test_what_broke_the_steady_state_before_a_signal_is_told_all_the_same(tmp_path, monkeypatch):
    late_capture_at(3, monkeypatch, then=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    summary = run(tiny_profile(tmp_path, log={"every": 10}), tmp_path / "run")
    assert summary["steady_state"] == "steady state broken between step 0 and 3: 1 graphs were captured"
    assert summary["late_captures"] == 1


def test_a_strict_run_stops_with_a_checkpoint_where_its_steady_state_breaks(tmp_path, monkeypatch):
    late_capture_at(3, monkeypatch)
    profile = tiny_profile(tmp_path, log={"every": 1}, checkpoint={"every": 5}, capture={"watch": "strict"})
    with pytest.raises(RunError, match=r"1 graphs were captured.*strict.*stopped after step 3"):
        run(profile, tmp_path / "run")
    assert checkpoint.found(tmp_path / "run" / "checkpoints")[-1].name == "step-000003"
    assert run(profile, tmp_path / "run", resume=True)["steps"] == 6


def test_a_strict_run_that_breaks_in_its_last_step_is_complete_and_says_so(tmp_path, monkeypatch):
    late_capture_at(6, monkeypatch)
    summary = run(tiny_profile(tmp_path, capture={"watch": "strict"}), tmp_path / "run")
    assert summary["steps"] == 6 and "1 graphs were captured" in summary["steady_state"]
