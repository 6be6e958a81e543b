"""wandb and TensorBoard beside a run: whatever happens to them, the run goes on as if they were not there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_wandb import install
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.errors import UsageError
from draftgraph.engine.run import loggers
from draftgraph.engine.run.loggers import Loggers, log_export, wandb_mode, wanted_sinks
from draftgraph.engine.train import train

SECRET = "5ecre7" * 6 + "abcd"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "profile.toml").write_text("[run]\nsteps = 5\n")
    return run


def end(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_run_tells_wandb_figures_summary_and_files_under_one_id_after_a_resume(tmp_path, fake):
    values = {"log": {"every": 2, "wandb": "offline"}, "checkpoint": {"every": 3}}
    summary = train(tiny_profile(tmp_path, **values), tmp_path / "run", False, Console(quiet=True))
    assert summary["log_messages_dropped"] == 0
    (init,) = fake("init")
    assert init["mode"] == "offline" and init["resume"] == "allow" and init["config"]["run"]["steps"] == 6
    figures = fake("log")
    assert [line["step"] for line in figures if "loss" in line] == [2, 4, 6]
    assert {"loss", "acceptance", "accuracy/slot 1", "lr"} <= set(figures[0]) and "host/used_bytes" in figures[1]
    (told,) = fake("summary")
    assert told["final/steps"] == 6 and told["final/loss_last"] == summary["loss_last"]
    (artefact,) = fake("artefact")
    assert artefact[1:] == ["run", "receipt.json", "report.html", "profile.toml", "warmup.json", "buckets.json"]
    assert fake("finish") == [0]
    # As after an interruption: the last checkpoint is gone.
    subprocess.run(["rm", "-r", str(tmp_path / "run" / "checkpoints" / "step-000006")], check=True)
    train(tiny_profile(tmp_path, **values), tmp_path / "run", True, Console(quiet=True))
    assert [init["id"] for init in fake("init")] == [init["id"]] * 2
    exported = tmp_path / "drafter"
    exported.mkdir()
    assert "wandb: offline" in log_export(tmp_path / "run", exported)
    assert fake("artefact")[-1] == [f"export-{init['id']}", "model", "drafter"] and len(fake("init")) == 3


def test_a_slow_network_drops_and_counts_and_never_waits(folder, fake, monkeypatch):
    monkeypatch.setenv("FAKE_SLOW", "0.2")
    monkeypatch.setattr(loggers, "PIPE_BYTES", 2**16)
    log = Loggers(folder, ["wandb=offline"])
    slowest = 0.0
    for step in range(3000):
        since = time.perf_counter()
        log.log(step, {"loss": 1.0, "note": "x" * 60})
        slowest = max(slowest, time.perf_counter() - since)
    assert log.dropped > 1000 and log.sent + log.dropped == 3000
    assert slowest < 0.5  # a scheduler's slice, not a message's time
    since = time.perf_counter()
    said = log.close([], patience=0.5)
    assert time.perf_counter() - since < 3 and "still writing" in said and "messages were dropped" in said
    end(log.process)


def test_a_login_that_fails_is_written_offline(folder, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("FAKE_LOGIN", "1")
    sinks = wanted_sinks("auto", False)
    assert sinks == ["wandb=online"]
    log = Loggers(folder, sinks)
    log.log(1, {"loss": 2.0})
    assert log.close([]).startswith("wandb: offline, run ")
    assert [init["mode"] for init in fake("init")] == ["offline"] and fake("log") == [{"step": 1, "loss": 2.0}]
    assert "user is not logged in" in (folder / "loggers.log").read_text()


def test_a_package_that_crashes_is_told_and_costs_nothing(folder, fake, monkeypatch):
    monkeypatch.setenv("FAKE_IMPORT", "1")
    log = Loggers(folder, ["wandb=offline"])
    log.log(1, {"loss": 2.0})
    assert log.close([]).startswith("no logger started: see ")
    assert "a broken package" in (folder / "loggers.log").read_text()


def test_a_process_that_dies_is_not_missed(folder, fake):
    log = Loggers(folder, ["wandb=offline"])
    end(log.process)
    for step in range(10):
        log.log(step, {"loss": 1.0})
    assert log.dropped == 10 and "10 of 10 messages were dropped" in log.close([])


def test_a_full_disk_is_told_and_costs_nothing(folder, fake):
    (folder / "loggers.log").mkdir()
    log = Loggers(folder, ["wandb=offline"])
    log.log(1, {"loss": 1.0})
    assert log.close([]).startswith("no wandb=offline: ")
    (folder / "loggers.log").rmdir()
    (folder / ".loggers.json.partial").symlink_to("/dev/full")
    log = Loggers(folder, ["wandb=offline"])
    log.log(1, {"loss": 1.0})
    log.close([])
    assert log.process.returncode == 0 and fake("init") == []  # without a state there is no id to keep


def test_a_signal_to_every_process_of_a_job_is_for_the_run(folder, fake):
    log = Loggers(folder, ["wandb=offline"])
    log.log(1, {"loss": 1.0})
    while not fake("log"):
        time.sleep(0.05)
    log.process.send_signal(signal.SIGTERM)
    log.log(2, {"loss": 1.0})
    log.close([])
    assert [line["step"] for line in fake("log")] == [1, 2] and fake("finish") == [0]


def test_half_a_message_is_left_out(folder, fake):
    log = Loggers(folder, ["wandb=offline"])
    os.write(log.pipe, b'{"step": 1, "figu\n')
    log.log(2, {"loss": 1.0})
    assert log.close([]).startswith("wandb: offline")
    assert fake("log") == [{"step": 2, "loss": 1.0}] and fake("finish") == [0]


def test_a_run_that_breaks_is_marked_so(folder, fake):
    log = Loggers(folder, ["wandb=offline"])
    log.log(1, {"loss": 1.0})
    log.abandon()
    log.process.wait(30)
    assert fake("finish") == [1] and fake("summary") == []


def test_no_key_reaches_the_run_folder(folder, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    log = Loggers(folder, ["wandb=offline"])
    log.close([folder / "profile.toml"])
    assert fake("finish") == [0]
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "environment, wanted, mode",
    [
        ({}, "auto", "offline"),
        ({"WANDB_API_KEY": SECRET}, "auto", "online"),
        ({"WANDB_API_KEY": SECRET}, "offline", "offline"),
        ({"WANDB_MODE": "disabled"}, "auto", "off"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET}, "auto", "offline"),
        ({"WANDB_API_KEY": SECRET}, "off", "off"),
        ({}, "online", "online"),
    ],
)
def test_wandb_is_offline_without_a_key(tmp_path, monkeypatch, environment, wanted, mode):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(wanted) == mode


def test_a_login_left_by_wandb_is_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_mode("auto") == "online"


def test_a_package_that_is_missing_is_an_error_only_where_it_is_named(monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    assert wanted_sinks("auto", False) == []
    with pytest.raises(UsageError, match=r'log\.wandb = "online" needs the package: pip install wandb'):
        wanted_sinks("online", False)
    with pytest.raises(UsageError, match=r"log\.tensorboard = true needs the package: pip install"):
        wanted_sinks("off", True)


def test_the_real_wandb_writes_offline_with_a_home_that_may_not_be_written(folder, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    home = tmp_path / "home"
    home.mkdir()
    # Root may write a read-only folder; one below a file nobody can.
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    (folder / "report.html").write_text("<!doctype html><title>a report</title>")
    log = Loggers(folder, ["wandb=offline"])
    for step in range(20):
        log.log(step, {"loss": 1.0 / (step + 1)})
    said = log.close([folder / "report.html", folder / "profile.toml"])
    assert said.startswith("wandb: offline, run ") and "dropped" not in said, (folder / "loggers.log").read_text()
    identity = json.loads((folder / "loggers.json").read_text())["wandb_id"]
    (written,) = (folder / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    content = written.read_bytes()
    assert b"loss" in content and b"report" in content
    assert not [p for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


def test_tensorboard_takes_the_same_figures(folder):
    pytest.importorskip("tensorboard")
    log = Loggers(folder, ["tensorboard"])
    log.log(3, {"loss": 1.5})
    assert log.close([]).startswith("TensorBoard: tensorboard --logdir ")
    (events,) = (folder / "tensorboard").glob("events*")
    assert b"loss" in events.read_bytes()


def test_the_process_imports_neither_torch_nor_wandb_before_it_needs_them():
    code = "import sys, draftgraph.engine.run.log_process; assert not {'torch', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
