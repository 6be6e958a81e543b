"""Several hosts: two processes on this one, as torchrun starts them, summing over gloo."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import deal_as_for, tiny_profile

from draftgraph.engine.config import to_toml
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.errors import Interrupted, RunError, UsageError
from draftgraph.engine.run import checkpoint, joining
from draftgraph.engine.run.hosts import Hosts, joined, settings
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.train import train

QUIET = Console(quiet=True)


def start_hosts(folder: Path, profile, prelude: str = "", count: int = 2) -> list[subprocess.Popen]:
    """`draftgraph train` once per host, with what torchrun puts into the environment."""
    (folder / "profile.toml").write_text(to_toml(profile))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = f"import sys; from draftgraph.engine.cli import main; {prelude}sys.exit(main())"
    command = [sys.executable, "-c", program, "train", folder / "profile.toml", "--run", folder / "run"]
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


def masters(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "state.safetensors")


@pytest.mark.parametrize("drafters", [1, 2])
def test_two_hosts_train_the_weights_of_one(tmp_path, monkeypatch, drafters):
    deal_as_for(2 * drafters, monkeypatch)
    train(tiny_profile(tmp_path, optim={"accumulate": 4}), tmp_path / "one", False, QUIET)
    placement = {"targets": ["cpu"] * drafters, "drafters": ["cpu"] * drafters, "look_ahead": 1}
    profile = tiny_profile(tmp_path, optim={"accumulate": 4}, placement=placement)
    hosts = start_hosts(tmp_path, profile)
    said = [host.communicate(timeout=180)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    one, two = masters(tmp_path / "one", 6), masters(tmp_path / "run", 6)
    # AdamW turns rounding of a gradient near zero into a visible part of an update: compare tensors as wholes.
    for name in (name for name in one if name.startswith("master")):
        assert torch.linalg.vector_norm(one[name] - two[name]) < 1e-4 * torch.linalg.vector_norm(one[name]), name
    # The first host alone writes the run; the other keeps what is its own apart.
    assert not (tmp_path / "run" / "host-1" / "checkpoints").exists()
    lines = [(tmp_path / "run" / own / "metrics.jsonl").read_text().splitlines() for own in ("", "host-1")]
    assert [len(line) for line in lines] == [6, 6]


def first_host_after(hosts: list[subprocess.Popen], run: Path, sent: signal.Signals) -> str:
    """What the first host says once the second got a signal, after the first checkpoint; it ends within a minute."""
    try:
        deadline = time.monotonic() + 180
        while not checkpoint.found(run / "checkpoints") and time.monotonic() < deadline:
            assert hosts[0].poll() is None and hosts[1].poll() is None, hosts[0].communicate()[0]
            time.sleep(0.2)
        hosts[1].send_signal(sent)
        return hosts[0].communicate(timeout=60)[0]
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


def test_a_host_that_is_silent_ends_the_others(tmp_path):
    profile = tiny_profile(tmp_path, run={"steps": 100_000}, checkpoint={"every": 20}, optim={"accumulate": 4})
    sooner = "from draftgraph.engine.run import hosts; hosts.LOST_SECONDS = 6; hosts.GRACE_SECONDS = 1; "
    hosts = start_hosts(tmp_path, profile, sooner)
    said = first_host_after(hosts, tmp_path / "run", signal.SIGSTOP)  # as cut off: its connections stay open
    assert hosts[0].returncode == 5 and "host 1 has not been heard of for 6 s" in said
    assert checkpoint.step_of(checkpoint.newest(tmp_path / "run" / "checkpoints")) % 20 == 0


def test_a_signal_to_one_host_stops_all_after_the_same_step(tmp_path):
    profile = tiny_profile(tmp_path, run={"steps": 100_000}, checkpoint={"every": 20}, optim={"accumulate": 4})
    hosts = start_hosts(tmp_path, profile)
    said = first_host_after(hosts, tmp_path / "run", signal.SIGTERM)
    newest = checkpoint.step_of(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    assert hosts[0].returncode == 130 and f"stopped after step {newest} " in said


def test_hosts_write_the_first_ones_best_checkpoint_whatever_another_one_remembers(tmp_path):
    changes = {"eval": {"every": 1, "count": 2, "new_tokens": 8}, "checkpoint": {"every": 0, "keep_best": True}}
    profile = tiny_profile(tmp_path, optim={"accumulate": 4}, **changes)
    prelude = "import os; from draftgraph.engine.run import metrics; rank = int(os.environ['RANK']); "
    prelude += "metrics.Tally.measured = lambda self, step, found: (step, rank) in ((2, 0), (4, 1)); "
    hosts = start_hosts(tmp_path, profile, prelude)
    said = [host.communicate(timeout=180)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "run" / "checkpoints")] == [2, 6]


def test_an_interrupted_host_waits_for_one_that_still_writes(tmp_path):
    profile = tiny_profile(tmp_path, run={"steps": 100_000}, checkpoint={"every": 20}, optim={"accumulate": 4})
    slow = "import os, time; from draftgraph.engine.observers import Observers as O; finish = O.finish; "
    slow += "O.finish = lambda self: (os.environ['RANK'] == '0' and time.sleep(12), finish(self)); "
    slow += "from draftgraph.engine.run import hosts; hosts.LOST_SECONDS = 5; hosts.GRACE_SECONDS = 1; "
    hosts = start_hosts(tmp_path, profile, slow)
    said = first_host_after(hosts, tmp_path / "run", signal.SIGTERM)
    assert hosts[0].returncode == 130, said


def test_a_steady_state_that_breaks_on_one_host_stops_all_after_the_same_step(tmp_path):
    changes = {"run": {"steps": 100_000}, "log": {"every": 1}, "capture": {"watch": "strict"}}
    profile = tiny_profile(tmp_path, optim={"accumulate": 4}, **changes)
    prelude = "import os; from draftgraph.capture.watch import SteadyWatch as W; "
    prelude += "late = lambda self: {'capture': 'late'} if os.environ['RANK'] == '1' and self._last_step > 3 else {}; "
    prelude += "W._found = late; "
    hosts = start_hosts(tmp_path, profile, prelude)
    said = [host.communicate(timeout=180)[0] for host in hosts]
    newest = checkpoint.step_of(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    assert hosts[1].returncode == 5 and f"stopped after step {newest}, checkpoint written" in " ".join(said[1].split())
    assert hosts[0].returncode == 5 and "another host is gone" in " ".join(said[0].split()), said[0]
    lines = [(tmp_path / "run" / own / "metrics.jsonl").read_text().splitlines() for own in ("", "host-1")]
    assert [len(line) for line in lines] == [newest, newest] and newest < 20


def test_a_lost_host_ends_the_job_and_fewer_go_on(tmp_path, monkeypatch):
    profile = tiny_profile(tmp_path, run={"steps": 100_000}, checkpoint={"every": 20}, optim={"accumulate": 4})
    hosts = start_hosts(tmp_path, profile)
    said = first_host_after(hosts, tmp_path / "run", signal.SIGKILL)
    assert hosts[0].returncode == 5 and "another host is gone" in said and "--resume" in said
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    figures = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert checkpoint.step_of(newest) == len(figures)  # the last whole step, not that of the last interval
    alone = tiny_profile(
        tmp_path,
        run={"steps": 100_000},
        optim={"accumulate": 4},
        placement={"targets": ["cpu", "cpu"], "drafters": ["cpu"], "look_ahead": 1},
    )
    step, ours = Scheduler.step, []

    def few_steps(self):
        step(self)
        ours.append(self.micro_step)
        if len(ours) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Scheduler, "step", few_steps)
    told = Console(file=io.StringIO(), width=300)
    first = checkpoint.step_of(newest)
    with pytest.raises(Interrupted, match=f"stopped after step {first + 3} "):
        train(alone, tmp_path / "run", True, told)
    assert ours[0] == 4 * (first + 1)  # all micro-steps of all hosts
    for line in ("placement.hosts is 1, was 2", "placement.targets is 2, was 1"):
        assert f"{line} at {newest.name}: from here on not the bits" in told.file.getvalue()


def test_hosts_share_the_stream_of_micro_batches():
    buckets = [Bucket(2, 8, 2), Bucket(1, 16, 2)]
    assignment = [0] * 14 + [1] * 9
    whole = Schedule(assignment, buckets, seed=5, group=4).at(8)
    parts = [Schedule(assignment, buckets, seed=5, group=4, host=h, hosts=2).at(4) for h in range(2)]
    for _ in range(30):
        for part in parts:
            theirs, ours = next(whole), next(part)
            assert theirs.index == ours.index and theirs.row_ids.tolist() == ours.row_ids.tolist()


def test_one_process_is_one_host_without_a_network(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    said: list[str] = []
    with joined(tiny_profile(tmp_path), said.append) as hosts:
        assert (hosts.rank, hosts.count) == (0, 1) and hosts.folder(tmp_path) == tmp_path
        assert hosts.gathered([1.0]) == [[1.0]] and said == []
    assert Hosts(1, 1).folder(tmp_path) == tmp_path / "host-1"


def join(monkeypatch, profile, said=None, **environment) -> None:
    """Enter and leave `joined` in this process, with what torchrun would set."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with joined(profile, [].append if said is None else said.append):
        pass


