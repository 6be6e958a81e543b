"""Decoding on a real device: captured steps, the target's own answers, and evaluations inside a steady run."""

import json

import pytest
import torch
from test_evaluate import SETS, evaluation, fresh_drafter, tokenizer  # noqa: F401  the fixture
from test_gpu_run import run

from draftgraph.engine.models.target import quiet
from draftgraph.kernels import gated_delta, reference

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(GPU)


@pytest.mark.parametrize("n", [1, 5, 64])
def test_the_rule_from_a_memory_equals_its_twin(n):
    with quiet():
        gated_delta.implementation()  # fla warns on import
    q, k, v = randn(3, n, 2, 64, seed=0), randn(3, n, 2, 64, seed=1), randn(3, n, 4, 64, seed=2)
    log_decay, strength = -randn(3, n, 4, seed=3).abs(), randn(3, n, 4, seed=4).sigmoid()
    inputs = (q, k, v, log_decay, strength, randn(3, 4, 64, 64, seed=5))
    for found, expected in zip(gated_delta.gated_delta_from(*inputs), reference.gated_delta_from(*inputs), strict=True):
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_decoding_says_what_the_target_says_and_what_eager_decoding_does(tokenizer, dtype):  # noqa: F811
    measured = evaluation(tokenizer, dtype=dtype, device=GPU)
    assert measured.decoder.lane.mode == "graph"
    summary = measured.measure(fresh_drafter().to(GPU))
    assert summary["identical_to_greedy"] is True
    assert all(row.max_difference == 0.0 and row.nodes for row in measured.decoder.lane.evidence)
    if dtype == torch.float32:  # elsewhere a path's keys lie apart, which may round a tie differently
        trees = evaluation(tokenizer, dtype=dtype, device=GPU, tree_budget=16).measure(fresh_drafter().to(GPU))
        assert trees["tree"]["identical_to_greedy"] is True and trees["tree_over_chain"] > 1
        on_cpu = evaluation(tokenizer).measure(fresh_drafter())
        assert summary["acceptance"] == pytest.approx(on_cpu["acceptance"])


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_run_that_evaluates_stays_as_warm_up_left_it_and_measures_what_an_eager_run_does(tmp_path, family):
    options = {"buckets": {"count": 1}, "eval": {"every": 2, "count": 3, "new_tokens": 12}, "log": {"every": 1}}
    summary, captured = run(tmp_path, "captured", "float32", family=family, **options)
    assert summary["alloc_bytes_per_step"] == 0 and summary["host_syncs_per_step"] == 0
    assert summary["steady_state"] == "as warm-up left it"
    _, eager = run(tmp_path, "eager", "float32", mode="eager", family=family, **options)
    assert all(torch.equal(captured[name], eager[name]) for name in captured)
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("captured", "eager")]
    lines = [[json.loads(line).get("real_acceptance") for line in each] for each in metrics]
    assert lines[0] == lines[1] and sum(value is not None for value in lines[0]) == 4
