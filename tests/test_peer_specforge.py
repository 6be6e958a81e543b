"""Our step against SpecForge's own code, where its wheel is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_profile

from draftgraph.engine.config import to_toml

PEERS = Path(__file__).resolve().parents[1] / "profiles" / "peers"


def run(*arguments: str, script: str = "compare_specforge.py") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, PEERS / script, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(importlib.util.find_spec("specforge") is None, reason="needs the wheel specforge 0.2.0")
def test_step_and_export_agree_with_specforge_at_random_shapes():
    done = run("--cases", "6", "--seed", "100")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("specforge") is None, reason="needs the wheel specforge 0.2.0")
def test_a_whole_training_follows_specforges_curve(tmp_path):
    changes = {"run": {"steps": 40}, "optim": {"accumulate": 1, "lr": 3e-3, "betas": [0.9, 0.95]}}
    profile = tiny_profile(tmp_path, drafter={"sliding_layers": 1, "sliding_window": 8}, **changes)
    (tmp_path / "profile.toml").write_text(to_toml(profile))
    arguments = [str(tmp_path / "profile.toml"), "--prompts", "--out", str(tmp_path / "out")]
    done = run(*arguments, script="train_beside_specforge.py")
    assert done.returncode == 0, done.stderr
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["ours"]["loss_difference_max"] < 1e-5
    assert receipt["ours"]["loss_last"] < receipt["ours"]["loss_curve"][0] - 0.05
    assert receipt["ratio"] == receipt["peer"]["seconds"] / receipt["ours"]["seconds"]


@pytest.mark.skipif(importlib.util.find_spec("specforge") is None, reason="needs the wheel specforge 0.2.0")
def test_prompts_that_are_missing_are_said_before_anything_trains(tmp_path):
    (tmp_path / "profile.toml").write_text(to_toml(tiny_profile(tmp_path, optim={"accumulate": 1})))
    arguments = [str(tmp_path / "profile.toml"), "--prompts", "nothing.jsonl", "--out", str(tmp_path / "out")]
    done = run(*arguments, script="train_beside_specforge.py")
    assert done.returncode == 1 and done.stderr.startswith("prompts: cannot read nothing.jsonl")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("specforge") is not None, reason="the wheel is installed")
def test_without_the_wheel_the_comparison_says_so_and_passes():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Skipped: ")
