"""What a run may lose while it goes on: a device, its data process, the clock."""

import json
import os
import signal
import time

import pytest
import torch
from rich.console import Console
from test_engine_run import assert_same_bits, masters
from tiny import tiny_profile

from draftgraph.engine import train as training
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.errors import CaptureError, DataError, RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.host import MIB
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.train import train

QUIET = Console(quiet=True)
STEPS = 6


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A profile with a checkpoint every second step, and its unbroken run."""
    folder = tmp_path_factory.mktemp("job")
    profile = tiny_profile(folder, run={"steps": STEPS}, checkpoint={"every": 2, "keep": 9}, log={"every": 1})
    train(profile, folder / "whole", False, QUIET)
    return profile, folder / "whole"


def at_micro_step(monkeypatch, number, do):
    """`do(scheduler)` where that micro-step would be issued."""
    real = Scheduler.count

    def count(self, step, bucket):
        real(self, step, bucket)
        if step == "target" and self.micro_step == number:
            do(self)

    monkeypatch.setattr(Scheduler, "count", count)


def steps_on_disk(run):
    return [checkpoint.step_of(path) for path in checkpoint.found(run / "checkpoints")]


def assert_unbroken(job, run):
    for step in steps_on_disk(run):
        assert_same_bits(masters(job[1], step), masters(run, step))
    lines = [
        [{**json.loads(line), "time": None} for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (job[1], run)
    ]
    assert steps_on_disk(run)[-1] == STEPS and lines[0] == lines[1]


def test_a_device_that_is_lost_between_two_micro_steps_is_one_sentence_and_costs_no_bit(job, tmp_path, monkeypatch):
    def lose(_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nFor debugging consider ...")

    with monkeypatch.context() as patch:
        at_micro_step(patch, 2 * 4 + 1, lose)  # in the middle of step 5's accumulation
        with pytest.raises(
            RunError, match=r"a device failed: CUDA error: unspecified launch failure\. What is in checkpoints/"
        ):
            train(job[0], tmp_path / "run", False, QUIET)
    assert steps_on_disk(tmp_path / "run") == [2, 4]
    assert train(job[0], tmp_path / "run", True, QUIET)["first_step"] == 4
    assert_unbroken(job, tmp_path / "run")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_a_device_without_memory_at_the_start_is_status_4_and_leaves_no_run(job, tmp_path, monkeypatch, error):
    def build(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(training, "build", build)
        told = r"cpu ran out of memory.*`plan` predicts .* for cpu"
        with pytest.raises(CaptureError, match=told):
            train(job[0], tmp_path / "run", False, QUIET)
    assert train(job[0], tmp_path / "run", False, QUIET)["steps"] == STEPS  # the same folder


def test_a_data_process_that_is_killed_ends_the_run_behind_a_checkpoint_of_all_its_steps(job, tmp_path, monkeypatch):
    loaders, real = [], Loader.next

    def remember(self):
        loaders.append(self)
        return real(self)

    def kill(_):
        os.kill(loaders[-1].pid, signal.SIGKILL)
        loaders[-1]._process.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "next", remember)
        at_micro_step(patch, 2 * 2 + 1, kill)
        with pytest.raises(DataError, match="the data process was ended by signal 9"):
            train(job[0], tmp_path / "run", False, QUIET)
    *_, last = steps_on_disk(tmp_path / "run")
    assert 3 <= last < STEPS and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == last
    assert train(job[0], tmp_path / "run", True, QUIET)["first_step"] == last
    assert steps_on_disk(tmp_path / "run")[-1] == STEPS
    assert_same_bits(masters(job[1], STEPS), masters(tmp_path / "run", STEPS))


def test_a_clock_that_jumps_changes_no_bit_and_no_duration(job, tmp_path, monkeypatch):
    jumps, real = iter([1e6, -1e6] * 10_000), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    summary = train(job[0], tmp_path / "run", False, QUIET)
    assert 0 < summary["seconds"] < 600 and 0 < summary["checkpoint_pause_ms_max"] < 60_000
    assert_unbroken(job, tmp_path / "run")


def test_growth_of_host_memory_is_told_during_the_run(job, tmp_path, monkeypatch, capsys):
    sizes = {}

    def leaks(pid):
        sizes[pid] = sizes.get(pid, 0) + 300 * MIB if pid != os.getpid() else MIB
        return sizes[pid]

    monkeypatch.setattr("draftgraph.engine.run.host.private_bytes", leaks)
    summary = train(job[0], tmp_path / "run", False, Console(stderr=True, width=300))
    assert "step 2: host memory of the data process grew from 300 to 600 MiB since step 1" in capsys.readouterr().err
    assert summary["host_memory_growth_bytes"] == 300 * MIB * (STEPS - 1)
