"""What a shared machine does to a run: signals, kills, full disks. The bits at the end are those of an unbroken run."""

import json
import os
import random
import signal

import pytest
import tomli_w
from rich.console import Console
from safetensors.torch import load_file
from tiny import profile_values
from victim import errors, finish, logged, resumable, start, wait_for

from draftgraph.engine.cli import main
from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.metrics import HEAD, Tally

STEPS = 8


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A profile, and the final state of its unbroken run."""
    folder = tmp_path_factory.mktemp("job")
    profile = folder / "tiny.toml"
    values = profile_values(folder, run={"steps": STEPS}, checkpoint={"every": 1, "keep": 2})
    profile.write_text(tomli_w.dumps(values))
    assert finish(start(profile, folder / "whole")) == 0
    return profile, state(folder / "whole")


def state(run, step=STEPS):
    path = run / "checkpoints" / f"step-{step:06d}"
    return load_file(path / "state.safetensors") | {"scalars": json.loads((path / "state.json").read_text())}


def assert_unbroken(job, run):
    found = state(run)
    scalars, expected = found.pop("scalars"), dict(job[1])
    assert scalars == expected.pop("scalars")
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, STEPS + 1))
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"}


# Before the state, a hash, the folder's flush, the flush behind the rename, and the trimming of the oldest.
POINTS = [("save_file", 2), ("digest", 2), ("flush", 4), ("flush", 5), ("remove", 3)]


def test_a_kill_at_any_point_of_writing_a_checkpoint_costs_no_bit(job, tmp_path):
    for point in POINTS:
        assert finish(start(job[0], tmp_path / "run", die_at=point)) == -signal.SIGKILL, point
    assert resumable(tmp_path / "run")
    assert finish(start(job[0], tmp_path / "run")) == 0
    assert_unbroken(job, tmp_path / "run")


def test_kills_at_random_moments_cost_no_bit(job, tmp_path):
    dice = random.Random(5)
    for _ in range(int(os.environ.get("KILLS", "3"))):
        process = start(job[0], tmp_path / "run", slow_step=0.01, slow_disk=0.005)
        process.join(dice.uniform(0.1, 1.5))
        process.kill()
        if finish(process) == 0:
            break
    assert finish(start(job[0], tmp_path / "run")) in (0, 5)  # 5: it was complete
    assert_unbroken(job, tmp_path / "run")


def test_a_signal_finishes_the_step_writes_and_exits_130_and_the_rest_is_bit_equal(job, tmp_path):
    process = start(job[0], tmp_path / "run", "--set", "checkpoint.every=0", slow_step=0.1)
    wait_for(lambda: logged(tmp_path / "run") >= 3)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, within=30) == 130
    steps = [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run" / "checkpoints")]
    assert steps == [logged(tmp_path / "run")] and 3 <= steps[0] < STEPS
    assert f"stopped after step {steps[0]} of {STEPS}, checkpoint written" in errors(tmp_path / "run")
    assert finish(start(job[0], tmp_path / "run")) == 0
    assert_unbroken(job, tmp_path / "run")


def test_usr1_writes_a_checkpoint_and_the_run_goes_on(job, tmp_path):
    run = tmp_path / "run"
    process = start(job[0], run, "--set", "checkpoint.every=0", slow_step=0.1)
    wait_for(lambda: (run / "profile.toml").exists())
    os.kill(process.pid, signal.SIGUSR1)  # while it warms up: nothing to write
    wait_for(lambda: logged(run) >= 2)
    os.kill(process.pid, signal.SIGUSR1)
    wait_for(lambda: checkpoint.found(run / "checkpoints"))
    (path,) = checkpoint.found(run / "checkpoints")
    assert 2 <= checkpoint.step_of(path) < STEPS
    checkpoint.verify(path)
    assert finish(process) == 0
    assert [p.name for p in checkpoint.found(run / "checkpoints")] == [path.name, f"step-{STEPS:06d}"]


def test_a_second_signal_exits_at_once_and_the_last_good_checkpoint_stays(job, tmp_path):
    run = tmp_path / "run"
    assert finish(start(job[0], run, die_at=("flush", 6))) == -signal.SIGKILL
    checkpoint.sweep(run / "checkpoints")
    process = start(job[0], run, slow_disk=60)
    wait_for(lambda: list((run / "checkpoints").glob(".step-000002.partial/manifest.json")))
    os.kill(process.pid, signal.SIGINT)
    process.join(0.5)
    assert process.is_alive()  # it waits for the disk
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, within=5) == 130
    assert "ended at once; go on from the newest checkpoint with --resume" in errors(run)
    assert checkpoint.newest(run / "checkpoints").name == "step-000001"


def test_a_disk_that_takes_no_more_bytes_is_status_5_and_leaves_nothing_broken(job, tmp_path):
    run = tmp_path / "run"
    # The profile, the evidence, the state: each is refused in its turn.
    refused = {0: "cannot write the run folder", 2_000: f"{run}/warmup.json", 100_000: "cannot write the checkpoint of"}
    for largest_file, message in refused.items():
        assert finish(start(job[0], run, largest_file=largest_file)) == 5
        assert message in errors(run) and "Traceback" not in errors(run), errors(run)
        assert not checkpoint.found(run / "checkpoints") and not list(run.rglob("*.partial"))
    assert finish(start(job[0], run)) == 0
    assert_unbroken(job, run)


def test_figures_that_the_disk_refuses_are_one_sentence(tmp_path):
    tally = Tally(4, tmp_path / "metrics.jsonl", 0)
    tally.close()
    tally.file = open("/dev/full", "a", buffering=1)  # noqa: SIM115  tally closes it
    with pytest.raises(RunError, match=r"metrics.jsonl: No space left on device.*--resume"):
        tally.add([(1, [1.0] * (HEAD + 2 * 3 + 3))])
    tally.close()


def test_a_run_folder_that_is_read_only_is_one_sentence(job, tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    assert finish(start(job[0], tmp_path / "run", unprivileged=True)) == 5
    assert "cannot write the run folder" in errors(tmp_path / "run")
    assert "Traceback" not in errors(tmp_path / "run") and not list((tmp_path / "run").iterdir())


def test_a_run_folder_that_becomes_read_only_ends_the_run_and_the_good_checkpoint_stays(job, tmp_path):
    run = tmp_path / "run"
    process = start(job[0], run, unprivileged=True, slow_step=0.2)
    wait_for(lambda: checkpoint.found(run / "checkpoints"))
    (run / "checkpoints").chmod(0o500)
    assert finish(process) == 5
    assert "cannot write the checkpoint of step" in errors(run) and "Permission denied" in errors(run)
    assert "The last good one is untouched" in errors(run) and "Traceback" not in errors(run)
    (run / "checkpoints").chmod(0o700)
    assert finish(start(job[0], run)) == 0
    assert_unbroken(job, run)


def test_a_signal_while_an_error_is_told_ends_the_command_as_at_any_other_time(capsys, monkeypatch):
    told = Console.print

    def interrupted_once(self, *what, **how):
        monkeypatch.setattr(Console, "print", told)
        raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", interrupted_once)
    assert main(["plan", "nowhere"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
