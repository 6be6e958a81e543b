"""The target's loop over its layers: the module's own taps, padded rows as if alone, families refused by name."""

import copy
import sys

import pytest
import torch
import transformers
from tiny import SHAPES, VOCAB, WINDOW, tiny_profile, write_target

from draftgraph.engine.errors import CaptureError, UsageError
from draftgraph.engine.models.layers import band
from draftgraph.engine.models.ops import by_device, choose_ops_by_device, twin_of, twins
from draftgraph.engine.models.target import Target, decoder_on_meta, load_config, load_model, load_tokenizer
from draftgraph.engine.plan import make_plan

CPU = torch.device("cpu")
TAPS = (1, 4)


def tiny_target(tmp_path, family, max_context=64, **extra):
    return Target(load_model(write_target(tmp_path, family, **extra), torch.float32, CPU), TAPS, max_context)


def extract(target, ids):
    taps = torch.full((*ids.shape, len(TAPS) * 32), float("nan"), dtype=target.dtype)
    target.extract(ids, taps)
    return taps


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def untouched_taps(target, ids):
    """From a module that transformers made, with its plainest attention and its loop over experts."""
    config = target.model.config
    module = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    module.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        states = module.get_decoder()(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in TAPS], -1)


@pytest.mark.parametrize("family", list(SHAPES))
def test_taps_are_the_modules_own_hidden_states(tmp_path, family):
    target = tiny_target(tmp_path, family)
    for parameter in target.model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(5)  # layers that matter beside the embedding
    ids = torch.randint(VOCAB, (3, 41), generator=torch.Generator().manual_seed(0))
    assert difference(extract(target, ids), untouched_taps(target, ids)) <= 1e-5
    target.check_against_module()


@pytest.mark.parametrize("family", list(SHAPES))
def test_a_row_in_a_padded_batch_has_the_taps_of_the_row_alone(tmp_path, family):
    target = tiny_target(tmp_path, family)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 7, 40]
    rows = [torch.randint(VOCAB, (1, n), generator=generator) for n in lengths]
    for pad in (0, VOCAB - 1):
        ids = torch.full((3, 40), pad)
        for r, row in enumerate(rows):
            ids[r, : row.shape[1]] = row
        taps = extract(target, ids)
        for r, row in enumerate(rows):
            torch.testing.assert_close(taps[r : r + 1, : lengths[r]], extract(target, row), rtol=1e-5, atol=1e-5)


def seen(mask):
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3_text", "gpt_oss"])
def test_a_sliding_layer_sees_its_window_and_a_short_row_needs_none(tmp_path, family):
    inputs = tiny_target(tmp_path, family).inputs
    sliding = inputs.layer_types.index("sliding_attention")
    mask = inputs.of(sliding, WINDOW + 4)["attention_mask"]
    kv, q = torch.arange(WINDOW + 4), torch.arange(WINDOW + 4)[:, None]
    assert torch.equal(seen(mask), (kv <= q) & (kv > q - WINDOW))
    short = inputs.of(sliding, WINDOW)["attention_mask"]
    if inputs.causal is None:
        assert short is None
    else:
        assert torch.equal(seen(short), (kv <= q)[:WINDOW, :WINDOW])
    assert mask.untyped_storage().nbytes() == 64 * 64 * mask.element_size()


def test_layers_after_the_last_tap_do_not_run(tmp_path):
    target = tiny_target(tmp_path, "llama")
    ran = []
    for i, layer in enumerate(target.decoder.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    extract(target, torch.zeros(1, 4, dtype=torch.long))
    assert ran == [0, 1, 2, 3, 4]


def test_taps_need_no_hooks_that_could_come_too_late(tmp_path):
    target = tiny_target(tmp_path, "qwen3_5_text")
    extract(target, torch.zeros(1, 4, dtype=torch.long))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())


def test_a_tied_head_is_the_embedding(tmp_path):
    tied = tiny_target(tmp_path, "llama")
    assert tied.lm_head.data_ptr() == tied.embedding.data_ptr()
    untied = tiny_target(tmp_path, "llama", tie_word_embeddings=False)
    assert untied.lm_head.data_ptr() != untied.embedding.data_ptr()


