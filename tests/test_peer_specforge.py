"""Our step against SpecForge's own code, where its wheel is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "profiles" / "peers" / "compare_specforge.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(importlib.util.find_spec("specforge") is None, reason="needs the wheel specforge 0.2.0")
def test_step_and_export_agree_with_specforge_at_random_shapes():
    done = run("--cases", "6", "--seed", "100")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("specforge") is not None, reason="the wheel is installed")
def test_without_the_wheel_the_comparison_says_so_and_passes():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Skipped: ")
