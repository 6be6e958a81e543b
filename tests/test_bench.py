"""`draftgraph bench`: every workload at tiny shapes, the protocol, the floor, and what is never claimed on a CPU."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from draftgraph.engine.bench import kernels, overlap, peer, protocol, steps
from draftgraph.engine.bench.command import bench, goal_text
from draftgraph.engine.bench.goals import FP8_GOALS, GOALS, WORKLOADS, Goal
from draftgraph.engine.bench.workloads import PROFILE_08B, PROFILE_27B, load
from draftgraph.engine.config import load_profile
from draftgraph.engine.errors import RunError, UsageError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict.memory import device_bytes
from draftgraph.profiles.measure import receipt as make_receipt

QUIET = Console(quiet=True)
CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the real shapes")


def run(tmp_path, *workloads, quick=False):
    summary = bench(list(workloads), tmp_path, quick, None, None, [], QUIET)
    return summary, {name: json.loads((tmp_path / f"bench-{name}.json").read_text()) for name in workloads}


@without_gpu
def test_kernel_workloads_are_right_at_tiny_shapes_and_claim_nothing_without_a_gpu(tmp_path):
    summary, receipts = run(tmp_path, "attention", "cross-entropy", "optimizer", "target")
    for name, receipt in receipts.items():
        assert receipt["workload"] == name
        assert receipt["ceiling_tflops"] is receipt["ratio"] is None and receipt["figures"] == {}
        assert {row["met"] for row in receipt["goals"].values()} == {None}
        assert summary["workloads"][name]["ratio"] is None
    for name in ("tiny full", "tiny window"):
        ours, flex = (receipts["attention"][side][name] for side in ("ours", "peer"))
        assert ours["error"] < 1e-5 and flex["difference_from_ours"] < 1e-5
        assert ours["forward_backward_ms"] > 0 and flex["forward_backward_ms"] is None
    entropy = receipts["cross-entropy"]["ours"]["tiny"]
    assert entropy["error"] < 1e-5 and entropy["slots"] == 2 * 8 * 3 and entropy["workspace_bytes"] is None
    assert receipts["optimizer"]["ours"]["error"] < 1e-3
    assert receipts["optimizer"]["ours"]["parameters"] == make_plan(tiny()).shape.num_parameters
    buckets = receipts["target"]["ours"]["buckets"]
    assert list(buckets) == [b.name for b in sorted(make_plan(tiny()).buckets, key=lambda b: -b.rows * b.context)]
    assert all(b["ms"] > 0 and not b["captured"] and b["ceiling_share"] is None for b in buckets.values())


@without_gpu
def test_a_target_in_fp8_has_a_receipt_of_its_own(tmp_path):
    bench(["target"], tmp_path, True, None, None, ["target.precision=fp8"], QUIET)
    receipt = json.loads((tmp_path / "bench-target-fp8.json").read_text())
    assert receipt["profile"]["target"]["precision"] == "fp8" and receipt["goals"] == {}
    assert list(receipt["ours"]["tap_errors"]) == ["1", "3", "5"] and receipt["fp8_ceiling_tflops"] is None
    assert min(receipt["ours"]["tap_errors"].values()) > 0.001


@without_gpu
def test_a_training_workload_runs_in_its_own_process(tmp_path):
    _, receipts = run(tmp_path, "w27-full")
    ours = receipts["w27-full"]["ours"]
    assert ours["rows"] == 12 and ours["tokens_per_row"] == 256 and ours["padding_efficiency"] == 1
    assert receipts["w27-full"]["peer"] is None and receipts["w27-full"]["profile"]["capture"]["mode"] == "eager"


@without_gpu
@pytest.mark.parametrize("workload", ["w27-var", "w08-var"])
def test_variable_rows_are_counted_before_padding(tmp_path, monkeypatch, workload):
    monkeypatch.setattr(steps, "in_own_process", lambda _, profile, num_rows: steps.train_rows(profile, num_rows))
    _, receipts = run(tmp_path, workload)
    ours = receipts[workload]["ours"]
    assert ours["rows"] >= 16 and ours["row_efficiency"] > 0.9 and 0.5 < ours["padding_efficiency"] <= 1
    assert 0 < ours["verification_seconds"] < ours["warmup_seconds"]
    inclusive = [ours[f"real_tokens_per_s_{what}"] for what in ("inclusive", "inclusive_without_verification")]
    assert 0 < inclusive[0] < inclusive[1]
    assert abs(ours["loss"] - np.log(512)) < 0.5 and ours["kernel_families"] == []
    assert ours["alloc_bytes_per_step"] is ours["host_syncs_per_step"] is ours["floor_tokens_per_s"] is None


@without_gpu
def test_a_target_that_works_ahead_trains_on_the_rows_of_one_that_takes_turns(tmp_path, monkeypatch):
    asked = []

    def measured(_, profile, num_rows):
        asked.append((profile.target.model, profile.placement.look_ahead))
        return steps.train_rows(profile, num_rows)

    monkeypatch.setattr(overlap, "in_own_process", measured)
    _, receipts = run(tmp_path, "overlap")
    assert [slots for _, slots in asked] == [0, 1, 0, 1]
    ours = receipts["overlap"]["ours"]["27b"]
    ratio = ours["ahead_real_tokens_per_s_steady"] / ours["in_turn_real_tokens_per_s_steady"]
    assert ours["ratio"] == ratio and receipts["overlap"]["ratio"] is None


def tiny():
    return load(protocol.Bench(QUIET, quick=True), PROFILE_27B)


def test_every_workload_has_goals_and_a_line_of_help():
    assert set(GOALS) == set(FP8_GOALS) == set(WORKLOADS) and all(WORKLOADS.values())


def test_a_goal_is_met_missed_or_not_measured():
    ratio, workspace = Goal("ratio", 1.5), Goal("workspace_bytes", 2**31, at_most=True)
    assert [ratio.met({"ratio": value}) for value in (1.5, 1.49, None)] == [True, False, None]
    assert [workspace.met({"workspace_bytes": value}) for value in (2**31, 2**31 + 1)] == [True, False]
    assert goal_text(ratio, {"ratio": 1.62}) == "ratio 1.62, goal >= 1.50: met"
    assert goal_text(workspace, {}) == "workspace_bytes -, goal <= 2 GiB: not measured"


def test_variants_take_turns_and_preparation_is_not_timed():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = protocol.measure(CPU, variants, prepare=lambda: calls.append("-"), rounds=2, warmup=1)
    assert "".join(calls) == "-b-a" + "-a-b" + "-b-a" and set(found) == {"a", "b"}


def test_what_is_wrong_is_not_timed():
    assert kernels.require("x", 1e-3) == 1e-3
    for error in (0.1, float("nan"), protocol.relative_error(torch.tensor([float("nan")]), torch.ones(1))):
        with pytest.raises(RunError, match="float32 truth"):
            kernels.require("x", error)


@pytest.mark.parametrize("window", [None, 9])
def test_visible_pairs_are_those_of_the_mask(window):
    positions, block_size = torch.tensor([[0, 3, 12, 30], [5, 6, 7, 31]]), 4
    counted = 0
    for anchor in positions.flatten().tolist():
        for k in range(block_size):
            counted += sum(window is None or kv >= anchor + k - (window - 1) for kv in range(anchor))
            counted += block_size if window is None else k + 1
    assert kernels.visible_pairs(positions, block_size, window) == counted


def test_the_27b_profile_fits_one_gpu_and_its_floor_is_the_design_s():
    plan = make_plan(load_profile(PROFILE_27B))
    assert sum(sum(parts.values()) for parts in device_bytes(plan).values()) < 120e9
    assert plan.rule.gamma == 7 and plan.shape.num_parameters == 1_730_213_120
    assert plan.shape.target_layer_ids == (1, 16, 31, 46, 61) and len(plan.buckets) == 16
    row = np.flatnonzero(plan.lengths == 4096)[:1]
    # 9,958 tokens/s at 786 TFLOP/s for 64 layers and an lm_head on every slot; 62 layers and 15 slots take 3 % less.
    assert 786e12 * 4096 / steps.floor_flops(plan, row) == pytest.approx(9958 * 1.028, rel=2e-3)


def test_the_first_rows_keep_their_buckets():
    plan = make_plan(load_profile(PROFILE_27B))
    few = steps.first_rows(plan, 40)
    assert few.lengths[:40].tolist() == plan.lengths[:40].tolist() and len(few.lengths) <= 40 + len(plan.buckets)
    assert few.lengths.tolist() == few.rows.lengths.tolist() == plan.lengths[few.rows.row_ids].tolist()
    assert [few.buckets[i] for i in few.assignment] == [plan.buckets[i] for i in plan.assignment[few.rows.row_ids]]
    assert set(few.assignment) == set(range(len(few.buckets))) and (few.rows[3][0] == plan.rows[3][0]).all()


@pytest.mark.parametrize("name", [PROFILE_27B, PROFILE_08B])
def test_the_first_rows_fill_every_micro_batch_and_are_hardly_more(name):
    plan = make_plan(load_profile(name))
    few = steps.first_rows(plan, 256)
    assert few.schedule.row_efficiency == 1.0 > plan.schedule.row_efficiency > 0.98
    assert 256 <= len(few.lengths) < 256 + sum(bucket.rows - 1 for bucket in few.buckets) + 1
    assert few.lengths.mean() == pytest.approx(plan.lengths[:256].mean(), rel=0.06)


FAKE = """
import json, sys
rows = sys.argv[sys.argv.index("--rows") + 1]
if rows == "8":
    sys.exit(1)
