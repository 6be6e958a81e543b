"""Our exports in code that nobody here wrote, where its wheel is installed; `make test-peers` adds speculators."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run(script: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, HERE / script, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    run("make_cases.py", folder)
    return folder


@pytest.mark.parametrize("peer", ["dflash", "specforge"])
def test_exports_load_draft_and_decode_the_same_elsewhere(peer, cases):
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"needs the wheel {peer}")
    out = run(f"peers/check_{peer}.py", cases)
    assert [line.split()[0] for line in out.splitlines()] == ["sliding", "tied", "untied", "wide-window"]
