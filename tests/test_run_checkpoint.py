"""Checkpoints: whatever happens to one, the newest good one is used and the user is told; written in the background."""

import json
import os
import shutil
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_profile

from draftgraph.engine import steps
from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.metrics import LateFigures
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.train import train

QUIET = Console(quiet=True)
# How many broken checkpoints each fuzz tries: 10,000 by `FUZZ=10000 pytest tests/test_run_checkpoint.py`.
FUZZ = int(os.environ.get("FUZZ", "60"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 6 steps with the checkpoints of steps 2, 4, 6, and its profile."""
    folder = tmp_path_factory.mktemp("trained")
    profile = tiny_profile(folder, checkpoint={"every": 2})
    summary = train(profile, folder / "run", False, QUIET)
    assert summary["checkpoint_pause_ms_max"] > 0
    return profile, folder / "run"


@pytest.fixture
def checkpoints(trained, tmp_path):
    return shutil.copytree(trained[1] / "checkpoints", tmp_path / "checkpoints")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def swap(path):
    """The file of the checkpoint before: whole, of the same size, and not this one's."""
    shutil.copy(path.parent.with_name("step-000004") / path.name, path)


DAMAGES = {
    "a truncated state": (lambda f: truncate(f / "state.safetensors"), "state.safetensors has"),
    "an emptied state": (lambda f: (f / "state.safetensors").write_bytes(b""), "state.safetensors has 0 bytes"),
    "a flipped bit in a weight": (lambda f: flip(f / "state.safetensors", -1), "SHA-256 differs"),
    "a flipped bit in the header": (lambda f: flip(f / "state.safetensors", 9), "SHA-256 differs"),
    "a flipped bit in the position": (lambda f: flip(f / "state.json", 12), "state.json is not what was written"),
    "another checkpoint's state": (lambda f: swap(f / "state.safetensors"), "SHA-256 differs"),
    "another checkpoint's manifest": (lambda f: swap(f / "manifest.json"), "it holds step 4"),
    "no state": (lambda f: (f / "state.safetensors").unlink(), "state.safetensors is missing"),
    "no position": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "a torn manifest": (lambda f: truncate(f / "manifest.json") or (f / "manifest.json").write_text("{"), "damaged"),
    "a manifest that is none": (lambda f: (f / "manifest.json").write_text('"x"'), "manifest.json is damaged"),
    "a folder for a file": (lambda f: (f / "state.json").unlink() or (f / "state.json").mkdir(), "state.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named_with_the_reason(checkpoints, damage):
    do, reason = DAMAGES[damage]
    do(checkpoints / "step-000006")
    said = []
    assert checkpoint.newest(checkpoints, said.append).name == "step-000004"
    assert len(said) == 1 and "step-000006" in said[0] and reason in said[0] and "using step-000004" in said[0]


def test_a_checkpoint_under_another_ones_name_is_passed_over(checkpoints):
    shutil.rmtree(checkpoints / "step-000006")
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000006")
    said = []
    assert checkpoint.newest(checkpoints, said.append).name == "step-000004"
    assert "it holds step 2" in said[0]


def test_where_no_checkpoint_is_good_each_is_named_with_its_reason(checkpoints):
    for number, path in enumerate(checkpoint.found(checkpoints)):
        (path / ("state.json", "state.safetensors", "manifest.json")[number]).unlink()
    with pytest.raises(RunError) as failure:
        checkpoint.newest(checkpoints)
    for part in ("step-000002: state.json is", "step-000004: state.safetensors is", "step-000006: manifest.json is"):
        assert part in str(failure.value)


def test_a_good_checkpoint_says_nothing_and_the_millionth_comes_after_the_one_before(checkpoints):
    said = []
    assert checkpoint.newest(checkpoints, said.append).name == "step-000006" and not said
    for name in ("step-999999", "step-1000000"):
        (checkpoints / name).mkdir()
    assert [path.name for path in checkpoint.found(checkpoints)][-2:] == ["step-999999", "step-1000000"]


@settings(
    max_examples=FUZZ,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(some.sampled_from(("state.safetensors", "state.json", "manifest.json")), some.data())
def test_any_change_of_any_file_is_found_or_changes_nothing(trained, tmp_path, name, data):
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        shutil.copytree(trained[1] / "checkpoints", folder)
    path = folder / "step-000006" / name
    before = path.read_bytes()
    at = data.draw(some.integers(0, len(before)))
    after = data.draw(
        some.sampled_from([before[:at], before[:at] + b"x" + before[at:], before[at:]])
        | some.binary(max_size=64).map(lambda new: before[:at] + new + before[at + len(new) :])
        | some.recursive(
            some.none() | some.booleans() | some.integers() | some.text(max_size=4),
            lambda inner: some.dictionaries(some.sampled_from(["format", "version", "step", "files", name]), inner),
        ).map(lambda value: json.dumps(value).encode())
    )
    path.write_bytes(after)
    try:
        used = checkpoint.newest(folder).name
        assert used == "step-000004" or loads_the_same(trained[1] / "checkpoints", folder, used)
    finally:
        path.write_bytes(before)


def loads_the_same(left, right, name):
    (scalars, tensors), (found, others) = checkpoint.read(left / name), checkpoint.read(right / name)
    return scalars == found and all(tensor.equal(others[key]) for key, tensor in tensors.items())


def test_the_run_goes_on_while_a_checkpoint_is_written_and_the_file_holds_its_own_step(trained, tmp_path, monkeypatch):
    profile, whole = trained
    real_write, real_step, stepped, overlapped = checkpoint.write, Scheduler.step, threading.Event(), []

    def slow(folder, step, *rest):
        if step < 6:  # the end waits for the last one
            overlapped.append(stepped.wait(timeout=30))
        real_write(folder, step, *rest)

    def step(self):
        real_step(self)
        if self.micro_step in (6, 10):
            stepped.set()
        elif self.micro_step == 8:
            stepped.clear()

    monkeypatch.setattr(checkpoint, "write", slow)
    monkeypatch.setattr(Scheduler, "step", step)
    train(profile, tmp_path / "run", False, QUIET)
    assert overlapped == [True, True]
    for name in ("step-000002", "step-000004", "step-000006"):
        state = "checkpoints", name, "state.safetensors"
        left, right = load_file(whole.joinpath(*state)), load_file((tmp_path / "run").joinpath(*state))
        assert all(tensor.equal(right[key]) for key, tensor in left.items())


def test_a_slow_disk_holds_the_next_checkpoint_back_and_the_pause_is_told(trained, tmp_path, monkeypatch):
    real_write, real_step, writing, issued = checkpoint.write, Scheduler.step, [], [0]

    def slow(folder, step, *rest):
        assert not writing  # one at a time
        writing.append(step)
        while step < 3 and issued[0] < step + 1:
            time.sleep(0.01)
        time.sleep(0.3)  # from the next step on
        real_write(folder, step, *rest)
        writing.clear()

    def step(self):
        real_step(self)
        issued[0] += 1

    monkeypatch.setattr(checkpoint, "write", slow)
    monkeypatch.setattr(Scheduler, "step", step)
    profile = tiny_profile(tmp_path, run={"steps": 3}, checkpoint={"every": 1})
    summary = train(profile, tmp_path / "run", False, QUIET)
    assert [p.name for p in checkpoint.found(tmp_path / "run" / "checkpoints")] == [f"step-00000{n}" for n in (1, 2, 3)]
    assert 100 < summary["checkpoint_pause_ms_max"] < 3000


@pytest.mark.parametrize("at", ["save_file", "digest", "flush"])
def test_a_disk_that_fills_up_is_told_at_the_next_checkpoint_and_leaves_the_good_one(tmp_path, monkeypatch, at):
    real = getattr(checkpoint, at)

    def full(*arguments):
        if any("step-000002" in str(argument) for argument in arguments):
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(checkpoint, at, full)
    with pytest.raises(RunError, match=r"checkpoint of step 2 .*No space left.*--resume"):
        train(tiny_profile(tmp_path, checkpoint={"every": 1}), tmp_path / "run", False, QUIET)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3  # it was told at the next one


def test_what_a_killed_writer_left_is_swept_away(trained, tmp_path):
    profile, whole = trained
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    for name in (".step-000006.partial", ".step-000001.removed.partial"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "state.safetensors").write_bytes(b"torn")
    assert train(profile, run, True, QUIET)["first_step"] == 4
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004", "step-000006"]


def test_a_resume_with_another_rate_is_allowed_and_said(trained, tmp_path, capsys):
    run = shutil.copytree(trained[1], tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    lower = tiny_profile(
        tmp_path, checkpoint={"every": 2}, optim={"lr": 1e-3}, target={"model": trained[0].target.model}
    )
    train(lower, run, True, Console(stderr=True, width=300))
    err = capsys.readouterr().err
    assert "optim.lr is 0.001, was 0.01 at step-000004: from here on not the bits of an unbroken run" in err


class AtTheSecondLook(LateFigures):
    """Figures of the newest step have never arrived when one looks for the first time, as on a busy device."""

    looked = 0

    def finished(self, wait=False):
        newest = self.pending[-1] if self.pending else 0
        if wait or newest == self.looked:
            return super().finished(wait)
        self.looked = newest
        return []


def test_an_ordinary_checkpoint_drains_nothing_and_follows_its_own_figures(trained, tmp_path, monkeypatch):
    profile, whole = trained
    real_write, real_drain, logged, drained = checkpoint.write, Scheduler.drain, {}, []

    def write(folder, step, *rest):
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        logged[step] = [json.loads(line)["step"] for line in lines][:step]
        real_write(folder, step, *rest)

    def drain(self):
        drained.append(self.micro_step)
        real_drain(self)

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(Scheduler, "drain", drain)
    monkeypatch.setattr(steps, "LateFigures", AtTheSecondLook)
    summary = train(profile, tmp_path / "run", False, QUIET)
    assert drained == [0, 12]  # at the start, and before the last one
    assert logged == {step: list(range(1, step + 1)) for step in (2, 4, 6)}
    assert 0 < summary["checkpoint_pause_ms_mean"] <= summary["checkpoint_pause_ms_max"]
    assert summary["checkpoint_held_ms_max"] is None  # no device was held
    for step in (2, 4, 6):
        assert loads_the_same(whole / "checkpoints", tmp_path / "run" / "checkpoints", f"step-{step:06d}")


def test_a_run_of_one_checkpoint_has_no_pause_to_tell(tmp_path):
    summary = train(tiny_profile(tmp_path, checkpoint={"every": 0}), tmp_path / "run", False, QUIET)
    assert summary["checkpoint_pause_ms_max"] is summary["checkpoint_pause_ms_mean"] is None
