"""Products in FP8 on a real device: the kernels' twins, the product's layout, captured taps."""

import pytest
import torch
from fused_cases import make_model

from draftgraph.capture.ceiling import matmul_ceiling
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.models.target import Target
from draftgraph.kernels import fused, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no products in FP8"
    ),
]
GPU = torch.device("cuda", 0)
TAPS = (1, 6)
SIZES = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 8, "head_dim": 128}
DELTA = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "head_dim": 256},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def assert_same(found, expected):
    """Bit for bit but for ties, which an ulp before the rounding turns."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    steps = (found.values.view(torch.uint8).int() - expected.values.view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and (steps != 0).float().mean() < 1e-3


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 1300), (64, 17408), (2, 100, 5120)])
def test_rows_are_quantised_as_their_twins_say(shape):
    x, weight = 3 * random(*shape), random(shape[-1], seed=1)
    x[0] *= 1e3
    for name in ("quantise_rows", "swiglu_quantised"):
        assert_same(getattr(fused, name)(x), getattr(reference, name)(x))
    if shape[-1] <= 8192:
        assert_same(fused.rms_norm_quantised(x, weight, 1e-6), reference.rms_norm_quantised(x, weight, 1e-6))
        results = [ops.add_rms_norm_quantised(x, x.flip(0), weight, 1e-6, True) for ops in (fused, reference)]
        assert_same(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    poisoned = x.clone()
    poisoned[0, ..., 3] = float("nan")
    values = fused.quantise_rows(poisoned).values.float()
    assert values[0, ..., 3].isnan().all() and torch.isfinite(values[1:]).all()


@pytest.mark.parametrize("rows", [(1,), (37,), (2, 300)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_equals_its_twin(rows, bias):
    x, weight = fused.quantise_rows(random(*rows, 1040)), fused.quantise_rows(random(2064, 1040, seed=1))
    added = random(2064, seed=2) if bias else None
    found = fused.scaled_linear(x, weight, added, torch.bfloat16).float()
    expected = reference.scaled_linear(x, weight, added, torch.float32)
    assert found.shape == (*rows, 2064)
    assert (found - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("case", ["llama, biases and scaled rotary", "qwen3_5, HV = H"])
def test_captured_taps_are_the_bits_of_eager_ones_and_their_products_are_in_fp8(tmp_path, case):
    extra = DELTA if "qwen3_5" in case else {}
    target = Target(make_model(tmp_path, case, torch.bfloat16, GPU, **{**SIZES, **HEADS, **extra}), TAPS, 512, "fused")
    target.check_against_module()
    held = torch.cuda.memory_allocated()
    ids = torch.randint(1000, (2, 500), generator=torch.Generator().manual_seed(0)).to(GPU)
    target.quantise(ids)
    assert torch.cuda.memory_allocated() < held  # a byte a weight
    # Delta rules of random weights carry every error on to all later tokens.
    most = 1.0 if "qwen3_5" in case else 0.3
    assert list(target.tap_errors) == [1, 6] and all(0.003 < error < most for error in target.tap_errors.values())
    taps = torch.empty(2, 500, 2048, dtype=torch.bfloat16, device=GPU)

    def fill(number):
        ids.copy_(torch.randint(1000, (2, 500), generator=torch.Generator().manual_seed(number)))
        taps.fill_(float("nan"))

    lane = Lane("target 0", GPU, "graph")
    lane.add(Step("target", "r2-s500", lambda: target.extract(ids, taps), {"ids": ids}, {"taps": taps}, fill, 1))
    lane.warm_up()
    references = eager_references([lane])
    lane.capture()
    compare([lane], references)
    (row,) = lane.evidence
    assert row.max_difference == 0 and row.implementations.get("gemm") == ["fp8"], row.kernels
    # Before the output of attention or the delta rule there is a kernel for this alone; SwiGLU's quantises as well.
    assert row.families["quantise"] == 2 * 7
    assert row.gemm_fp8_flops == row.gemm_flops > 0
    lane.close()


def test_the_ceiling_in_fp8_is_above_that_in_bf16():
    assert matmul_ceiling(GPU, torch.float8_e4m3fn) > 1.4 * matmul_ceiling(GPU, torch.bfloat16)