print("noise")
print(json.dumps({"arguments": sys.argv[1:], "real_tokens_per_s_steady": 100.0 * int(rows),
                  "real_tokens_per_s_inclusive": 50.0}))
"""


def test_the_peer_is_read_from_its_last_line_and_ours_is_set_against_its_best(tmp_path, monkeypatch):
    (tmp_path / "peer_specforge.py").write_text(FAKE)
    monkeypatch.setattr(peer, "PEERS", tmp_path)
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: sys)
    handed = protocol.Bench(QUIET, quick=False)
    handed.device = torch.device("cuda")
    lines = peer.specforge(handed, "w08-var", "0.8b", [1, 2, 8], 256)
    assert set(lines) == {1, 2}
    assert lines[2]["arguments"] == ["--shapes", "0.8b", "--rows", "2", "--total-rows", "256"]
    handed.ceilings["ceiling_tflops"] = 800.0
    ours = {"real_tokens_per_s_steady": 600.0, "real_tokens_per_s_inclusive": 75.0, "flops_per_token": 8e11}
    ours["target_flops_per_token"] = 4e11
    result = steps.beside_peer(handed, tiny(), ours, lines)
    assert result.ratio == 3 and result.figures == {
        "ratio": 3.0,
        "ratio_inclusive": 1.5,
        "ratio_one_row": 6.0,
        "floor_share": 0.6,
    }
    assert result.profile == dataclasses.asdict(tiny()) and result.ours["floor_tokens_per_s"] == 1000


def test_a_variant_stands_beside_the_peer_of_an_earlier_receipt_of_the_same_machine(tmp_path):
    path, lines = tmp_path / "bench-w08-var.json", {"2": {"real_tokens_per_s_steady": 200.0}}
    lines["2"]["real_tokens_per_s_inclusive"] = 50.0
    content = make_receipt("w08-var", "", peer=lines) | {"quick": False}
    path.write_text(json.dumps(content))
    known = peer.earlier(tmp_path, ["w08-var"], quick=False)
    handed = protocol.Bench(QUIET, quick=False, known_peers=known)
    measured = peer.specforge(handed, "w08-var", "0.8b", [1, 2, 8], 256)
    assert measured == {2: lines["2"] | {"date": content["date"]}}
    ours = {"real_tokens_per_s_steady": 600.0, "real_tokens_per_s_inclusive": 75.0}
    figures = steps.beside_peer(handed, tiny(), ours, measured).figures
    assert figures["ratio"] == 3 and figures["ratio_inclusive"] is None

    path.write_text("[]")
    with pytest.raises(UsageError, match="no receipt in"):
        peer.earlier(tmp_path, ["w08-var"], quick=False)
    for changed, said in (({"gpu": "0f"}, "gpu 0f, here"), ({"peer": None}, "without"), (None, "no rec")):
        path.write_text(json.dumps(content | changed) if changed else "{")
        with pytest.raises(UsageError, match=said):
            peer.earlier(tmp_path, ["w08-var"], quick=False)
    with pytest.raises(UsageError, match="no receipt in"):
        bench(["w27-full"], tmp_path, False, None, tmp_path, [], QUIET)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch.compile, the peer's
def test_kernel_workloads_have_every_figure_on_a_gpu(tmp_path):
    _, receipts = run(tmp_path, "attention", "cross-entropy", "optimizer", quick=True)
    for name, receipt in receipts.items():
        assert receipt["gpu"] and receipt["ceiling_tflops"] > 10 and receipt["ratio"] > 0
        assert {row["met"] for row in receipt["goals"].values()} <= {True, False}, name


@pytest.mark.gpu
def test_a_training_workload_is_flat_and_timed_on_a_gpu():
    ours = steps.train_rows(load_profile(PROFILE_08B, ["buckets.count=2", "eval.every=0"]), 48)
    assert ours["rows"] >= 48 and 0 < ours["real_tokens_per_s_inclusive"] < ours["real_tokens_per_s_steady"]
    assert ours["alloc_bytes_per_step"] == ours["reserved_range_bytes"] == ours["host_syncs_per_step"] == 0
    assert all(row["replay_ms"] > 0 for row in ours["graphs"]) and ours["capture_seconds"] > 0
    assert abs(ours["loss"] - np.log(248320)) < 1


@without_gpu
def test_watched_steps_and_bare_ones_train_on_the_same_rows(tmp_path):
    _, receipts = run(tmp_path, "observers")
    ours = receipts["observers"]["ours"]
    assert ours["step_ms_on"] > 0 and ours["step_ms_off"] > 0 and ours["steps"] == 5
    assert ours["host_syncs"] is None and ours["findings"] == [] and ours["log_messages_dropped"] == 0
