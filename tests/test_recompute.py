"""Recomputed layers: the same bits, less kept, and what `plan` says about it."""

import pytest
import torch
from tiny import tiny_profile

from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.build import build
from draftgraph.engine.config import load_profile
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict.cards import CARDS
from draftgraph.engine.predict.memory import device_bytes
from draftgraph.engine.predict.recompute import estimate

ON_GPU = {
    "placement": {"targets": ["cuda:0"], "drafters": ["cuda:0"]},
    "capture": {"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
    "target": {"dtype": "bfloat16"},
    "drafter": {"layers": 3, "head_dim": 64},
}


def lane_of(tmp_path, recompute, **changes):
    drafter = {"layers": 3, **changes.pop("drafter", {}), "recompute": recompute}
    return build(make_plan(tiny_profile(tmp_path, drafter=drafter, **changes))).rig.drafters[0]


def gradients(lane):
    """Of every bucket in turn, with the bytes that its backward kept: [(gradients, sums, bytes)]."""
    found = []
    for step in lane.lane.steps[:-1]:  # the last one is the optimizer's
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.nbytes)
            return tensor

        with lane.lane.on_stream(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            lane.lane.fill(step, 1)
            step.run()
        lane.lane.synchronize()
        found.append((lane.flat.grads.clone(), lane.sums.clone(), sum(kept)))
    return found


def test_a_step_that_recomputes_has_the_same_bits_and_keeps_less(tmp_path):
    plain, recomputed = (gradients(lane_of(tmp_path, recompute)) for recompute in (False, True))
    assert len(plain) == 3
    for (grads, sums, kept), (other, other_sums, other_kept) in zip(plain, recomputed, strict=True):
        assert torch.equal(grads, other) and torch.equal(sums, other_sums) and grads.abs().max() > 0
        assert other_kept < kept / 3


def test_the_plan_says_what_recomputing_saves_and_costs():
    plan = make_plan(load_profile("qwen3.6-27b-1gpu"))
    h200 = CARDS["h200"]
    told = estimate(plan, h200)
    again = make_plan(load_profile("qwen3.6-27b-1gpu", ["drafter.recompute=true"]))
    pools = [next(v["pool"] for k, v in device_bytes(p).items() if k.startswith("drafter")) for p in (plan, again)]
    assert told["saves_bytes"] == pools[0] - pools[1] > 8 * 2**30
    # One more forward of 1.6 G parameters over 16,384 draft tokens, and of k and v over 8192 context tokens.
    assert told["bucket"] == "r2-s4096-a512"
    more_flops = 2 * (1.6e9 * 16384 + 52e6 * 8192)
    assert told["costs_ms"] == pytest.approx(1e3 * more_flops / h200.flops(), rel=0.02)
    assert 0.05 < told["costs_flop_share"] < 0.1 and not told["on"]
    assert estimate(again, h200)["on"] and plan.identity == again.identity
    # A micro-step that has a quarter of an extraction is smaller: the same cost is a larger share of it.
    reused = make_plan(load_profile("qwen3.6-27b-1gpu", ["drafter.reuse=4"]))
    shares = [estimate(p, h200)["costs_flop_share"] for p in (plan, reused)]
    (bucket,) = (b for b in plan.buckets if b.name == told["bucket"])
    whole = told["costs_ms"] * h200.flops() / 1e3 / shares[0]
    less = 0.75 * bucket.rows * plan.flops.target(bucket.context)
    assert shares[1] / shares[0] == pytest.approx(whole / (whole - less))
    b200 = estimate(plan, CARDS["b200"])
    assert b200["costs_ms"] / told["costs_ms"] == pytest.approx(h200.bf16_tflops / CARDS["b200"].bf16_tflops)
    assert estimate(plan, None)["costs_ms"] is estimate(plan, None)["at_tflops"] is None


@pytest.mark.gpu
def test_a_captured_step_that_recomputes_has_the_same_bits_in_a_smaller_pool(tmp_path):
    found, pools = [], []
    for recompute in (False, True):
        lane = lane_of(tmp_path, recompute, **ON_GPU)
        lane.lane.warm_up()
        references = eager_references([lane.lane])
        lane.lane.capture()
        compare([lane.lane], references)
        step = next(step for step in lane.lane.steps if step.step == "drafter")
        lane.lane.fill(step, 5)
        lane.lane.replay("drafter", step.bucket)
        lane.lane.synchronize()
        found.append(lane.flat.grads.clone())
        pools.append(sum(row.pool_bytes for row in lane.lane.evidence))
        lane.lane.close()
    assert torch.equal(*found) and found[0].abs().max() > 0
    assert pools[1] <= pools[0]  # tiny here: the allocator's granularity may hide it