PLACE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_step_that_cannot_be_dealt_to_the_hosts_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="multiple of 3"):
        join(monkeypatch, tiny_profile(tmp_path), **PLACE | {"WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE = 'abc'; it takes a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'; it takes a whole number from 1 on"),
        ({"RANK": "5"}, "RANK = '5'; it takes a whole number from 0 to 1"),
        ({"RANK": None}, "RANK is not set; it takes a whole number from 0 to 1"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x'; it takes a whole number from 1 to 65535"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "host 0 cannot listen at no-such-host.invalid:29500"),
    ],
)
def test_an_environment_that_names_no_meeting_place_is_one_sentence(tmp_path, monkeypatch, wrong, told):
    environment = {name: value for name, value in (PLACE | wrong).items() if value is not None}
    with pytest.raises(UsageError, match=told):
        join(monkeypatch, tiny_profile(tmp_path, optim={"accumulate": 4}), **environment)


def test_a_port_in_use_is_one_sentence(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(UsageError, match=f"cannot listen at localhost:{port}: the port is in use"):
            join(monkeypatch, tiny_profile(tmp_path, optim={"accumulate": 4}), **PLACE | {"MASTER_PORT": port})


@pytest.mark.parametrize("rank, lacking", [("0", "1 of 2 hosts (RANK 1)"), ("1", "host 0 (Connection refused)")])
def test_a_host_that_waits_says_for_whom_and_gives_up(tmp_path, monkeypatch, rank, lacking):
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.5)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    said: list[str] = []
    profile = tiny_profile(tmp_path, optim={"accumulate": 4})
    with pytest.raises(RunError) as error:
        join(monkeypatch, profile, said, **PLACE | {"RANK": rank, "MASTER_PORT": port})
    assert said == [f"host {rank} is waiting for {lacking} at localhost:{port}, 0 s at most"]
    assert f"at localhost:{port} for {lacking}" in str(error.value)


