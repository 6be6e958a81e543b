"""The live panel: what it shows, where it is drawn, and that lines take its place elsewhere."""

import io
import json
import subprocess
import sys
import time

import pytest
from recorded_run import write_run
from rich.console import Console
from test_run_health import ROLLS_BACK, not_finite_from
from tiny import tiny_profile

from draftgraph.engine import observers
from draftgraph.engine.observers import is_terminal
from draftgraph.engine.progress import PlainLines
from draftgraph.engine.run.panel import View, clock
from draftgraph.engine.train import train
from draftgraph.profiles.load import DATA

GIB = 2**30


def view(**changes):
    return View(
        **{
            "title": "run[1]",
            "total": 5000,
            "first_step": 1000,
            "padding": 0.89,
            "devices": lambda: {
                "cuda:0": {
                    "used_bytes": 86 * GIB,
                    "total_bytes": 140 * GIB,
                    "utilisation": 97,
                    "power_w": 612.0,
                    "sm_mhz": 1980,
                    "temperature_c": 61,
                    "throttled": ["power cap"],
                },
                "cuda:1": {"used_bytes": None, "utilisation": None},
                "host": {"used_bytes": 3 * GIB},
            },
            "sentences": lambda: ["cuda:0: flat: 0 MiB over 12 minutes (warm-up: +80.0 GiB)"],
            **changes,
        }
    )


def drawn(shown, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(shown)
    return console.file.getvalue()


def test_the_panel_of_a_run_that_was_rolled_back_counts_from_there(tmp_path, monkeypatch):
    shown = []

    def remember(**fields):
        shown.append((fields["first_step"], fields["step"]))
        return View(**fields)

    monkeypatch.setattr(observers, "View", remember)
    monkeypatch.setattr(observers, "is_terminal", lambda console: True)
    not_finite_from(monkeypatch, step=7, lowest_share=1.0)
    changes = {"run": {"steps": 12}, "optim": ROLLS_BACK, "checkpoint": {"every": 1, "keep": 3}}
    train(tiny_profile(tmp_path, **changes), tmp_path / "run", False, Console(file=io.StringIO()))
    assert shown == [(0, 0), (5, 5)]


def test_the_panel_shows_where_the_run_is_and_what_its_devices_do():
    shown = view(step=2000, loss=2.3456, acceptance=1.92, real_acceptance=1.6, tokens_per_s=57653.4, skipped=2)
    shown.started = time.monotonic() - 600
    text = drawn(shown)
    for said in (
        "draftgraph train: run[1]",
        "step 2,000 of 5,000",
        "ETA 0:30:00, 0:10:00 so far",
        "loss 2.346",
        "simulated acceptance 1.920, real 1.600 (bonus counted)",
        "57,653 real tokens/s",
        "padding 11 %",
        "2 updates skipped",
        "97 % busy, 612 W, 1980 MHz, 61 \N{DEGREE SIGN}C, power cap",
        "86.0 GiB of 140, flat: 0 MiB over 12 minutes",
    ):
        assert said in " ".join(text.replace("\u2502", " ").split()), said
    assert "of this process" not in text


def test_the_panel_is_whole_before_the_first_figure_and_on_a_narrow_terminal():
    first = view(step=1000, devices=lambda: {"host": {"used_bytes": 3 * GIB}}, sentences=list)
    text = drawn(first)
    assert "ETA -" in text and "loss -" in text and "3.00 GiB of this process" in text
    assert all(len(line) <= 40 for line in drawn(view(), width=40).splitlines())


def test_a_clock_has_hours():
    assert clock(3 * 3600 + 65.9) == "3:01:05"


@pytest.mark.parametrize(
    "terminal, environment, panel",
    [(True, {}, True), (True, {"CI": "true"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_a_panel_is_for_terminals_that_somebody_looks_at(monkeypatch, terminal, environment, panel):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_terminal(Console(file=io.StringIO(), force_terminal=terminal)) == panel


@pytest.mark.parametrize("terminal, ci", [(True, ""), (True, "true"), (False, "")])
def test_a_run_draws_a_panel_in_a_terminal_and_lines_elsewhere(tmp_path, monkeypatch, terminal, ci):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(PlainLines, "EVERY_SECONDS", 0.0)
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    train(tiny_profile(tmp_path), tmp_path / "run", False, console)
    text = console.file.getvalue()
    panel = terminal and not ci
    assert ("draftgraph train: run" in text and "step 6 of 6" in text and "ETA 0:00:00" in text) == panel
    assert ("step 4 of 6: loss " in text) != panel
    assert f"report: {tmp_path}" in text.replace("\n", "")


def test_the_panel_of_a_finished_run_is_drawn_from_its_folder(tmp_path):
    run = write_run(tmp_path / "run", 50)
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["ours"] |= {"first_step": 0, "real_acceptance": 1.234}
    (run / "receipt.json").write_text(json.dumps(receipt))
    done = subprocess.run([sys.executable, str(DATA / "draw_panel.py"), str(run), str(tmp_path / "panel.svg")])
    assert done.returncode == 0
    drawn = (tmp_path / "panel.svg").read_text()
    assert "1.234" in drawn and "cuda:1" in drawn
