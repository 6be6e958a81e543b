"""The README quotes receipts, and nothing else."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from draftgraph.profiles.load import WARMUP_SCHEMA

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = sorted((ROOT / "profiles" / "results").glob("*.json"))
BENCHES = [path for path in RESULTS if path.name.startswith("bench-")]
TRACES = [path for path in RESULTS if path.name.startswith("trace-")]
LOSSES = [path for path in RESULTS if path.name.startswith("loss-")]
RECEIPTS = [path for path in RESULTS if path not in BENCHES + TRACES + LOSSES]


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_the_figures_of_a_receipt_are_those_of_the_readme(path):
    receipt = json.loads(path.read_text())
    assert {"workload", "gpu", "torch", "commit", "date", "profile", "ours"} <= set(receipt)
    if receipt["workload"] == "prepare":
        assert f"{receipt['ours']['tokens_per_s']:,.0f}" in README and f"{receipt['ratio']:.2f}" in README
        assert f"{receipt['ours']['collate_ms']:.1f} ms" in README
        return
    if receipt["workload"] == "soak":
        ours = receipt["ours"]
        assert ours["wrong_bits"] == ours["failures"] == ours["processes_left"] == 0
        assert ours["handles_before"] == ours["handles_after"]
        assert f"{ours['fuzzed_inputs']:,} broken" in README and f"{ours['kills_in_writing']} of them inside" in README
        assert f"{ours['runs']} runs with {ours['kills']} kills" in README and f"{ours['stops']} stops" in README
        assert f"{100 * ours['long_run_memory_growth']:.2f} %" in README
        return
    assert f"{receipt['ours']['real_tokens_per_s']:,.0f}" in README
    if "evaluation" in receipt:
        assert f"{receipt['evaluation']['acceptance_trained']:.3f}" in README
        assert receipt["evaluation"]["identical_to_greedy"]
    if receipt["gpu"]:
        ours = receipt["ours"]
        assert ours["alloc_bytes_per_step"] == ours["device_used_range_bytes"] == ours["host_syncs_per_step"] == 0
        assert ours["verified"] and ours["steady_state"] == "as warm-up left it"
        graphs = receipt["warmup"]["graphs"] if receipt["warmup"] else []
        assert all(row["max_difference"] == 0 for row in graphs)
        assert all(row["pool_over_largest"] <= 1.1 for row in (receipt["warmup"] or {"lanes": []})["lanes"])


def test_the_evidence_is_that_of_a_receipt():
    warmup = json.loads((ROOT / "profiles" / "results" / "qwen3.5-0.8b-1gpu.json").read_text())["warmup"]
    jsonschema.validate(warmup, json.loads(WARMUP_SCHEMA.read_text()))
    (device,) = warmup["devices"]
    assert device["sentence"] in README and f"{device['guard_us_max']:.0f} us" in README
    shown = [row for row in warmup["graphs"] if f"| {row['step']} | {row['bucket'] or '-'} |" in README]
    assert len(shown) == 7
    assert all(f"| {row['eager_ms']:.1f} ms | {row['replay_ms']:.1f} ms |" in README for row in shown)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_host_calls_of_a_trace_are_those_of_the_readme(path):
    ours = json.loads(path.read_text())["ours"]
    assert f"{ours['host_calls_per_micro_step_max']} calls per micro-step" in README
    assert ours["host_calls_per_micro_step_max"] <= 24 and ours["kernel_launches_per_step"] == 0


def test_the_ratios_of_bench_receipts_are_those_of_the_readme():
    for path in BENCHES:
        receipt = json.loads(path.read_text())
        assert {"workload", "gpu", "driver", "torch", "commit", "date", "profile", "ceiling_tflops"} <= set(receipt)
        assert receipt["gpu"] and (receipt["ratio"] is None or f"{receipt['ratio']:.2f}" in README), path


def test_the_paths_of_loss_receipts_agree_as_the_readme_says():
    for path in LOSSES:
        ours = json.loads(path.read_text())["ours"]
        assert ours["agrees"] and all(f"{row['mean']:.4f}" in README for row in ours["difference"].values()), path


def test_every_receipt_that_the_readme_names_is_there():
    named = re.findall(r"(?:profiles/results/|receipt\s+`)([\w.-]+\.json)", README)
    assert len(named) >= 4 and set(named) <= {path.name for path in RESULTS}


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README and "TODO" not in README
