"""Products of the target in FP8: what is quantised and how far, what it costs in accuracy, and where it is refused."""

import pytest
import torch
from fused_cases import EVERY_CASE, TAPS, extract, make_model, token_ids
from rich.console import Console
from tiny import profile_values, tiny_profile, write_target

from draftgraph.engine.config import from_values
from draftgraph.engine.errors import UsageError
from draftgraph.engine.models import forward
from draftgraph.engine.models.target import Target, load_model
from draftgraph.engine.plan import make_plan
from draftgraph.engine.train import warmup
from draftgraph.kernels import fp8, reference, rms_norm
from draftgraph.kernels.reference import Quantised

CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised_target(tmp_path, case, dtype=torch.float32):
    target = Target(make_model(tmp_path, case, dtype, CPU), TAPS, 128, "fused")
    target.quantise(token_ids(2, 20, seed=5))
    return target


def assert_same(found: Quantised, expected: Quantised):
    """Bit for bit, but where the interpreter loses the carry of a rounding up to a power of two (triton 3.9)."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0)
    a, b = found.values.float(), expected.values.float()
    carry = (b.abs().log2() % 1 == 0) & (a == b / 2)
    steps = (found.values.view(torch.uint8).int() - expected.values.view(torch.uint8).int()).abs()
    assert (steps[~carry] <= 1).all() and (steps[~carry] != 0).float().mean() < 0.01  # a tie, an ulp apart before it


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 130), (2, 6000)])
def test_rows_are_quantised_as_their_twins_say(shape):
    x = 3 * random(*shape)
    weight = random(shape[-1], seed=1)
    assert_same(fp8.quantise_rows(x), reference.quantise_rows(x))
    assert_same(fp8.swiglu_quantised(x), reference.swiglu_quantised(x))
    assert_same(rms_norm.rms_norm_quantised(x, weight, 1e-6), reference.rms_norm_quantised(x, weight, 1e-6))
    (found, total), (expected, sum_) = (
        ops.add_rms_norm_quantised(x, x.flip(0), weight, 1e-6, True) for ops in (rms_norm, reference)
    )
    assert_same(found, expected)
    assert torch.equal(total, sum_)


def test_an_element_keeps_three_bits_and_small_ones_the_range_of_their_row():
    x = random(64, 300) * torch.logspace(-3, 3, 64)[:, None]
    values, scales = reference.quantise_rows(x)
    largest = x.abs().amax(-1, keepdim=True)
    assert torch.equal(values.float().abs().amax(-1), torch.full((64,), 448.0))
    error = (values.float() * scales - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, largest * 2**-18)).all()


def test_a_row_of_zeros_stays_zero_and_a_nan_stays_in_its_row():
    x = random(5, 40)
    x[1], x[3, 7] = 0.0, float("nan")
    for ops in (fp8, reference):
        values, scales = ops.quantise_rows(x)
        assert torch.equal(values[1].float(), torch.zeros(40)) and torch.isfinite(scales[[0, 1, 2, 4]]).all()
        assert torch.isfinite(values[[0, 1, 2, 4]].float()).all()
    assert values[3, 7].isnan()  # the interpreter has no NaN in e4m3


def test_a_product_of_quantised_rows_is_that_of_what_they_stand_for():
    x, weight, bias = random(2, 3, 32), random(16, 32, seed=1), random(16, seed=2)
    left, right = reference.quantise_rows(x), reference.quantise_rows(weight)
    exact = (left.values.double() * left.scales) @ (right.values.double() * right.scales).T + bias
    found = reference.scaled_linear(left, right, bias, torch.float32)
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)
    assert 0.01 < (found - (x @ weight.T + bias)).norm() / found.norm() < 0.05


@EVERY_CASE
def test_the_taps_move_by_what_is_said_and_not_far(tmp_path, case):
    own = Target(make_model(tmp_path, case, torch.float32, CPU), TAPS, 128, "fused")
    target = quantised_target(tmp_path, case)
    ids = token_ids(2, 20, seed=5)
    found, expected = extract(target, ids), extract(own, ids)
    assert list(target.tap_errors) == [1, 4] and own.tap_errors == {}
    for n, layer in enumerate(TAPS):
        part = slice(32 * n, 32 * (n + 1))
        differences = (found[..., part] - expected[..., part]).norm(dim=-1) / expected[..., part].norm(dim=-1)
        assert target.tap_errors[layer] == pytest.approx(differences.mean().item())
        assert target.tap_errors[layer] > 0.005
    # Each layer alone: four products, each 4 % off; over the layers of a target this small it adds up to more.
    x = random(2, 20, 32)
    for i in range(len(own.fused.layers)):
        exact = own.fused.layer(i, x)
        error = ((target.fused.layer(i, x) - exact).norm() / (exact - x).norm()).item()
        assert 0.03 < error < (0.25 if "qwen3_5" in case else 0.08), (i, error)


@EVERY_CASE
def test_a_row_in_a_padded_batch_has_the_taps_of_the_row_alone(tmp_path, case):
    target, ids = quantised_target(tmp_path, case), token_ids(3, 100)
    taps = extract(target, ids)
    for r, n in enumerate((1, 70, 100)):
        changed = ids.clone()
        changed[r, n:] = 0
        assert torch.equal(extract(target, changed)[r, :n], taps[r, :n])


def test_weights_are_held_once_in_a_byte_each(tmp_path):
    target = quantised_target(tmp_path, "qwen3_5, HV = 2H", torch.bfloat16)
    layers = target.decoder.layers
    assert not any(p.numel() for layer in layers[:5] for n, p in layer.named_parameters() if n.endswith("proj.weight"))
    assert all(p.numel() for p in layers[5].parameters())  # after the last tap
    for _, mlp in target.fused.layers:
        assert mlp.gate_up.weight.values.nbytes == 2 * 64 * 32 and mlp.gate_up.weight.scales.shape == (128, 1)
    assert target.ops["linear"] == "draftgraph.kernels.reference.scaled_linear"


def test_fp8_without_a_fused_forward_or_a_device_for_it_is_refused(tmp_path, monkeypatch):
    target = Target(load_model(write_target(tmp_path, "olmo2"), torch.float32, CPU), TAPS, 64)
    with pytest.raises(UsageError, match=r"'olmo2' runs its module's own layers here.*target.precision = \"own\""):
        target.quantise(token_ids(1, 9))
    found, gpu = quantised_target(tmp_path, "llama").fused, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UsageError, match=r"cuda:0 \(NVIDIA A100\) has no products in FP8: .* 8.9 or more"):
        forward.require_fp8(found, "llama", torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    forward.require_fp8(found, "llama", torch.bfloat16, gpu)
    with pytest.raises(UsageError, match=r'set target\.dtype = "bfloat16"'):
        forward.require_fp8(found, "llama", torch.float32, gpu)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"forward": "module"}}, r'is for fused forwards; write target\.forward = "auto"'),
        (
            {
                "placement": {"targets": ["cuda:0"], "drafters": ["cuda:0"]},
                "capture": {"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
            },
            r'give bfloat16; write target\.dtype = "bfloat16"',
        ),
    ],
)
def test_a_profile_that_cannot_be_in_fp8_is_refused_before_anything_is_loaded(tmp_path, changes, message):
    values = profile_values(tmp_path, **changes)
    values["target"]["precision"] = "fp8"
    with pytest.raises(UsageError, match=message):
        forward.refuse_fp8(from_values(values))


def test_warmup_names_the_product_and_the_error_of_every_tap(tmp_path):
    profile = tiny_profile(tmp_path, target={"precision": "fp8"})
    evidence = warmup(profile, tmp_path / "run", Console(quiet=True))
    assert evidence["ops"]["linear"].endswith(".scaled_linear") and evidence["verified"]
    taps = make_plan(profile).shape.target_layer_ids
    assert list(evidence["tap_errors"]) == [str(i) for i in taps]
    assert all(0.001 < error < 0.1 for error in evidence["tap_errors"].values())
