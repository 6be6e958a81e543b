"""A wandb that writes what it is told to a file, and fails as its environment says; for the process behind loggers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKE = """
import json, os, time
if os.environ.get("FAKE_IMPORT"):
    raise RuntimeError("a broken package")

def say(**what):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Summary(dict):
    def update(self, values):
        say(summary=values)

class Run:
    url = "https://example.invalid/run"
    summary = Summary()
    def __init__(self, **settings):
        if settings["mode"] == "online" and os.environ.get("FAKE_LOGIN"):
            raise RuntimeError("user is not logged in")
        self.id, self.dir = settings["id"], str(settings["dir"]) + "/wandb/offline-1/files"
        say(init={name: settings[name] for name in ("id", "mode", "resume", "project", "config")})
    def define_metric(self, *names, **more): pass
    def log(self, figures):
        time.sleep(float(os.environ.get("FAKE_SLOW", "0")))
        say(log={k: v for k, v in figures.items() if k != "report"})
    def log_artifact(self, artefact):
        say(artefact=artefact.held)
    def finish(self, exit_code):
        say(finish=exit_code)

class Artifact:
    def __init__(self, name, kind):
        self.held = [name, kind]
    def add_file(self, path):
        self.held.append(os.path.basename(path))
    add_dir = add_file

Html = Settings = lambda *arguments, **more: None
init = lambda **settings: Run(**settings)
teardown = lambda: None
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Put it before the real package, for the process; returns what it was told so far."""
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(FAKE)
    paths = [str(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_LOG", str(folder / "told.jsonl"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def told(kind: str) -> list[Any]:
        path = folder / "told.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line[kind] for line in lines if kind in line]

    return told
