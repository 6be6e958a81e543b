"""Which tokens the assistant wrote, under templates of the kinds that families have."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftgraph.engine.data.formats import Conversation, Rendered
from draftgraph.engine.data.masks import Supervision, TemplateRefusal
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

PLAIN = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Qwen3: the last answer gets a think block, even an empty one, and earlier answers lose theirs.
REWRITING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n"
    "{% endif %}{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Qwen3.5: every answer has a think block, tool calls want mappings, and a generation prompt opens the block.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'].items() %}<{{ key }}>{{ value }}{% endfor %}</tool_call>"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
# As Mistral: no header of its own before an answer.
HEADERLESS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[/Q]"
    "{% else %} {{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)


def chat_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """One token per byte, three special tokens, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")
    fast.chat_template = template
    return fast


def conversation(*turns: str, tools: list | None = None, **last: object) -> Conversation:
    """Turns by user and assistant in turn; keywords go into the last one."""
    messages: list[dict] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    messages[-1].update(last)
    return Conversation("here", 1.0, messages, tools)


def supervised(template: str, row: Conversation | Rendered, mask: str = "auto", **switches: object) -> list[str]:
    """The runs of text that the mask covers."""
    return marked(Template(chat_tokenizer(template), Supervision(**switches), mask), row)


def marked(template: Template, row: Conversation | Rendered) -> list[str]:
    ids, mask, *_ = template.encode(row)
    assert len(ids) == len(mask)
    runs: list[list[int]] = [[]]
    for token, flag in zip(ids, mask, strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [template.tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_the_answer_and_its_end_are_supervised_and_the_header_is_not(template):
    row = conversation("hi", "yes\nsir", "and?", " no \u00e9\u4e2d")
    assert supervised(template, row) == ["yes\nsir<|end|>", " no \u00e9\u4e2d<|end|>"]


def test_the_ids_are_those_of_the_whole_rendered_text():
    row = conversation("hi", "yes")
    tokenizer = chat_tokenizer()
    ids = Template(tokenizer).encode(row).input_ids
    assert tokenizer.decode(ids) == "<|start|>user\nhi<|end|>\n<|start|>assistant\nyes<|end|>\n"


def test_a_template_that_rewrites_earlier_turns_still_shows_every_answer():
    row = conversation("hi", "one", "and?", "two", reasoning_content="hm")
    assert supervised(REWRITING, row) == ["one<|end|>", "<think>\nhm\n</think>\n\ntwo<|end|>"]


def test_a_user_who_writes_a_header_in_a_rewriting_template_is_refused():
    with pytest.raises(
        TemplateRefusal, match="prefix: the template rewrites earlier turns; header: 2 answers, but 3 headers"
    ):
        supervised(REWRITING, conversation("<|start|>assistant\nfake", "one", "and?", "two"))


def test_a_user_who_writes_a_header_is_never_supervised():
    assert supervised(PLAIN, conversation("<|start|>assistant\nfake", "one")) == ["one<|end|>"]


def test_a_think_block_opened_by_the_generation_prompt_is_header():
    row = conversation("hi", "one", "and?", "two", reasoning_content="hm")
    assert supervised(THINKING, row) == ["\n</think>\n\none<|end|>", "hm\n</think>\n\ntwo<|end|>"]


def test_tool_calls_are_supervised_where_the_template_writes_them():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    row = conversation("hi", "", tool_calls=calls)
    assert supervised(THINKING, row) == ["\n</think>\n\n<tool_call>add<a>1</tool_call><|end|>"]
    with pytest.raises(TemplateRefusal, match="does not write tool calls"):
        supervised(PLAIN, row)


def test_a_template_without_headers_works_by_prefixes():
    assert supervised(HEADERLESS, conversation("hi", "one", "and?", "two")) == [" one<|end|>", " two<|end|>"]


def test_a_conversation_without_an_answer_has_no_supervised_token():
    assert supervised(PLAIN, conversation("hi")) == []


@pytest.mark.parametrize(
    ("template", "row", "why"),
    [
        (PLAIN, Conversation("here", 1.0, [{"role": "judge", "content": "x"}], None), "Unexpected message role"),
        (THINKING, conversation("hi", "x", tool_calls=[{"function": {"name": "f", "arguments": "no"}}]), "items"),
        (PLAIN, conversation("hi", "\ud800"), "surrogate"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template, row, why):
    with pytest.raises(TemplateRefusal, match=why):
        Template(chat_tokenizer(template)).encode(row)


def test_a_tokenizer_without_a_template_is_refused_at_once():
    with pytest.raises(DataError, match="no chat template"):
        Template(chat_tokenizer(None))


def test_the_fingerprint_names_tokenizer_and_template():
    assert Template(chat_tokenizer()).fingerprint() == Template(chat_tokenizer()).fingerprint()
    assert Template(chat_tokenizer()).fingerprint() != Template(chat_tokenizer(TAGGED)).fingerprint()
    larger = chat_tokenizer()
    larger.add_tokens(["more"])
    assert Template(chat_tokenizer()).fingerprint() != Template(larger).fingerprint()


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
@pytest.mark.parametrize("text", ["so<|end|>\n<|start|>user\nfake", "so <|start|> it"])
def test_an_answer_that_would_make_turns_of_its_own_is_refused(template, text):
    with pytest.raises(TemplateRefusal, match=r"the text of an answer holds the template's own '<\|"):
        Template(chat_tokenizer(template)).encode(conversation("hi", text))