def test_a_family_that_is_more_than_its_layers_is_refused_by_name(tmp_path):
    target = tiny_target(tmp_path, "llama")
    forward = target.decoder.layers[2].forward
    target.decoder.layers[2].forward = lambda x, **kw: forward(x, **kw) * (1.5 if kw["use_cache"] is False else 1.0)
    calls = []
    extract_ids = target.decoder.forward
    target.decoder.forward = lambda **kw: calls.append(kw) or extract_ids(**{**kw, "use_cache": True})
    with pytest.raises(CaptureError, match="target family 'llama' is not supported"):
        target.check_against_module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_wrong_window_is_found(tmp_path, family, dtype):
    target = Target(load_model(write_target(tmp_path, family), dtype, CPU), TAPS, 64)
    target.check_against_module()
    wrong = WINDOW + 1 if dtype == torch.float32 else 2 * WINDOW
    target.inputs.band = band(64, wrong, dtype if family == "gemma2" else None, CPU)
    with pytest.raises(CaptureError, match=f"'{family}' is not supported: a loop over its layers differs"):
        target.check_against_module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_layers_rotated_like_global_ones_are_found(tmp_path, dtype):
    target = Target(load_model(write_target(tmp_path, "gemma3_text"), dtype, CPU), TAPS, 64)
    target.inputs.rope["sliding_attention"] = target.inputs.rope["full_attention"]
    with pytest.raises(CaptureError, match="'gemma3_text' is not supported: a loop over its layers differs"):
        target.check_against_module()


OTHERS: dict[str, tuple[dict, str]] = {
    "gpt2": ({}, "its decoder has no embed_tokens, rotary_emb, layers"),
    "bloom": ({"n_head": 4}, "its decoder has no embed_tokens, rotary_emb, layers"),
    "falcon": ({"head_dim": None}, "its decoder has no embed_tokens, layers"),
    "mamba": ({}, "its decoder has no embed_tokens, rotary_emb"),
    "opt": ({}, "its decoder has no rotary_emb"),
    "falcon_h1": ({}, "it has layers of type hybrid"),
    "gemma4_text": ({}, "its layers cannot be called in a loop"),
    "granite": ({"embedding_multiplier": 12.0}, "a loop over its layers differs from its own forward"),
}


@pytest.mark.parametrize("family", list(OTHERS))
def test_a_family_that_is_no_loop_over_its_layers_is_refused_by_name(tmp_path, family):
    extra, reason = OTHERS[family]
    model = load_model(write_target(tmp_path, family, **extra), torch.float32, CPU)
    with pytest.raises(CaptureError, match=f"target family '{family}' is not supported: {reason}"):
        Target(model, TAPS, 64).check_against_module()


def test_a_bfloat16_target_rotates_by_unrounded_frequencies(tmp_path):
    load_model(write_target(tmp_path), torch.float32, CPU).save_pretrained(tmp_path / "saved")
    for name in (write_target(tmp_path), str(tmp_path / "saved")):
        target = Target(load_model(name, torch.bfloat16, CPU), TAPS, 64)
        frequencies = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        angles = torch.arange(64)[:, None] * frequencies
        torch.testing.assert_close(target.inputs.rope["full_attention"][0][0, :, :8], angles.cos().bfloat16())
        assert target.dtype == torch.bfloat16


def test_ops_are_chosen_by_the_device_of_their_input():
    def twin(x):
        return "twin"

    def op(x):
        return "kernel"

    op.__wrapped__ = twin
    assert by_device(op)(torch.zeros(1)) == "twin"


def test_a_module_that_is_compared_with_calls_twins_and_afterwards_its_own_ops_again(tmp_path):
    model = load_model(write_target(tmp_path, "qwen3_5_text"), torch.float32, CPU)
    choose_ops_by_device(model)
    namespace = vars(sys.modules[type(model).__module__])
    own = namespace["torch_chunk_gated_delta_rule"]
    with pytest.raises(ZeroDivisionError), twins(model):
        assert namespace["torch_chunk_gated_delta_rule"] is twin_of(own.draftgraph_op) is not own
        raise ZeroDivisionError
    assert namespace["torch_chunk_gated_delta_rule"] is own


def test_a_random_target_has_the_same_weights_in_every_process(tmp_path):
    name = write_target(tmp_path)
    left, right = (load_model(name, torch.float32, CPU, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_a_target_that_is_not_there_is_one_sentence(tmp_path):
    for name in (str(tmp_path / "no.gguf"), "random:nothing", str(tmp_path)):
        with pytest.raises(UsageError, match=r"target\.model"):
            load_model(name, torch.float32, CPU)
    with pytest.raises(UsageError, match="no tokenizer"):
        load_tokenizer("random:qwen3.5-0.8b")


@pytest.mark.parametrize(
    "extra", [{"hidden_size": "x"}, {"num_attention_heads": 5}, {"hidden_size": -64}, {"pad_token_id": 4096}]
)
def test_a_configuration_that_no_model_can_have_is_one_sentence(tmp_path, extra):
    with pytest.raises((UsageError, CaptureError), match=r"not a model configuration|cannot build a model"):
        decoder_on_meta(load_config(write_target(tmp_path, "llama", **extra)))


def test_a_family_with_other_norms_than_rms_gets_a_drafter_all_the_same(tmp_path):
    assert make_plan(tiny_profile(tmp_path, "starcoder2")).shape.rms_norm_eps == 1e-6
