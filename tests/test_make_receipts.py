"""The script that makes the GPU receipts again, on commands that a CPU can run."""

import runpy
import shlex

import pytest
from tiny import tiny_profile

from draftgraph.engine.cli import parser
from draftgraph.engine.config import to_toml
from draftgraph.profiles.load import DATA

SCRIPT = DATA / "make_receipts.py"


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


def test_receipts_and_run_folders_come_back_whatever_became_of_the_rest(tmp_path, script):
    (tmp_path / "tiny.toml").write_text(to_toml(tiny_profile(tmp_path)))
    (work := tmp_path / "work").mkdir()
    (out := tmp_path / "out").mkdir()
    Part, make = script["Part"], script["make"]
    run = Part("", 120, (f"train {tmp_path}/tiny.toml --run run", "plan nowhere"))
    assert make("tiny", run, out, work) == "status 2"
    assert {"receipt.json", "warmup.json", "metrics.jsonl", "report.html"} <= {
        path.name for path in (out / "tiny-run").iterdir()
    }
    assert not (out / "tiny-run" / "checkpoints").exists() and "nowhere" in (out / "tiny.log").read_text()
    others = (f"warmup {tmp_path}/tiny.toml --run warmed", f"trace {tmp_path}/tiny.toml --run traced --steps 2")
    assert make("others", Part("", 120, others), out, work) == "done"
    assert (out / "others-warmed" / "warmup.json").is_file() and (out / "others-traced" / "trace.json").is_file()
    assert not list(out.rglob("steps.*"))
    assert make("slow", Part("", 1, ("bench attention",)), out, work) == "ended after 1 s"


def test_a_receipt_is_there_while_its_command_goes_on(tmp_path, script):
    (work := tmp_path / "work").mkdir()
    (out := tmp_path / "out").mkdir()
    command = tmp_path / "command.py"
    command.write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path('bench').mkdir()\n"
        "pathlib.Path('bench/bench-a.json').write_text('{}')\n"
        f"seen = pathlib.Path({str(out / 'bench-a.json')!r})\n"
        "sys.exit(not any(seen.exists() or time.sleep(0.1) for _ in range(300)))\n"
    )
    assert script["make"]("a", script["Part"]("", 60, (str(command),)), out, work) == "done"


def test_every_part_is_made_of_commands_that_there_are(script):
    for part in script["PARTS"].values():
        for command in part.commands:
            first, *rest = shlex.split(command)
            if first.endswith(".py"):
                assert (DATA.parent / first).is_file()
            else:
                parser().parse_args([first, *rest])
