"""The target's loop over its layers: the module's own taps, padded rows as if alone, families refused by name."""

import pytest
import torch
from tiny import SHAPES, VOCAB, write_target

from draftgraph.engine.errors import CaptureError, UsageError
from draftgraph.engine.models.target import Target, by_device, load_model, load_tokenizer

CPU = torch.device("cpu")
TAPS = (1, 4)


def tiny_target(tmp_path, family, max_context=64, **extra):
    return Target(load_model(write_target(tmp_path, family, **extra), torch.float32, CPU), TAPS, max_context)


def extract(target, ids):
    taps = torch.full((*ids.shape, len(TAPS) * 32), float("nan"))
    target.extract(ids, taps)
    return taps


@pytest.mark.parametrize("family", list(SHAPES))
def test_taps_are_the_modules_own_hidden_states(tmp_path, family):
    target = tiny_target(tmp_path, family)
    ids = torch.randint(VOCAB, (3, 21), generator=torch.Generator().manual_seed(0))
    states = target.decoder(input_ids=ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in TAPS], -1)
    torch.testing.assert_close(extract(target, ids), expected, rtol=1e-5, atol=1e-5)
    target.check_against_module()


@pytest.mark.parametrize("family", list(SHAPES))
def test_a_row_in_a_padded_batch_has_the_taps_of_the_row_alone(tmp_path, family):
    target = tiny_target(tmp_path, family)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 7, 24]
    ids = torch.zeros(3, 24, dtype=torch.long)
    for r, n in enumerate(lengths):
        ids[r, :n] = torch.randint(VOCAB, (n,), generator=generator)
    taps = extract(target, ids)
    for r, n in enumerate(lengths):
        torch.testing.assert_close(taps[r : r + 1, :n], extract(target, ids[r : r + 1, :n]), rtol=1e-5, atol=1e-5)


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


def test_a_window_shorter_than_the_context_is_refused(tmp_path):
    extra = {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 6}
    model = load_model(write_target(tmp_path, "qwen3", **extra), torch.float32, CPU)
    Target(model, TAPS, 16)
    with pytest.raises(CaptureError, match="window of 16 tokens"):
        Target(model, TAPS, 17)


def test_ops_are_chosen_by_the_device_of_their_input():
    def twin(x):
        return "twin"

    def op(x):
        return "kernel"

    op.__wrapped__ = twin
    assert by_device(op)(torch.zeros(1)) == "twin"


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
