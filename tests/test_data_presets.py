"""Presets find the turns of the usual families, and a template as Qwen3.5's is read with the right masks."""

import json

import pytest
from test_data_template import TAGGED, chat_tokenizer, conversation, marked

from draftgraph.engine.data.doctor import report
from draftgraph.engine.data.formats import Conversation, Rendered, read_row
from draftgraph.engine.data.masks import Supervision, TemplateRefusal
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.presets import PRESETS
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

# As Qwen3.5 is described: every answer thinks, be it nothing; calls are functions; results are a user's.
QWEN35 = r"""
{%- macro say(content) %}
{%- if content is string %}{{- content | trim }}
{%- else %}{%- for part in content %}{{- part.text | trim }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set seen = namespace(query=false) %}
{%- for m in messages %}
    {%- set is_result = say(m.content).startswith('<tool_response>') %}
    {%- if m.role == 'user' and not is_result %}{%- set seen.query = true %}{%- endif %}
{%- endfor %}
{%- if not messages %}{{- raise_exception('No messages provided.') }}{%- endif %}
{%- if not seen.query %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- if tools %}{{- '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {{- '<|im_start|>system\n' + say(m.content) + '<|im_end|>\n' }}
    {%- elif m.role == 'user' %}
        {{- '<|im_start|>user\n' + say(m.content) + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + say(m.content) + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif m.role == 'assistant' %}
        {%- set content = say(m.content) %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n<think>\n' + thought | trim + '\n</think>\n\n' + content | trim }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first and content | trim %}{{- '\n\n' }}{%- elif not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set value = value if value is string else value | tojson %}
                {{- '<parameter=' + name + '>\n' + value + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n') }}
{%- endif %}
"""
# As Qwen3: only the last answer keeps its thinking.
FORGETFUL = QWEN35.replace(
    "{{- '<|im_start|>assistant\\n<think>\\n' + thought | trim + '\\n</think>\\n\\n' + content | trim }}",
    "{{- '<|im_start|>assistant\\n' + ('<think>\\n' + thought + '\\n</think>\\n\\n' if loop.last else '') + content }}",
).replace("'<think>\\n') }}", "'') }}")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "{{ '<|eom_id|>' if m['tool_calls'] else '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The tools stand before the last question, so that no prefix is stable.
MISTRAL = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% if m is sameas last %}[AVAILABLE_TOOLS][][/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m['content'] }}[/INST]{% elif m['role'] == 'tool' %}[TOOL_RESULTS]{{ m['content'] }}[/TOOL_RESULTS]"
    "{% elif m['tool_calls'] %}[TOOL_CALLS][{}]</s>{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}{% elif m['role'] == 'tool' %}"
    "<|tool_output_begin|>{{ m['content'] }}<|tool_output_end|>{% else %}"
    "{% if loop.previtem['role'] == 'user' %}<|Assistant|>{% endif %}{{ m['content'] }}"
    "{% if m['tool_calls'] %}<|tool_calls_begin|>{}<|tool_calls_end|>{% endif %}<|end_of_sentence|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
DEEPSEEK_NAMES = ("User", "Assistant", "end_of_sentence", "tool_output_begin", "tool_output_end")
for name in (*DEEPSEEK_NAMES, "tool_calls_begin", "tool_calls_end"):
    DEEPSEEK = DEEPSEEK.replace(f"<|{name}|>", f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>")
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"

FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "deepseek": (DEEPSEEK, EOS),
}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
TWICE = conversation("hi", "one", "and?", "two")


def tokenizer(template):
    family = chat_tokenizer(template)
    family.add_tokens(
        ["<|im_start|>", *(end for preset in PRESETS.values() for end in preset.ends)], special_tokens=True
    )
    return family


def read(template, row, mask="auto", **switches):
    """The supervised texts, and the way that found them."""
    chat = Template(tokenizer(template), Supervision(**switches), mask)
    return marked(chat, row), chat.encode(row).found_by


def used_tool(*results, call="", answer="done"):
    """A question, a call, its results, an answer."""
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": call, "tool_calls": CALLS}]
    messages += [{"role": "tool", "content": result} for result in results]
    return Conversation("here", 1.0, [*messages, {"role": "assistant", "content": answer}], None)


