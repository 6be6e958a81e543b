"""Fused forwards: the module's own taps, from the module's own memory, and nothing more."""

from types import SimpleNamespace

import pytest
import torch
from fused_cases import EVERY_CASE, TAPS, extract, make_model, token_ids
from tiny import WINDOW, write_target

from draftgraph.engine.errors import CaptureError, UsageError
from draftgraph.engine.models import fused
from draftgraph.engine.models.target import Target, load_model
from draftgraph.kernels import fused as kernels
from draftgraph.kernels import reference

CPU = torch.device("cpu")


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@EVERY_CASE
def test_taps_are_the_modules_own_hidden_states(tmp_path, case):
    model = make_model(tmp_path, case, torch.float32, CPU)
    ids = token_ids(2, 150)  # beyond two chunks of the delta rule
    states = model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    target = Target(model, TAPS, 160, "fused")
    target.check_against_module()
    for n, i in enumerate(TAPS):
        assert relative(extract(target, ids)[..., 32 * n : 32 * (n + 1)], states[i + 1]) < 1e-5


@EVERY_CASE
def test_the_triton_kernels_in_their_places_give_the_same_taps(tmp_path, case, monkeypatch):
    ids = token_ids(2, 9)
    expected = extract(Target(make_model(tmp_path, case, torch.float32, CPU), TAPS, 16, "fused"), ids)
    # fla has no interpreter: the delta rule alone stays a twin.
    ops = SimpleNamespace(**{**vars(kernels), "gated_delta": reference.gated_delta})
    monkeypatch.setattr(fused, "reference", ops)
    assert (
        relative(extract(Target(make_model(tmp_path, case, torch.float32, CPU), TAPS, 16, "fused"), ids), expected)
        < 1e-5
    )


@EVERY_CASE
def test_a_row_in_a_padded_batch_has_the_taps_of_the_row_alone(tmp_path, case):
    target = Target(make_model(tmp_path, case, torch.float32, CPU), TAPS, 128, "fused")
    lengths = [1, 3, 70, 100]
    ids = token_ids(4, 100)
    taps = extract(target, ids)
    assert torch.isfinite(taps).all()
    for r, n in enumerate(lengths):
        changed = ids.clone()
        changed[r, n:] = 0
        assert torch.equal(extract(target, changed)[r, :n], taps[r, :n])
        torch.testing.assert_close(taps[r : r + 1, :n], extract(target, ids[r : r + 1, :n]), rtol=1e-4, atol=1e-5)


@EVERY_CASE
def test_the_module_keeps_its_values_and_nothing_is_held_twice(tmp_path, case):
    model = make_model(tmp_path, case, torch.float32, CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = token_ids(1, 12)
    logits = model(input_ids=ids, use_cache=False).logits
    target = Target(model, TAPS, 16, "fused")
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
    own = [tensor for _, mlp in target.fused.layers for tensor in (mlp.gate_up.weight, mlp.down.weight)]
    assert len(own) == 10 and all(tensor.untyped_storage().data_ptr() in storages for tensor in own)


def test_two_targets_on_one_module_share_its_memory(tmp_path):
    model = make_model(tmp_path, "llama", torch.float32, CPU)
    left, right = (Target(model, TAPS, 16, "fused") for _ in range(2))
    for (_, one), (_, other) in zip(left.fused.layers, right.fused.layers, strict=True):
        assert one.gate_up.weight.data_ptr() == other.gate_up.weight.data_ptr()
        assert one.gate_up.weight.shape == other.gate_up.weight.shape == (128, 32)
    assert torch.equal(extract(left, token_ids(1, 9)), extract(right, token_ids(1, 9)))


def test_layers_after_the_last_tap_are_not_touched(tmp_path):
    model = make_model(tmp_path, "qwen3_5, HV = 2H", torch.float32, CPU)
    target = Target(model, TAPS, 16, "fused")
    for parameter in model.get_decoder().layers[5].parameters():
        parameter.fill_(float("nan"))
    assert torch.isfinite(extract(target, token_ids(1, 9))).all()


@pytest.mark.parametrize("case", ["llama", "qwen3_5, HV = 2H"])
def test_a_layer_that_computes_something_else_is_refused_by_its_number(tmp_path, case):
    target = Target(make_model(tmp_path, case, torch.float32, CPU), TAPS, 16, "fused")
    mixer, mlp = target.fused.layers[3]
    target.fused.layers[3] = (lambda x, rotary: 1.1 * mixer(x, rotary), mlp)
    with pytest.raises(CaptureError, match=r"differs from its module in layer 3 by .*target\.forward = \"module\""):
        target.check_against_module()


def test_a_tap_of_the_wrong_layer_is_refused(tmp_path):
    target = Target(make_model(tmp_path, "qwen3", torch.float32, CPU), TAPS, 16, "fused")
    correct = target.fused.extract

    def swapped(ids, taps):
        correct(ids, taps)
        taps.copy_(taps.roll(32, -1))

    target.fused.extract = swapped
    with pytest.raises(CaptureError, match="the chain of layers"):
        target.check_against_module()


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("gemma2", {}, "there are only those of llama, qwen2, qwen3, qwen3_5_text"),
        ("qwen2", {}, f"its window of {WINDOW} tokens is shorter than the largest bucket"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
    ],
)
def test_what_has_no_fused_forward_runs_its_module_unless_it_was_named(tmp_path, family, extra, reason):
    model = load_model(write_target(tmp_path, family, **extra), torch.float32, CPU)
    assert Target(model, TAPS, 64, "auto").ops["forward"] == "module"
    with pytest.raises(UsageError, match=rf'forward = "fused", but target family .*{reason}.*write "auto" or "module"'):
        Target(model, TAPS, 64, "fused")


def test_the_evidence_names_the_forward_and_its_delta_rule(tmp_path):
    model = make_model(tmp_path, "qwen3_5, HV = H", torch.float32, CPU)
    assert Target(model, TAPS, 16, "auto").ops == {
        "forward": "draftgraph.engine.models.fused_qwen3_5.FusedQwen35",
        "gated_delta": "draftgraph.kernels.reference.gated_delta",
    }
