"""A whole run with everything that can look at it, and the same with nothing."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from fake_wandb import install
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.run import loggers
from draftgraph.engine.train import train

FIGURES = ("step", "loss", "acceptance", "accuracy_per_slot", "grad_norm", "lr", "skipped", "real_tokens")


def watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, every: int = 1, **changes: Any
) -> tuple[dict[str, Any], Any]:
    """The summary of a run with a panel, dense samples and wandb, and what wandb was told."""
    told = install(folder, monkeypatch)
    # The fake stands for a package that need not be installed.
    real = importlib.util.find_spec
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: name == "wandb" or real(name))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    log = {"every": every, "wandb": "offline", "sample_seconds": 0.02}
    return train(tiny_profile(folder, **changes, log=log), folder / "watched", False, console), told


def bare(folder: Path, **changes: Any) -> dict[str, Any]:
    """The summary of the same run, unwatched."""
    log = {"every": 10**6, "wandb": "off", "sample_seconds": 0.0}
    return train(tiny_profile(folder, **changes, log=log), folder / "bare", False, Console(quiet=True))


def figures_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the hours."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in FIGURES} for line in lines]
