"""A run from end to end in miniature: determinism, many logical devices, awkward rows."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import VOCAB, ordinary_rows, tiny_profile, write_target

from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.errors import CaptureError, DataError, UsageError
from draftgraph.engine.models.target import decoder_on_meta, load_config
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict.flops import matrix_parameters
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.train import train

QUIET = Console(quiet=True)


def run(profile, folder, resume=False):
    return train(profile, folder, resume, QUIET)


def masters(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "state.safetensors")


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text", "gemma3_text", "qwen3_moe"])
def test_a_run_trains_and_leaves_a_whole_run_folder(tmp_path, family):
    profile = tiny_profile(tmp_path, family, run={"steps": 20}, checkpoint={"every": 10})
    summary = run(profile, tmp_path / "run")
    assert summary["steps"] == 20 and summary["loss_last"] < summary["loss_first"]
    assert summary["alloc_bytes_per_step"] is None  # nothing was measured on a CPU, so nothing is claimed
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "profile.toml",
        "receipt.json",
        "warmup.json",
        "metrics.jsonl",
        "devices.jsonl",
        "buckets.json",
        "report.html",
        "checkpoints",
    }
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    warm = json.loads((tmp_path / "run" / "warmup.json").read_text())
    assert warm["verified"] and warm["mode"] == "eager" and len(warm["graphs"]) == 2 * 3 + 1


def test_the_same_profile_and_seed_give_the_same_bits(tmp_path):
    profile = tiny_profile(tmp_path)
    run(profile, tmp_path / "a")
    run(profile, tmp_path / "b")
    assert_same_bits(masters(tmp_path / "a", 6), masters(tmp_path / "b", 6))


@pytest.mark.parametrize("reuse", [1, 3])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(tmp_path, reuse):
    # 2 micro-steps a step and 3 repeats: the checkpoint after step 2 lies in the middle of an extraction.
    whole = tiny_profile(tmp_path, drafter={"reuse": reuse}, checkpoint={"every": 2})
    run(whole, tmp_path / "whole")
    run(whole, tmp_path / "parts")
    for step in (4, 6):  # as if the process had died after step 2
        for path in (tmp_path / "parts" / "checkpoints" / f"step-{step:06d}").iterdir():
            path.unlink()
    resumed = run(whole, tmp_path / "parts", resume=True)
    assert resumed["steps"] == 6
    assert_same_bits(masters(tmp_path / "whole", 6), masters(tmp_path / "parts", 6))
    lines = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6]


def test_every_repeat_of_an_extraction_draws_its_own_anchors(tmp_path, monkeypatch):
    from draftgraph.engine.models.drafter import Drafter

    used = []
    forward = Drafter.forward

    def watched(self, target_hidden, block_embeddings, anchor_positions, anchor_valid):
        used.append((float(target_hidden.sum()), tuple(anchor_positions[anchor_valid].tolist())))
        return forward(self, target_hidden, block_embeddings, anchor_positions, anchor_valid)

    monkeypatch.setattr(Drafter, "forward", watched)
    profile = tiny_profile(tmp_path, drafter={"reuse": 3, "anchors": 4}, optim={"accumulate": 3})
    thrice = run(profile, tmp_path / "thrice")
    targets = sum(n for key, n in thrice["replays_per_graph"].items() if key.startswith("target"))
    drafters = sum(n for key, n in thrice["replays_per_graph"].items() if key.startswith("drafter"))
    assert targets == 6 and drafters == 18
    for extraction in range(6):
        repeats = used[-18:][3 * extraction : 3 * extraction + 3]
        assert len({taps for taps, _ in repeats}) == 1  # one extraction
        assert len({anchors for _, anchors in repeats}) == 3


def test_awkward_rows_train_or_are_counted_and_never_stop_the_run(tmp_path):
    k = 4
    rows = [
        (1, []),
        (1, [0]),
        (2, [0, 1]),
        (k - 1, [0, 1, 2]),
        (k, [1, 2, 3]),
        (k + 1, [0, 1, 2, 3, 4]),
        (20, []),
        (20, [7]),
        (20, [19]),
        (20, [18, 19]),
        (20, [0, 1]),
        *ordinary_rows(4),
    ]
    profile = tiny_profile(tmp_path, rows=rows, run={"steps": 12})
    plan = make_plan(profile)
    assert plan.rows_without_anchor == 5
    assert run(profile, tmp_path / "run")["steps"] == 12
    assert all(torch.isfinite(x).all() for x in masters(tmp_path / "run", 12).values())


def test_a_number_gone_bad_keeps_the_old_state_and_is_counted(tmp_path):
    profile = tiny_profile(tmp_path, optim={"lr": 1e30})
    summary = run(profile, tmp_path / "run")
    assert summary["skipped_updates"] > 0
    assert all(torch.isfinite(x).all() for x in masters(tmp_path / "run", 6).values())


def test_a_plan_counts_the_experts_that_a_token_meets(tmp_path):
    attention, router, expert = 32 * 64 * 2 + 2 * 32 * 32, 8 * 32, 3 * 32 * 32
    config = load_config(write_target(tmp_path, "qwen3_moe"))
    assert matrix_parameters(config, decoder_on_meta(config), 1) == 2 * (attention + router + 2 * expert)


def test_the_drafter_of_a_gemma_rotates_like_its_full_layers(tmp_path):
    assert make_plan(tiny_profile(tmp_path, "gemma3_text")).shape.rope_theta == 1e6


def test_a_target_family_that_cannot_run_is_refused_before_a_device_is_touched(tmp_path):
    with pytest.raises(CaptureError, match="target family 'gpt2' is not supported: its configuration has no"):
        make_plan(tiny_profile(tmp_path, "gpt2"))
    with pytest.raises(CaptureError, match="target family 'gpt_neox' is not supported: its decoder has no"):
        decoder_on_meta(load_config(write_target(tmp_path, "gpt_neox")))


def test_a_pad_that_reaches_real_tokens_is_refused_at_warm_up(tmp_path, monkeypatch):
    from draftgraph.engine.models.target import Target

    extract = Target.extract

    def leaky(self, input_ids, taps):
        extract(self, input_ids, taps)
        taps += input_ids[:, -1:, None]  # the last position of a row, a pad in most

    monkeypatch.setattr(Target, "extract", leaky)
    monkeypatch.setattr(Target, "check_against_module", lambda self: None)
    with pytest.raises(CaptureError, match=r"bucket r\d+-s\d+-a\d+: padded rows differ"):
        run(tiny_profile(tmp_path), tmp_path / "run")


def test_a_nan_that_leaves_a_pad_is_refused_at_warm_up(tmp_path, monkeypatch):
    from draftgraph.engine.run.lanes import DrafterLane

    forward_backward = DrafterLane.forward_backward

    class Unguarded:
        def __getattr__(self, name):
            return getattr(self.views, name)

        def __init__(self, views):
            self.views = views
            self.lengths = torch.full_like(views.lengths, views.taps.shape[1])  # no position counts as a pad

    monkeypatch.setattr(DrafterLane, "forward_backward", lambda lane, views: forward_backward(lane, Unguarded(views)))
    with pytest.raises(CaptureError, match="differ from the rows alone by nan"):
        run(tiny_profile(tmp_path), tmp_path / "run")


def test_a_row_that_cannot_be_read_ends_the_run_but_not_what_was_trained(tmp_path):
    profile = tiny_profile(tmp_path, run={"steps": 400}, checkpoint={"every": 0})
    with ShardWriter(tmp_path / "shards", vocab_size=VOCAB, fingerprint="tiny", max_context=64) as writer:
        for row in range(24):
            writer.append(np.full(20, 2**31 - 1 if row == 23 else row), np.ones(20))
        writer.finish({})
    with pytest.raises(DataError, match="damaged: row 23"):
        run(profile, tmp_path / "run")
    assert checkpoint.found(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("name", ["tokens-00000.npy", "mask-00000.npy"])
def test_one_wrong_bit_in_a_shard_is_refused_before_anything_is_trained(tmp_path, name):
    profile = tiny_profile(tmp_path)
    content = bytearray((tmp_path / "shards" / name).read_bytes())
    content[-7] ^= 1
    (tmp_path / "shards" / name).write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        run(profile, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_shard_that_changes_during_the_run_ends_it_before_the_next_checkpoint(tmp_path, monkeypatch):
    profile = tiny_profile(tmp_path)
    real = Scheduler.step

    def step(self):
        real(self)
        if self.micro_step == 8:
            (tmp_path / "shards" / "mask-00000.npy").touch()

    monkeypatch.setattr(Scheduler, "step", step)
    with pytest.raises(DataError, match=r"changed on disk while it was in use \(mask-00000.npy\)"):
        run(profile, tmp_path / "run")
    assert [path.name for path in checkpoint.found(tmp_path / "run" / "checkpoints")] == ["step-000003"]


def test_a_weight_of_the_target_that_is_not_finite_is_named_before_training(tmp_path, monkeypatch):
    from draftgraph.engine import build

    real = build.load_model

    def poisoned(*arguments):
        model = real(*arguments)
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
        return model

    monkeypatch.setattr(build, "load_model", poisoned)
    with pytest.raises(UsageError, match=r"not finite, the first is model.layers.1.mlp.up_proj.weight"):
        run(tiny_profile(tmp_path), tmp_path / "run")


def test_more_targets_than_drafters_are_all_verified(tmp_path):
    placement = {"targets": ["cpu", "cpu"], "drafters": ["cpu"], "look_ahead": 1}
    run(tiny_profile(tmp_path, placement=placement), tmp_path / "run")


def test_vocabulary_and_mask_token_are_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(UsageError, match=f"{VOCAB} rows"):
        make_plan(tiny_profile(tmp_path, drafter={"mask_token_id": VOCAB}))