def test_every_preset_is_tried_here():
    assert set(FAMILIES) == set(PRESETS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_finds_every_answer_with_its_end_and_without_its_header(family):
    template, end = FAMILIES[family]
    space = " " * (family == "mistral")
    answers = [f"{space}one{end}", f"{space}two{end}"]
    assert read(template, TWICE, family) == (answers, family)
    assert read(template, TWICE, family, turns="last")[0] == answers[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_agrees_with_the_prefixes_where_they_are_stable(family):
    template = FAMILIES[family][0].replace("[AVAILABLE_TOOLS]", "")
    template = template.replace("{% if m is sameas last %}[][/AVAILABLE_TOOLS]{% endif %}", "")
    assert read(template, TWICE, "prefix")[0] == read(template, TWICE, family)[0]


@pytest.mark.parametrize(
    ("family", "spans", "without_calls"),
    [
        ("llama3", ["<|eom_id|>", "done<|eot_id|>"], None),
        ("mistral", ["[TOOL_CALLS][{}]</s>", " done</s>"], [" done</s>"]),
        (
            "deepseek",
            [
                "<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>" + EOS,
                "done" + EOS,
            ],
            [EOS, "done" + EOS],
        ),
    ],
)
def test_calls_are_the_assistants_and_results_are_not(family, spans, without_calls):
    template, row = FAMILIES[family][0], used_tool("4", "5")
    assert read(template, row, family)[0] == spans
    if without_calls:
        assert read(template, row, family, tool_calls=False)[0] == without_calls


def test_auto_takes_tags_then_prefixes_then_the_familys_preset_then_the_header():
    unknown = FORGETFUL.replace("im_start", "start").replace("im_end", "end")
    thought = conversation("hi", "one", "and?", "two", reasoning_content="hm")
    ways = [read(template, thought)[1] for template in (TAGGED, QWEN35, FORGETFUL, unknown)]
    assert ways == ["generation", "prefix", "chatml", "header"]
    assert read(MISTRAL, TWICE)[1] == "mistral"
    assert read(FORGETFUL, thought)[0] == ["one<|im_end|>", "<think>\nhm\n</think>\n\ntwo<|im_end|>"]
    assert read(FORGETFUL, thought, thinking=False)[0] == ["one<|im_end|>", "two<|im_end|>"]
    assert read(unknown, thought)[0] == ["one<|end|>", "<think>\nhm\n</think>\n\ntwo<|end|>"]


@pytest.mark.parametrize(
    ("template", "row", "mask", "why"),
    [
        (FORGETFUL, TWICE, "prefix", "prefix: the template rewrites earlier turns"),
        (CHATML, conversation("hi", "<|im_end|>"), "chatml", "the text of an answer holds the template"),
        (CHATML, conversation("<|im_start|>assistant\n", "x"), "chatml", "1 answers, but 2 headers"),
        (CHATML, TWICE, "llama3", "2 answers, but 0 headers"),
        (CHATML.replace("<|im_end|>", ""), TWICE, "chatml", r"answer 1 does not end in <\|im_end\|>"),
        (LLAMA3.replace("else '<|eot_id|>'", "else '<|eot_id|>' if m['role'] == 'user'"), TWICE, "llama3", "answer 1"),
        (CHATML, Rendered("here", 1.0, "yes sir"), "chatml", "no header of an answer"),
    ],
)
def test_a_text_that_contradicts_the_way_is_refused_with_the_reason(template, row, mask, why):
    with pytest.raises(TemplateRefusal, match=why):
        read(template, row, mask)


def test_tags_that_a_template_does_not_have_are_refused_at_once():
    with pytest.raises(DataError, match="no generation tags: use --mask auto"):
        Template(tokenizer(CHATML), mask="generation")


def test_rendered_text_is_all_supervised_unless_a_preset_is_named():
    row = Rendered("here", 1.0, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    assert read(CHATML, row) == ([row.text], "text")
    assert read(CHATML, row, "chatml") == (["yes<|im_end|>"], "chatml")


@pytest.mark.parametrize("mask", ["auto", "prefix", "chatml"])
class TestAsQwen35:
    def test_what_the_generation_prompt_opens_is_header_and_the_rest_of_the_thought_is_not(self, mask):
        row = conversation("hi", "one", "and?", "<think>\nhm\n</think>\n\ntwo")
        spans = ["\n</think>\n\none<|im_end|>", "hm\n</think>\n\ntwo<|im_end|>"]
        assert read(QWEN35, row, mask)[0] == spans
        assert read(QWEN35, row, mask, thinking=False)[0] == ["one<|im_end|>", "two<|im_end|>"]

    def test_a_call_is_supervised_and_its_results_are_a_users(self, mask):
        row = used_tool("4", "5", call="wait")
        call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        spans = [f"\n</think>\n\nwait\n\n{call}<|im_end|>", "\n</think>\n\ndone<|im_end|>"]
        assert read(QWEN35, row, mask)[0] == spans
        plain = read(QWEN35, row, mask, thinking=False, tool_calls=False)[0]
        assert plain == ["wait\n\n", "<|im_end|>", "done<|im_end|>"]

    def test_arguments_as_json_text_are_the_same_as_a_mapping(self, mask):
        def row(arguments):
            call = {"function": {"name": "add", "arguments": arguments}}
            turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            return read_row("here", 1.0, {"messages": turns})

        mapping = read(QWEN35, row({"a": 1, "b": "x"}), mask)[0]
        assert read(QWEN35, row('{"a": 1, "b": "x"}'), mask)[0] == mapping
        assert "<parameter=b>\nx\n</parameter>" in mapping[0]
        none = ["\n</think>\n\n<tool_call>\n<function=add>\n</function>\n</tool_call><|im_end|>"]
        assert [read(QWEN35, row(empty), mask)[0] for empty in ("", "{}", None, {})] == [none] * 4
        with pytest.raises(TemplateRefusal, match="mapping"):
            read(QWEN35, row('{"a": '), mask)


def test_what_a_template_as_qwen35s_refuses_is_counted_with_its_own_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    response = {"role": "user", "content": "<tool_response>4</tool_response>"}
    broken = {**answer, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": [1'}}]}
    rows = [[ask, answer], [response, answer], [ask, broken], [answer]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    chat = Template(tokenizer(QWEN35))
    rules = {"max_context": 99, "block_size": 4, "vocab_size": len(chat.tokenizer), "anchor_rule": "in-row"}
    summary = prepare(["rows.jsonl"], chat, "shards", target="tiny", progress=False, **rules)
    refused, first, second, misplaced, third = report(summary).splitlines()[3:]
    assert first == "    rows.jsonl:2: TemplateError: No user query found in messages."
    assert second == (
        "    rows.jsonl:3: TypeError: Can only get item pairs from a mapping. "
        "(the arguments of the call to f are no JSON object)"
    )
    assert refused.startswith("skipped: 2 template refused") and misplaced.startswith("skipped: 1 roles out of order")
    assert third == "    rows.jsonl:4: message 1 is the assistant's, behind nothing"
