"""Whole runs on a GPU: captured against eager, shared buffers against hand-off slots, steady state."""

import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_run_health import ROLLS_BACK, not_finite_from, rates
from tiny import deal_as_for, ordinary_rows, tiny_profile, write_target
from triton.runtime.autotuner import Autotuner

from draftgraph.capture import tuning
from draftgraph.engine.train import train

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def run(
    folder, name, dtype="bfloat16", mode="graph", family="llama", placement=None, resume=False, target=None, **changes
):
    changes.setdefault("run", {"steps": 8})
    profile = tiny_profile(
        folder,
        family,
        target={"dtype": dtype, **(target or {})},
        capture={"mode": mode, "warmup_rounds": 3, "verify_rounds": 3},
        placement={"targets": [GPU], "drafters": [GPU], **(placement or {})},
        **changes,
    )
    summary = train(profile, folder / name, resume, Console(quiet=True))
    steps = profile.run.steps
    return summary, load_file(folder / name / "checkpoints" / f"step-{steps:06d}" / "state.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_run_trains_the_bits_of_an_eager_run(tmp_path, family, dtype):
    # Every shape of fla's kernels compiles and tunes for half a minute: one bucket is enough there.
    count = 1 if family == "qwen3_5_text" else 3
    summary, captured = run(tmp_path, "captured", dtype, "graph", family, buckets={"count": count})
    _, eager = run(tmp_path, "eager", dtype, "eager", family, buckets={"count": count})
    assert summary["graphs"] == 2 * count + 1
    assert all(torch.equal(captured[name], eager[name]) for name in captured)


@pytest.mark.parametrize("labels", ["target", "argmax"])
def test_labels_of_the_target_are_captured(tmp_path, labels):
    summary, captured = run(tmp_path, "captured", drafter={"labels": labels, "loss_norm": "slots"})
    _, eager = run(tmp_path, "eager", mode="eager", drafter={"labels": labels, "loss_norm": "slots"})
    assert summary["graphs"] == 7
    assert all(torch.equal(captured[name], eager[name]) for name in captured)


def test_hand_off_slots_train_the_bits_of_a_shared_buffer(tmp_path):
    _, shared = run(tmp_path, "shared")
    _, ring = run(tmp_path, "ring", placement={"look_ahead": 2})
    assert all(torch.equal(shared[name], ring[name]) for name in shared)


def test_two_targets_and_two_drafters_on_one_gpu_train_the_weights_of_one_of_each(tmp_path, monkeypatch):
    deal_as_for(2, monkeypatch)
    _, one = run(tmp_path, "one", "float32")
    placement = {"targets": [GPU, GPU], "drafters": [GPU, GPU], "look_ahead": 2}
    _, two = run(tmp_path, "two", "float32", placement=placement)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=2e-3, atol=2e-5)


def test_the_same_profile_and_seed_train_the_same_bits(tmp_path):
    _, first = run(tmp_path, "first")
    _, second = run(tmp_path, "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


def refuse_to_tune(*_):
    raise AssertionError("a kernel tuned itself anew")


def test_a_resumed_hybrid_run_takes_the_saved_tuning_and_gives_the_bits_of_a_whole_one(tmp_path, monkeypatch):
    changes = {"family": "qwen3_5_text", "buckets": {"count": 1}, "checkpoint": {"every": 4, "keep": 2}}
    _, whole = run(tmp_path, "whole", **changes)
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-000008")
    saved = json.loads((tmp_path / "whole" / "tuning.json").read_text())
    assert any("gated_delta" in kernel for kernel in saved)
    # As in a new process, where in addition nothing may be tuned.
    for _, tuner in tuning._autotuners():
        tuner.cache.clear()
    for method in ("_bench", "check_disk_cache"):
        monkeypatch.setattr(Autotuner, method, refuse_to_tune)
    summary, resumed = run(tmp_path, "whole", resume=True, **changes)
    assert summary["first_step"] == 4 and tuning.choices() == saved
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_steady_state_allocates_nothing_and_waits_for_nothing(tmp_path):
    summary, _ = run(
        tmp_path,
        "steady",
        rows=ordinary_rows(40),
        run={"steps": 120},
        checkpoint={"every": 0},
        drafter={"reuse": 2},
        log={"every": 1},
    )
    assert summary["alloc_bytes_per_step"] == 0
    assert summary["reserved_range_bytes"] == 0
    assert summary["device_used_range_bytes"] == 0
    assert summary["host_syncs_per_step"] == 0
    drafts = [n for key, n in summary["replays_per_graph"].items() if key.startswith("drafter")]
    assert len(drafts) == 3 and min(drafts) >= 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_copied_beside_the_next_step_holds_its_own_step(tmp_path, dtype):
    often, _ = run(tmp_path, "often", dtype, checkpoint={"every": 1, "keep": 8})
    _, _ = run(tmp_path, "once", dtype, checkpoint={"every": 4, "keep": 8})
    assert often["host_syncs_per_step"] == 0
    for step in (4, 8):
        state = f"checkpoints/step-{step:06d}/state.safetensors"
        left, right = load_file(tmp_path / "often" / state), load_file(tmp_path / "once" / state)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_ordinary_checkpoint_stops_the_run_for_milliseconds_and_costs_no_bit(tmp_path):
    # 77 M parameters, 0.9 GB of state; the device has many micro-steps before it when a checkpoint begins.
    (tmp_path / "large").mkdir()
    model = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64, "num_attention_heads": 16}
    changes = {
        "target": {"model": write_target(tmp_path / "large", **model)},
        "drafter": {"layers": 5},
        "optim": {"accumulate": 16},
        "rows": ordinary_rows(40),
    }
    summary, whole = run(tmp_path, "whole", checkpoint={"every": 4, "keep": 2}, **changes)
    assert 0 < summary["checkpoint_pause_ms_max"] < 50
    assert summary["checkpoint_held_ms_max"] is not None
    assert summary["host_syncs_per_step"] == 0
    before = figures_of(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-000008")
    _, resumed = run(tmp_path, "whole", resume=True, checkpoint={"every": 4, "keep": 2}, **changes)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert figures_of(tmp_path / "whole") == before


def test_a_captured_run_rolls_back_and_replays_at_half_the_rate(tmp_path, monkeypatch):
    changes = {"run": {"steps": 12}, "optim": ROLLS_BACK, "checkpoint": {"every": 1, "keep": 3}}
    run(tmp_path, "good", **changes)
    not_finite_from(monkeypatch, step=7, lowest_share=1.0)
    summary, _ = run(tmp_path, "run", **changes)
    assert (summary["first_step"], summary["rate_share"], summary["skipped_updates"]) == (5, 0.5, 0)
    good = rates(tmp_path / "good")
    assert rates(tmp_path / "run") == good[:5] + [rate / 2 for rate in good[5:]]


def figures_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "time": None} for line in lines]


def test_the_census_shows_our_attention_and_flas_delta_rule(tmp_path):
    run(tmp_path, "census", family="qwen3_5_text")
    graphs = json.loads((tmp_path / "census" / "warmup.json").read_text())["graphs"]
    kernels = {row["step"]: " ".join(row["kernels"]) for row in graphs}
    assert "anchor_query_gradient_kernel" in kernels["drafter"]
    assert "chunk_" in kernels["target"] and "causal_conv_kernel" in kernels["target"]
