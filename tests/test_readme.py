"""The README quotes receipts, and nothing else."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = sorted((ROOT / "profiles" / "results").glob("*.json"))
BENCHES = [path for path in RESULTS if path.name.startswith("bench-")]
RECEIPTS = [path for path in RESULTS if path not in BENCHES]


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_the_figures_of_a_receipt_are_those_of_the_readme(path):
    receipt = json.loads(path.read_text())
    assert {"workload", "gpu", "torch", "commit", "date", "profile", "ours"} <= set(receipt)
    if receipt["workload"] == "prepare":
        assert f"{receipt['ours']['tokens_per_s']:,.0f}" in README and f"{receipt['ratio']:.2f}" in README
        assert f"{receipt['ours']['collate_ms']:.1f} ms" in README
        return
    assert f"{receipt['ours']['real_tokens_per_s']:,.0f}" in README
    if "evaluation" in receipt:
        assert f"{receipt['evaluation']['acceptance_trained']:.3f}" in README
        assert receipt["evaluation"]["identical_to_greedy"]
    if receipt["gpu"]:
        ours = receipt["ours"]
        assert ours["alloc_bytes_per_step"] == ours["device_used_range_bytes"] == ours["host_syncs_per_step"] == 0
        assert all(row["max_difference"] == 0 for row in receipt["warmup"]["graphs"])


def test_the_ratios_of_bench_receipts_are_those_of_the_readme():
    for path in BENCHES:
        receipt = json.loads(path.read_text())
        assert {"workload", "gpu", "driver", "torch", "commit", "date", "profile", "ceiling_tflops"} <= set(receipt)
        assert receipt["gpu"] and (receipt["ratio"] is None or f"{receipt['ratio']:.2f}" in README), path


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README and "TODO" not in README
