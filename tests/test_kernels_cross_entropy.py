"""The cross-entropy kernels against torch and their twin, in the interpreter without a GPU."""

import pytest
import torch
import torch.nn.functional as F

from draftgraph.kernels import cross_entropy as kernel
from draftgraph.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("ops", [kernel, reference], ids=["kernel", "twin"])
SIZES = pytest.mark.parametrize(("M", "V"), [(1, 1), (3, 7), (5, 4096), (4, 4097), (6, 10_001)])


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
def test_of_equal_logits_the_first_wins(ops):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[1, [17, 4500, 8999]] = 3.0
    assert ops.softmax_statistics(logits, torch.zeros(2, dtype=torch.long, device=DEVICE))[2].tolist() == [0, 17]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@BOTH
def test_a_weightless_row_is_zero_even_if_its_logits_are_not_numbers(ops):
    logits, labels, weights = case(3, 50)
    logits[0] = float("nan")
    _, log_sum, _ = ops.softmax_statistics(logits, labels)
    ops.softmax_gradient_(logits, labels, log_sum, weights)
    assert not logits[0].any() and torch.isfinite(logits).all()


@pytest.mark.gpu
@pytest.mark.parametrize("V", [49_152, 248_320])
def test_bf16_logits_agree_with_float32_arithmetic_on_the_same_logits(V):
    logits, labels, weights = case(64, V, torch.bfloat16)
    ce, log_sum, best = kernel.softmax_statistics(logits, labels)
    truth = F.cross_entropy(logits.float(), labels, reduction="none")
    torch.testing.assert_close(ce, truth, rtol=1e-5, atol=1e-5)
    assert (logits.gather(1, best[:, None])[:, 0] == logits.amax(-1)).all()
    expected = logits.clone()
    reference.softmax_gradient_(expected, labels, log_sum, weights)
    kernel.softmax_gradient_(logits, labels, log_sum, weights)
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-6)
