"""Everything that looks at a run, on a GPU: no wait, no allocation, flat memory, the same bits; NVML as it is here."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import ordinary_rows
from watched_run import bare, figures_of, watched

from draftgraph.capture import nvml

pytestmark = pytest.mark.gpu

RUN = {
    "rows": ordinary_rows(40),
    "target": {"dtype": "bfloat16"},
    "run": {"steps": 120},
    "checkpoint": {"every": 0},
    "capture": {"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
    "placement": {"targets": ["cuda:0"], "drafters": ["cuda:0"]},
}
STATE = "checkpoints/step-000120/state.safetensors"


def test_a_captured_run_that_is_watched_waits_for_nothing_and_trains_the_same_bits(tmp_path, monkeypatch):
    summary, told = watched(tmp_path, monkeypatch, **RUN)
    for figure in ("host_syncs_per_step", "alloc_bytes_per_step", "reserved_range_bytes", "device_used_range_bytes"):
        assert summary[figure] == 0, figure
    assert summary["steady_state"] == "as warm-up left it" and summary["log_messages_dropped"] == 0
    assert "cuda:0: flat: 0 MiB over" in summary["device_memory"] and " MHz, " in summary["device_clocks"]
    logged = [line for line in told("log") if "loss" in line]
    assert len(logged) == 120
    # A step may be faster than the next sample.
    assert any(line.get("host/used_bytes", 0) > 0 for line in told("log"))
    assert any(line.get("cuda:0/used_bytes", 0) > 0 for line in told("log"))
    bare(tmp_path, **RUN)
    left, right = (load_file(tmp_path / name / STATE) for name in ("watched", "bare"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert figures_of(tmp_path / "watched") == figures_of(tmp_path / "bare")
    samples = [json.loads(line) for line in (tmp_path / "watched" / "devices.jsonl").read_text().splitlines()]
    used = {line["phase"]: line["used_bytes"] for line in samples if line.get("device") == "cuda:0"}
    assert used["steady"] >= used["warm-up"] > 0
    assert "Used memory per device" in (tmp_path / "watched" / "report.html").read_text()


def test_nvml_tells_of_this_device():
    (handle,) = nvml.open_handles(nvml.uuids([0]))
    reading = nvml.read(handle)
    assert reading.used_bytes is not None and reading.total_bytes is not None
    assert 0 < reading.used_bytes < reading.total_bytes
    print(reading)
