"""Fused forwards on a real device: captured taps are eager taps, nearer to float32 than the module's own."""

import pytest
import torch
from fused_cases import CASES, make_model

from draftgraph.capture import tuning
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.models.target import Target

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
TAPS = (1, 6)
REALISTIC = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 128,
}
DELTA_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
HEADS = {"qwen3_5, HV = 2H": {"linear_num_key_heads": 8, "linear_num_value_heads": 16}}
HEADS["qwen3_5, HV = H"] = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
EVERY_CASE = pytest.mark.parametrize("case", list(CASES))


def realistic_model(tmp_path, case, dtype):
    delta = {**DELTA_HEADS, **HEADS[case], "head_dim": 256} if case in HEADS else {}
    return make_model(tmp_path, case, dtype, GPU, **{**REALISTIC, **delta})


def extract(target, ids):
    taps = torch.full((*ids.shape, len(TAPS) * 1024), float("nan"), device=GPU, dtype=target.dtype)
    target.extract(ids, taps)
    return taps


def token_ids(rows, num_context, seed=0):
    return torch.randint(1000, (rows, num_context), generator=torch.Generator().manual_seed(seed)).to(GPU)


@EVERY_CASE
def test_bf16_taps_are_as_near_to_float32_as_the_modules(tmp_path, case):
    model = realistic_model(tmp_path, case, torch.bfloat16)
    ids = token_ids(2, 500)
    module = extract(Target(model, TAPS, 512, "module"), ids).float()
    target = Target(model, TAPS, 512, "fused")
    target.check_against_module()
    fused = extract(target, ids).float()
    truth = extract(Target(model.float(), TAPS, 512, "module"), ids)
    for tap in (slice(0, 1024), slice(1024, 2048)):
        module_error = (module - truth)[..., tap].norm()
        fused_error = (fused - truth)[..., tap].norm()
        assert 0 < module_error < 0.2 * truth[..., tap].norm()
        assert fused_error <= 1.05 * module_error, (fused_error / module_error).item()


@pytest.mark.parametrize("case", list(HEADS))
def test_comparing_with_the_module_tunes_no_kernel_that_extraction_did_not(tmp_path, case):
    target = Target(realistic_model(tmp_path, case, torch.bfloat16), TAPS, 512, "fused")
    target.tune(2, 512)
    tuned = tuning.choices()
    target.check_against_module()
    assert tuned and tuning.choices() == tuned


@EVERY_CASE
def test_captured_taps_are_the_bits_of_eager_ones_and_pads_change_nothing(tmp_path, case):
    target = Target(realistic_model(tmp_path, case, torch.bfloat16), TAPS, 256, "fused")
    lane = Lane("target 0", GPU, "graph")

    def step(bucket, rows, num_context):
        ids = token_ids(rows, num_context)
        taps = torch.empty(rows, num_context, len(TAPS) * 1024, dtype=target.dtype, device=GPU)

        def fill(number):
            ids.copy_(token_ids(rows, num_context, number))
            taps.fill_(float("nan"))

        return Step(
            "target", bucket, lambda: target.extract(ids, taps), {"ids": ids}, {"taps": taps}, fill, ids.numel()
        )

    steps = [step("r2-s256", 2, 256), step("r3-s64", 3, 64)]
    for each in steps:
        lane.add(each)
    lane.warm_up()
    references = eager_references([lane])
    lane.capture()
    compare([lane], references)  # bit for bit, buckets interleaved
    assert [row.max_difference for row in lane.evidence] == [0.0, 0.0]
    ids, taps = steps[0].inputs["ids"], steps[0].outputs["taps"]
    lane.fill(steps[0], 7)
    lane.replay("target", "r2-s256")
    lane.synchronize()
    before = taps.clone()
    assert torch.isfinite(before).all()
    ids[0, 100:] = 5
    torch.cuda.synchronize()
    lane.replay("target", "r2-s256")
    lane.synchronize()
    assert torch.equal(taps[0, :100], before[0, :100]) and torch.equal(taps[1], before[1])
    alone = extract(target, ids[:1, :100].contiguous())[0].float()
    assert (alone - before[0, :100].float()).norm() <= 5e-2 * alone.norm()
    lane.close()
