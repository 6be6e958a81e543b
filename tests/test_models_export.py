"""The exported drafter: z-lab's fields and tensor names, read back unchanged, refused when it does not fit."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.drafter import Drafter, DrafterShape
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.released import load_zlab

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    vocab_size=64,
    mask_token_id=63,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=16,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
)
TARGET_CONFIG = SimpleNamespace(max_position_embeddings=512, bos_token_id=1, eos_token_id=[2, 3])


@pytest.fixture
def drafter() -> Drafter:
    drafter = Drafter(SHAPE, max_context=16)
    drafter.initialise(0)
    return drafter


@pytest.fixture
def exported(drafter, tmp_path):
    folder = tmp_path / "exports" / "drafter"
    summary = export_drafter(folder, drafter, TARGET_CONFIG, card={"base_model": "some/model", "acceptance": 2.5})
    assert summary == {
        "format": "zlab",
        "path": str(folder),
        "tensors": 3 + 11 * SHAPE.num_layers,
        "parameters": SHAPE.num_parameters,
    }
    return folder


def test_an_export_is_read_back_as_it_was(drafter, exported):
    shape, state = load_zlab(exported)
    assert shape == SHAPE
    assert state.keys() == dict(drafter.named_parameters()).keys()
    for name, parameter in drafter.named_parameters():
        assert torch.equal(state[name], parameter.bfloat16())


def test_the_config_holds_every_field_that_an_engine_reads(exported):
    config = json.loads((exported / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"block_size": 8, "mask_token_id": 63, "target_layer_ids": [1, 3, 5]},
        "num_target_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "rope_theta": 1e7,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    assert {key: config[key] for key in expected} == expected


def test_the_speculators_form_counts_layers_from_the_embedding_and_nests_the_decoder(drafter, tmp_path):
    summary = export_drafter(
        tmp_path / "out", drafter, TARGET_CONFIG, form="speculators", card={"base_model": "some/model"}
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (summary["format"], config["speculators_model_type"]) == ("speculators", "dflash")
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (8, 63, 64)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    decoder = config["transformer_layer_config"]
    assert (decoder["num_hidden_layers"], decoder["sliding_window"]) == (2, 16)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == dict(drafter.named_parameters()).keys()


def test_a_sliding_rule_that_zlabs_readers_do_not_follow_goes_to_speculators_only(tmp_path):
    drafter = Drafter(dataclasses.replace(SHAPE, sliding_rule="bidirectional"), max_context=16)
    with pytest.raises(UsageError, match="write --format speculators"):
        export_drafter(tmp_path / "out", drafter, TARGET_CONFIG, card={})
    export_drafter(tmp_path / "out", drafter, TARGET_CONFIG, form="speculators", card={"base_model": "some/model"})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window_non_causal"] is True


def test_transformers_reads_the_same_shape_from_the_config(exported):
    config = transformers.AutoConfig.from_pretrained(exported)
    assert type(config).__name__ == "Qwen3Config"
    assert config.rope_parameters["rope_theta"] == SHAPE.rope_theta
    assert tuple(config.layer_types) == SHAPE.layer_types
    assert (config.head_dim, config.num_hidden_layers, config.sliding_window) == (16, 2, 16)


def test_tensors_have_no_prefix_no_embedding_and_no_lm_head(exported):
    layer = r"(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm)"
    pattern = re.compile(rf"(fc|hidden_norm|norm|layers\.[01]\.{layer})\.weight")
    tensors = load_file(exported / "model.safetensors")
    assert all(pattern.fullmatch(name) for name in tensors)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_parameters_that_are_views_of_one_buffer_are_exported_alone(drafter, tmp_path):
    flat = torch.cat([p.detach().flatten() for p in drafter.parameters()])
    start = 0
    for parameter in drafter.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    export_drafter(tmp_path / "flat", drafter, TARGET_CONFIG, dtype=torch.float32, card={})
    _, state = load_zlab(tmp_path / "flat")
    assert all(torch.equal(state[name], p) for name, p in drafter.named_parameters())
    assert (tmp_path / "flat" / "model.safetensors").stat().st_size < flat.nbytes + 8192


def test_the_card_names_the_target_and_its_facts(exported):
    card = (exported / "README.md").read_text()
    assert card.startswith('---\nbase_model: "some/model"\n')
    assert "| acceptance | 2.5 |" in card


def test_an_export_replaces_an_earlier_one_and_leaves_nothing_beside_it(drafter, exported):
    drafter.initialise(1)
    export_drafter(exported, drafter, TARGET_CONFIG, card={})
    _, state = load_zlab(exported)
    assert torch.equal(state["fc.weight"], drafter.fc.weight.bfloat16())
    assert [path.name for path in exported.parent.iterdir()] == ["drafter"]


def test_a_folder_of_something_else_is_refused_and_kept(drafter, tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(UsageError, match="holds more than an earlier export"):
        export_drafter(tmp_path, drafter, TARGET_CONFIG, card={})
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_missing_unexpected_and_misshapen_tensors_are_named(exported):
    tensors = load_file(exported / "model.safetensors")
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(DataError) as caught:
        load_zlab(exported)
    for part in ("missing norm.weight", "unexpected model.norm.weight", "fc.weight is (32, 95), expected (32, 96)"):
        assert part in str(caught.value)


def test_a_missing_field_is_named(exported):
    config = json.loads((exported / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="mask_token_id"):
        load_zlab(exported)


def test_a_folder_without_an_export_is_one_readable_error(tmp_path):
    with pytest.raises(DataError, match="is not an exported drafter"):
        load_zlab(tmp_path)