def test_a_signal_ends_a_host_that_waits_for_an_answer(tmp_path, monkeypatch):
    def on_signal(number, _):
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "JOIN_SECONDS", 20.0)
    profile = tiny_profile(tmp_path, optim={"accumulate": 4})
    with socket.socket() as mute:  # listens, and is no store
        mute.bind(("localhost", 0))
        mute.listen()
        place = PLACE | {"RANK": "1", "MASTER_PORT": str(mute.getsockname()[1])}
        previous = signal.signal(signal.SIGALRM, on_signal)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            with pytest.raises(KeyboardInterrupt):
                join(monkeypatch, profile, **place)
        finally:
            signal.signal(signal.SIGALRM, previous)


def test_what_hosts_must_share_leaves_out_their_logs_and_paths_of_rows(tmp_path):
    one = tiny_profile(tmp_path)
    assert settings(one) == settings(tiny_profile(tmp_path, log={"every": 5}))
    assert settings(one) != settings(tiny_profile(tmp_path, checkpoint={"every": 7}))
    assert "data" not in settings(one)


def test_resume_is_advised_only_where_there_is_a_checkpoint():
    hosts = Hosts(1, 2)
    assert "--resume" not in hosts.advice() and "start again" in hosts.advice()
    hosts.last_written = 0
    assert "with --resume" in hosts.advice()


def test_a_lost_host_is_told_without_the_source_of_a_library():
    text = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44456. This is typically"
    lost = Hosts(1, 2).lost(RuntimeError(text))
    assert str(lost) == "another host is gone (Connection closed by peer [127.0.0.1]:44456)"


def test_hosts_that_run_different_profiles_are_refused_before_they_can_wait_for_each_other(tmp_path):
    own = "import os; sys.argv += os.environ['RANK'] == '1' and ['--set', 'checkpoint.every=5', "
    own += "'placement.drafters=[\"cpu\", \"cpu\"]', 'placement.look_ahead=1'] or []; "
    # Heartbeats without a rest: one that outlives the interpreter aborts the process.
    own += "from draftgraph.engine.run import hosts; hosts.BEAT_SECONDS = 0.0; "
    hosts = start_hosts(tmp_path, tiny_profile(tmp_path, optim={"accumulate": 4}), own)
    said = [" ".join(host.communicate(timeout=60)[0].split()) for host in hosts]
    assert [host.returncode for host in hosts] == [5, 5], said
    for text in said:
        assert "placement.drafters = ['cpu', 'cpu'] on host 1, ['cpu'] on host 0" in text
        assert "checkpoint.every = 5 on host 1, " in text
