"""Preparation on many cores, killed and started again: always the bytes of one process that was never stopped."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from test_data_template import chat_tokenizer

from draftgraph.engine.data import prepare as prepare_module
from draftgraph.engine.data import workers as workers_module
from draftgraph.engine.data import writer as writer_module
from draftgraph.engine.data.journal import Journal
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

TOKENIZER = chat_tokenizer()
SETTINGS = {"max_context": 64, "block_size": 4, "vocab_size": len(TOKENIZER), "anchor_rule": "next-supervised"}
SETTINGS |= {"target": "tiny", "progress": True}
# Run as a program: prepares a folder, and is killed where the journal gets its line number N (the first is its header).
VICTIM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_data_resume as here
folder, line, workers = here.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
append, lines = here.Journal.append, [0]
def counted(self, entry):
    lines[0] += 1
    if lines[0] == line:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, entry)
here.Journal.append = counted
here.small_pieces()
here.run(folder, workers=workers)
"""


def small_pieces(patch=setattr):
    """Chunks and shards so small that a few rows make many."""
    patch(prepare_module, "CHUNK_ROWS", 8)
    patch(writer_module.ShardWriter.__init__, "__kwdefaults__", {"target": "", "shard_tokens": 900, "command": None})


def inputs(folder):
    """Two files, with all that the doctor must tell in order: duplicates, bad lines, long rows, a cut list."""
    rows = []
    for number in range(100):
        answer = f"yes sir {number % 90} " + "yes " * (number % 30)
        rows.append({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]})
    lines = [json.dumps(row) if number % 7 else "{broken" for number, row in enumerate(rows)]
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("\n".join(lines))
    (folder / "in" / "b.json").write_text(json.dumps(rows[60:] + rows[:8])[:-40])
    return folder


def run(folder, **changes):
    return prepare([folder / "in"], Template(TOKENIZER), folder / "out", **{**SETTINGS, **changes})


def content(folder):
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def kill_at(folder, line, workers=1):
    program = [sys.executable, "-W", "ignore", "-c", VICTIM, str(Path(__file__).parent), str(folder), str(line)]
    process = subprocess.run([*program, str(workers)], capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    return folder / ".out.partial"


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """The folder prepared by one process without a stop; its shards are moved aside."""
    small_pieces(monkeypatch.setattr)
    summary = run(inputs(tmp_path), workers=1)
    expected = content(tmp_path)
    assert summary["rows_skipped"]["duplicate"] > 20 and summary["rows_skipped"]["bad json"] == 15
    assert summary["shards"] > 3
    (tmp_path / "out").rename(tmp_path / "first")
    return tmp_path, summary, expected


def test_shards_and_report_do_not_depend_on_the_number_of_workers(whole):
    folder, summary, expected = whole
    assert run(folder, workers=3) == summary
    assert content(folder) == expected


@pytest.mark.parametrize(("lines", "workers"), [((2,), 1), ((6, 9), 1), ((9,), 2)])
def test_a_killed_preparation_goes_on_to_the_same_bytes(whole, capsys, lines, workers):
    folder, summary, expected = whole
    for line in lines:
        partial = kill_at(folder, line, workers)
        assert not (folder / "out").exists() and not (partial / "shards.json").exists()
    assert run(folder, workers=workers) == summary
    assert content(folder) == expected
    # Killed at the line of the first chunk, nothing was done.
    assert ("going on behind" in capsys.readouterr().err) == (lines != (2,))
    assert not partial.exists()


def test_rows_behind_the_last_line_of_the_journal_are_dropped_and_done_again(whole):
    folder, summary, expected = whole
    partial = kill_at(folder, 12)
    for name in ("tokens-00001.npy", "mask-00001.npy", "tokens-00007.npy"):
        with (partial / name).open("ab") as file:
            file.write(b"rows that the journal does not tell of")
    with (partial / "journal.jsonl").open("ab") as file:
        file.write(b'{"file":0,"row":9999,"chec')
    assert run(folder) == summary
    assert content(folder) == expected


def test_a_damaged_partial_folder_is_started_over(whole, capsys):
    folder, summary, expected = whole
    partial = kill_at(folder, 12)
    file = partial / "tokens-00000.npy"
    file.write_bytes(file.read_bytes()[:-400] + b"\1" * 400)
    assert run(folder) == summary
    assert content(folder) == expected
    assert "going on" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"), [({"max_context": 32}, "rules"), ({"strict": True}, "switches"), ({}, "inputs")]
)
def test_another_command_or_other_inputs_start_over_and_say_so(whole, capsys, change, named):
    folder, *_ = whole
    kill_at(folder, 12)
    if not change:
        os.utime(folder / "in" / "a.jsonl", ns=(1, 1))
    with pytest.raises(DataError, match="rows: 1 read, 0 used") if "strict" in change else nullcontext():
        run(folder, **change)
    err = capsys.readouterr().err
    assert f"starting over: an interrupted run had other {named}" in err and "going on" not in err


def test_ctrl_c_keeps_what_was_done_and_a_bad_row_under_strict_does_not(whole, monkeypatch):
    folder, summary, expected = whole
    append = Journal.append

    def interrupted(self, entry):
        append(self, entry)
        if entry.get("row") == 48:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(folder, workers=2)
    assert (folder / ".out.partial").exists()
    assert run(folder) == summary
    assert content(folder) == expected
    with pytest.raises(DataError, match=r"--strict is on\nrows: 1 read, 0 used"):
        run(folder, strict=True, workers=2)
    assert not (folder / ".out.partial").exists()


def test_two_preparations_of_one_folder_are_refused(whole):
    folder, *_ = whole
    (folder / ".out.partial").mkdir()
    other = Journal(folder / ".out.partial" / "journal.jsonl", {})
    with pytest.raises(DataError, match="another `prepare` writes these shards"):
        run(folder)
    other.close()


def test_a_worker_that_dies_is_an_error_and_the_same_command_goes_on(whole, monkeypatch):
    folder, summary, expected = whole
    receive = workers_module._receive
    answers = []

    def received(pipe):
        answers.append(receive(pipe))
        if len(answers) == 4:
            for process in pool[0]._processes:
                process.kill()
        return answers[-1]

    pool = []
    start = workers_module.Workers.__init__
    monkeypatch.setattr(workers_module.Workers, "__init__", lambda self, *a: (pool.append(self), start(self, *a))[1])
    with monkeypatch.context() as patch:
        patch.setattr(workers_module, "_receive", received)
        with pytest.raises(DataError, match="a worker process of prepare was ended by signal 9"):
            run(folder, workers=2)
    assert all(process.poll() is not None for process in pool[0]._processes)
    assert run(folder, workers=2) == summary
    assert content(folder) == expected


def test_workers_start_without_torch_and_end_with_their_parent():
    code = (
        "import os, pickle, sys, draftgraph.engine.data.workers as workers\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "from test_data_resume import TOKENIZER, Template\n"
        "rules = workers.Rules(64, 4, len(TOKENIZER), 'in-row')\n"
        "pool = workers.Workers(workers.Work(Template(TOKENIZER), rules, None), 2)\n"
        "print(*[process.pid for process in pool._processes], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    tests = Path(__file__).parent
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tests, timeout=120)
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2, found.stderr
    # The workers hold the other end of our stderr: `run` returned, so they are gone, and they said nothing.
    assert found.stderr == ""
