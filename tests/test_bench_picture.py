"""The README's table and plot of bench receipts, from synthetic ones."""

import json
import subprocess
import sys

import pytest

from draftgraph.profiles.load import PEERS

SCRIPT = PEERS.parent / "data" / "draw_bench.py"


def write(folder, name, ratio, goals, figures, **changes):
    content = {
        "gpu": "NVIDIA H200",
        "quick": False,
        "ratio": ratio,
        "shown": {"ours": "7,900 tok/s", "peer": "5,000 tok/s" if ratio else "-", "share": "0.79 floor"},
        "goals": goals,
        "figures": figures,
        **changes,
    }
    (folder / f"bench-{name}.json").write_text(json.dumps(content))


def run(folder, out):
    command = [sys.executable, str(SCRIPT), "--results", str(folder), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_table_and_the_plot_are_those_of_the_receipts(tmp_path):
    write(tmp_path, "w27-var", 1.72, {"ratio": {"bound": 1.8, "met": False}}, {"ratio": 1.72})
    write(tmp_path, "w27-full", 1.58, {"ratio": {"bound": 1.5, "met": True}}, {"ratio": 1.58})
    write(tmp_path, "target", None, {"ceiling_share": {"bound": 0.78, "met": True}}, {"ceiling_share": 0.801})
    workspace = {"workspace_bytes": {"bound": 2**31, "met": True}}
    write(tmp_path, "cross-entropy", 0.9, workspace, {"workspace_bytes": 3 * 2**29})
    write(tmp_path, "observers", 0.998, {"added_percent": {"bound": 0.5, "met": True}}, {"added_percent": 0.2})
    done = run(tmp_path, tmp_path / "bench.svg")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2] == "| `w27-full` | 7,900 tok/s | 5,000 tok/s | 1.58 | 0.79 floor | ratio 1.58 (goal 1.50) |"
    assert lines[3].startswith("| `w27-var` |") and lines[3].endswith("| **ratio 1.72 (goal 1.80)** |")
    assert lines[4] == "| `target` | 7,900 tok/s | - | - | 0.79 floor | ceiling share 0.80 (goal 0.78) |"
    assert lines[5].endswith("| workspace 1.50 GiB (goal 2.00 GiB) |")
    assert lines[6].startswith("| `observers` |") and len(lines) == 7
    first = (tmp_path / "bench.svg").read_bytes()
    assert b"<svg" in first and len(first) > 2000
    run(tmp_path, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_bytes() == first


@pytest.mark.parametrize("changes", [{"gpu": None}, {"quick": True}])
def test_what_is_no_measurement_is_not_shown(tmp_path, changes):
    write(tmp_path, "w27-full", 1.58, {}, {}, **changes)
    done = run(tmp_path, tmp_path / "bench.svg")
    assert done.returncode == 1 and "bench-w27-full.json is no measurement" in done.stderr


def test_no_receipts_are_a_sentence(tmp_path):
    done = run(tmp_path, tmp_path / "bench.svg")
    assert done.returncode == 1 and "no bench-*.json" in done.stderr
