"""What surrounds and makes up a gated delta layer: kernels against their twins, twins against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from draftgraph.kernels import causal_conv, gates, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape and found.is_contiguous()
    difference = (found.float() - expected.float()).abs().max().item()
    assert difference <= tolerance * expected.abs().max().item(), difference


def slices(H, C, S, seed=0, dtype=torch.float32, R=2):
    """Two [R, S, H, C] slices of the output of one wider GEMM; what is between them is NaN."""
    wide = torch.full((R, S, 2 * H * C + 7), float("nan"), device=DEVICE, dtype=dtype)
    left, right = wide[..., 3 : 3 + H * C], wide[..., -H * C :]
    left.copy_(randn(R, S, H * C, seed=seed))
    right.copy_(randn(R, S, H * C, seed=seed + 1))
    return left.view(R, S, H, C), right.view(R, S, H, C)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("H", "C", "S", "width"), [(1, 16, 1, 4), (3, 24, 70, 4), (2, 128, 65, 2)])
def test_the_convolution_kernel_equals_its_twin(H, C, S, width, normalise):
    x, _ = slices(H, C, S)
    weight = randn(H * C, width, seed=2)
    assert_near(causal_conv.causal_conv(x, weight, normalise), reference.causal_conv(x, weight, normalise))


def test_a_token_sees_itself_and_the_three_before_it():
    x = torch.zeros(1, 9, 1, 16)
    x[0, 2] = 1.0
    weight = torch.tensor([4.0, 3.0, 2.0, 1.0]).repeat(16, 1)
    found = reference.causal_conv(x, weight, normalise=False)[0, :, 0, 0]
    torch.testing.assert_close(found, F.silu(torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0])))
    lengths = reference.causal_conv(randn(1, 9, 2, 16).cpu(), randn(32, 4).cpu(), normalise=True).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(1, 9, 2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("H", "C", "S"), [(1, 16, 1), (3, 24, 70), (2, 256, 33)])
def test_the_gate_kernels_equal_their_twins(H, C, S, heads_first):
    x, gate = slices(H, C, S)
    weight = randn(C, seed=3)
    if heads_first:  # as some attention kernels leave their output
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert_near(gates.gated_rms_norm(x, gate, weight, 1e-6), reference.gated_rms_norm(x, gate, weight, 1e-6))
    assert_near(gates.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate))


def test_gates_are_what_they_say():
    x, gate, weight = randn(1, 3, 2, 16).cpu(), randn(1, 3, 2, 16, seed=1).cpu(), randn(16).cpu()
    assert_near(reference.sigmoid_gate(x, gate), (x * torch.sigmoid(gate)).flatten(2))
    assert_near(
        reference.gated_rms_norm(x, gate, weight, 1e-6),
        (F.rms_norm(x, (16,), weight, 1e-6) * F.silu(gate)).flatten(2),
    )


@pytest.mark.parametrize(("S", "H", "HV", "C", "CV"), [(1, 1, 1, 16, 16), (70, 2, 6, 16, 24), (130, 2, 2, 8, 8)])
def test_the_delta_rules_twin_is_its_recurrence(S, H, HV, C, CV):
    R = 2
    q, k = (F.normalize(randn(R, S, H, C, seed=s).cpu().double(), dim=-1) for s in (0, 1))
    v, a, b = (randn(*shape, seed=2).cpu().double() for shape in ((R, S, HV, CV), (R, S, HV), (R, S, HV)))
    A_log, dt_bias = randn(HV, seed=3).cpu().double(), randn(HV, seed=4).cpu().double()
    decay = torch.exp(-A_log.exp() * F.softplus(a + dt_bias))
    memory = torch.zeros(R, HV, C, CV, dtype=torch.double)
    expected = torch.empty(R, S, HV, CV, dtype=torch.double)
    for t in range(S):
        query, key = (x[:, t].repeat_interleave(HV // H, 1) for x in (q, k))
        memory = memory * decay[:, t, :, None, None]
        held = torch.einsum("rhc,rhcd->rhd", key, memory)
        correction = b[:, t].sigmoid()[..., None] * (v[:, t] - held)
        memory = memory + key[..., None] * correction[..., None, :]
        expected[:, t] = torch.einsum("rhc,rhcd->rhd", query * C**-0.5, memory)
    assert_near(reference.gated_delta(q, k, v, a, b, A_log, dt_bias), expected, 1e-12)


@pytest.mark.gpu
def test_bf16_kernels_are_within_a_rounding_of_the_float32_twins():
    x, gate = slices(16, 128, 1000, dtype=torch.bfloat16)
    weight, scale = randn(16 * 128, 4, seed=2, dtype=torch.bfloat16), randn(128, seed=3, dtype=torch.bfloat16)
    wide = (x.float(), gate.float())
    for normalise in (False, True):
        truth = reference.causal_conv(wide[0], weight.float(), normalise)
        assert_near(causal_conv.causal_conv(x, weight, normalise), truth, 4e-3)
    assert_near(gates.gated_rms_norm(x, gate, scale, 1e-6), reference.gated_rms_norm(*wide, scale.float(), 1e-6), 4e-3)
    assert_near(gates.sigmoid_gate(x, gate), reference.sigmoid_gate(*wide), 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "H", "HV"), [(1, 16, 16), (1000, 16, 16), (1000, 4, 12)])
def test_flas_delta_rule_is_near_the_float32_twin(S, H, HV):
    from draftgraph.engine.models.target import quiet
    from draftgraph.kernels.gated_delta import gated_delta, implementation

    with quiet():
        implementation()  # fla warns on import
    q, k = (F.normalize(randn(2, S, H, 128, seed=s), dim=-1).bfloat16() for s in (0, 1))
    v = randn(2, S, HV, 128, seed=2, dtype=torch.bfloat16)
    a, b = randn(2, S, 2 * HV, seed=3, dtype=torch.bfloat16).chunk(2, -1)
    A_log, dt_bias = randn(HV, seed=4, dtype=torch.bfloat16), randn(HV, seed=5, dtype=torch.bfloat16)
    inputs = (q, k, v, a, b, A_log, dt_bias)
    truth = reference.gated_delta(*(x.float() for x in inputs))
    assert_near(gated_delta(*inputs), truth, 2e-2)
