"""Host memory: growth of the training or of its data process is told, once for each quarter; so are files left open."""

import gc
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.run import host
from draftgraph.engine.run.host import MIB, HostMemory, frozen_heap, private_bytes
from draftgraph.engine.steps import Run
from draftgraph.engine.train import train

# Takes 64 MiB more at every line that it reads.
LEAKS = "import sys; kept = []\nfor _ in sys.stdin: kept.append(b'x' * (64 << 20)); print(flush=True)"


@pytest.fixture
def leaking():
    process = subprocess.Popen([sys.executable, "-c", LEAKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


def leak(process):
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()


def test_a_process_that_leaks_is_told_at_each_quarter_that_it_grows(leaking, monkeypatch):
    monkeypatch.setattr(host, "LEAST", 100 * MIB)
    said = []
    memory = HostMemory({"the data process": leaking.pid}, said.append)
    leak(leaking)
    for step in range(10, 60, 10):  # 64, 128, 192, 256, 320 MiB: 128 over the first, and over that which was told
        memory.look(step)
        leak(leaking)
    assert [line.split(":")[0] for line in said] == ["step 30", "step 50"]
    assert "host memory of the data process grew from" in said[0] and "since step 10;" in said[0]
    assert "since step 30;" in said[1]
    assert 256 <= memory.growth_bytes / MIB < 260


def test_a_process_that_is_gone_has_no_memory():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert private_bytes(process.pid) == 0


def resources():
    gc.collect()  # shards stay mapped until then
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), children, threading.active_count()


def test_after_a_run_handles_threads_and_processes_are_as_before(tmp_path):
    profile = tiny_profile(tmp_path, checkpoint={"every": 1})
    train(profile, tmp_path / "first", False, Console(quiet=True))
    before = resources()
    summary = train(profile, tmp_path / "second", False, Console(quiet=True))
    assert resources() == before
    assert abs(summary["host_memory_growth_bytes"]) < 64 * MIB


def test_garbage_of_steps_is_collected_however_large_the_heap_is_that_the_run_was_built_from():
    built = [[number] for number in range(400_000)]
    gc.collect()

    class Node:
        alive = 0

        def __init__(self):
            self.itself = self
            Node.alive += 1

        def __del__(self):
            Node.alive -= 1

    def most_alive() -> int:
        most, recent = 0, deque(maxlen=5_000)  # outlive the youngest generations
        for _ in range(90_000):
            recent.append(Node())
            most = max(most, Node.alive)
        return most

    with frozen_heap():
        assert gc.get_freeze_count() > len(built)
        frozen = most_alive()
    gc.collect()
    assert gc.get_freeze_count() == 0 and Node.alive == 0
    assert frozen < most_alive()
    gc.collect()


def test_the_heap_is_frozen_before_the_time_of_the_steps_begins(tmp_path, monkeypatch):
    frozen, begin = [], Run.begin

    def noting(run, *args):
        frozen.append(gc.get_freeze_count())
        begin(run, *args)

    monkeypatch.setattr(Run, "begin", noting)
    train(tiny_profile(tmp_path), tmp_path / "run", False, Console(quiet=True))
    assert frozen[0] > 0 and gc.get_freeze_count() == 0
