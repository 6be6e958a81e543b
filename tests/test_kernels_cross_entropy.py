"""The cross-entropy kernels against torch and their twin, in the interpreter without a GPU."""

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from draftgraph.kernels import cross_entropy as kernel
from draftgraph.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("ops", [kernel, reference], ids=["kernel", "twin"])
# The interpreter computes with numpy, which warns of what is no number.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice):RuntimeWarning")
SIZES = pytest.mark.parametrize(("M", "V"), [(1, 1), (3, 7), (5, 4096), (3, 16_385), (2, 40_001)])


def case(M, V, dtype=torch.float32):
    generator = torch.Generator().manual_seed(M * V)
    logits = (5 * torch.randn(M, V, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(V, (M,), generator=generator).to(DEVICE)
    weights = torch.rand(M, generator=generator).to(DEVICE)
    weights[0] = 0.0
    return logits, labels, weights


@BOTH
@SIZES
def test_statistics_are_torchs(ops, M, V):
    logits, labels, _ = case(M, V)
    ce, log_sum, best = ops.softmax_statistics(logits, labels)
    torch.testing.assert_close(ce, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sum, logits.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(best, logits.argmax(-1))


@BOTH
@SIZES
def test_the_gradient_is_autograds_and_takes_the_logits_place(ops, M, V):
    logits, labels, weights = case(M, V)
    leaf = logits.clone().requires_grad_()
    (weights * F.cross_entropy(leaf, labels, reduction="none")).sum().backward()
    _, log_sum, _ = ops.softmax_statistics(logits, labels)
    ops.softmax_gradient_(logits, labels, log_sum, weights)
    torch.testing.assert_close(logits, leaf.grad, rtol=1e-5, atol=1e-6)


@BOTH
@SIZES
def test_one_kernel_gives_what_the_two_give(ops, M, V):
    logits, labels, weights = case(M, V)
    ce, log_sum, best = ops.softmax_statistics(logits, labels)
    expected = logits.clone()
    ops.softmax_gradient_(expected, labels, log_sum, weights)
    found_ce, found_best = ops.cross_entropy_gradient_(logits, labels, weights)
    assert torch.equal(found_ce, ce) and torch.equal(found_best, best) and torch.equal(logits, expected)


@triton.jit
def exp_with_one_rounding(x, shift):
    """`exp` as a GPU has it: the interpreter rounds the product too."""
    return tl.exp2((x.to(tl.float64) * 1.4426950216293335 + shift).to(tl.float32))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU fuses by itself")
@pytest.mark.parametrize("V", [7, 97, 9000, 248_320])
def test_a_fused_multiply_add_leaves_no_group_without_logits_a_sum_and_lets_none_drift(V, monkeypatch):
    monkeypatch.setattr(kernel, "exp", exp_with_one_rounding)
    logits, labels, weights = case(2, V)
    logits[:, 5], labels[:] = 37.3, 5  # stays the largest to the end
    others, expected = logits.clone(), F.cross_entropy(logits.double(), labels, reduction="none")
    ce, log_sum, _ = kernel.softmax_statistics(logits, labels)
    torch.testing.assert_close(log_sum.double(), logits.double().logsumexp(-1), rtol=0, atol=4e-6)
    torch.testing.assert_close(ce.double(), expected, rtol=0, atol=4e-6)
    assert kernel.divergence_gradient_(logits, others, weights)[0].abs().max() <= 1e-6
    assert torch.equal(kernel.cross_entropy_gradient_(others, labels, weights)[0], ce)


@BOTH
def test_of_equal_logits_the_first_wins(ops):
    logits = torch.full((3, 50_000), -2.0, device=DEVICE)
    # In one group of three tiles; in a group, in another of its tile, and in an earlier one of the next tile.
    logits[1, [17, 16_401, 32_785]] = 3.0
    logits[2, [16_400, 16_402, 16_500, 32_769]] = 3.0
    labels, weights = torch.zeros(3, dtype=torch.long, device=DEVICE), torch.ones(3, device=DEVICE)
    assert ops.softmax_statistics(logits, labels)[2].tolist() == [0, 17, 16_400]
    assert ops.cross_entropy_gradient_(logits, labels, weights)[1].tolist() == [0, 17, 16_400]


@BOTH
def test_logits_far_apart_neither_overflow_nor_lose_the_small_ones(ops):
    logits = torch.full((2, 9000), -1e4, device=DEVICE)
    logits[0, [3, 8999]] = torch.tensor([1e4, 1e4], device=DEVICE)
    labels = torch.tensor([3, 7], device=DEVICE)
    ce, log_sum, _ = ops.softmax_statistics(logits, labels)
    expected = torch.tensor([2.0, 9000.0], device=DEVICE).log()
    torch.testing.assert_close(ce, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(log_sum, torch.tensor([1e4, -1e4], device=DEVICE) + expected, rtol=0, atol=2e-3)


@NUMPY_WARNS
@BOTH
def test_a_weightless_row_is_zero_even_if_its_logits_are_not_numbers(ops):
    logits, labels, weights = case(3, 50)
    logits[0] = float("nan")
    _, log_sum, _ = ops.softmax_statistics(logits, labels)
    fused = logits.clone()
    ops.softmax_gradient_(logits, labels, log_sum, weights)
    ops.cross_entropy_gradient_(fused, labels, weights)
    for gradient in (logits, fused):
        assert not gradient[0].any() and torch.isfinite(gradient).all()


@NUMPY_WARNS
@BOTH
def test_one_logit_that_is_no_number_makes_the_loss_none(ops):
    logits, labels, weights = case(3, 9000)
    logits[1, 8500] = float("nan")
    ce, _ = ops.cross_entropy_gradient_(logits, labels, weights)
    assert torch.isfinite(ce).tolist() == [True, False, True]


def other_case(M, V, dtype=torch.float32):
    logits, _, weights = case(M, V, dtype)
    others = 4 * torch.randn(M, V, generator=torch.Generator().manual_seed(M + V))
    return logits, others.to(DEVICE, dtype), weights


def true_divergence(logits, others):
    return F.kl_div(logits.log_softmax(-1), others.log_softmax(-1), reduction="none", log_target=True).sum(-1)


@BOTH
@SIZES
def test_the_divergence_is_torchs_and_its_gradient_autograds(ops, M, V):
    logits, others, weights = other_case(M, V)
    leaf, kept = logits.clone().requires_grad_(), others.clone()
    expected, bests = true_divergence(leaf, others), (logits.argmax(-1), others.argmax(-1))
    (weights * expected).sum().backward()
    divergence, best, other_best = ops.divergence_gradient_(logits, others, weights)
    torch.testing.assert_close(divergence, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, leaf.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(best, bests[0]) and torch.equal(other_best, bests[1]) and torch.equal(others, kept)
    assert not logits[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("V", [49_152, 248_320])
def test_bf16_divergence_agrees_with_float32_arithmetic_on_the_same_logits(V):
    logits, others, weights = other_case(64, V, torch.bfloat16)
    truth, twin, again = true_divergence(logits.float(), others.float()), logits.clone(), logits.clone()
    _, best, other_best = reference.divergence_gradient_(twin, others, weights)
    divergence, *bests = kernel.divergence_gradient_(logits, others, weights)
    torch.testing.assert_close(divergence, truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, twin, rtol=1e-2, atol=1e-6)
    assert torch.equal(bests[0], best) and torch.equal(bests[1], other_best) and not logits[0].any()
    kernel.divergence_gradient_(again, others, weights)
    assert torch.equal(again, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [49_152, 248_320])
def test_bf16_logits_agree_with_float32_arithmetic_on_the_same_logits(V):
    logits, labels, weights = case(64, V, torch.bfloat16)
    ce, log_sum, best = kernel.softmax_statistics(logits, labels)
    truth = F.cross_entropy(logits.float(), labels, reduction="none")
    torch.testing.assert_close(ce, truth, rtol=1e-5, atol=1e-5)
    assert (logits.gather(1, best[:, None])[:, 0] == logits.amax(-1)).all()
    expected, fused, again = logits.clone(), logits.clone(), logits.clone()
    reference.softmax_gradient_(expected, labels, log_sum, weights)
    fused_ce, fused_best = kernel.cross_entropy_gradient_(fused, labels, weights)
    kernel.softmax_gradient_(logits, labels, log_sum, weights)
    for gradient in (logits, fused):
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-6)
    assert torch.equal(fused_ce, ce) and torch.equal(fused_best, best) and not fused[0].any()
    kernel.cross_entropy_gradient_(again, labels, weights)
    assert torch.equal(again, fused)
