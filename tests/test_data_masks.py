"""Which of the assistant's tokens are supervised under each switch, and how a person sees it."""

import io
import json

import pytest
from rich.console import Console
from test_data_template import HEADERLESS, PLAIN, REWRITING, TAGGED, THINKING, chat_tokenizer, conversation, supervised

from draftgraph.engine.data.masks import TemplateRefusal
from draftgraph.engine.data.prepare import show_rows
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
BRACKETED = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] }}{% if m['tool_calls'] %}[TOOL_CALLS][]{% endif %}")


@pytest.mark.parametrize("template", [PLAIN, TAGGED, HEADERLESS, REWRITING])
def test_the_last_turn_alone_is_supervised_where_that_is_asked(template):
    row = conversation("hi", "one", "and?", "two", "so?", "three", reasoning_content="hm")
    assert len(supervised(template, row)) == 3
    (last,) = supervised(template, row, turns="last")
    assert last.endswith("three<|end|>")


def test_thinking_is_left_out_with_its_markers_whoever_opened_it():
    row = conversation("hi", "one", "and?", "two", reasoning_content="hm")
    assert supervised(THINKING, row, thinking=False) == ["one<|end|>", "two<|end|>"]
    assert supervised(REWRITING, row, thinking=False) == ["one<|end|>", "two<|end|>"]


def test_thinking_in_the_content_is_left_out_too():
    row = conversation("hi", "<think>hm</think> yes", "and?", "<think>cut off")
    assert supervised(PLAIN, row, thinking=False) == ["yes<|end|>"]
    row = conversation("hi", "[THINK]hm[/THINK]yes")
    assert supervised(PLAIN, row, thinking=False) == ["yes<|end|>"]


def test_tool_calls_are_left_out_and_the_answer_and_its_end_are_kept():
    row = conversation("hi", "wait", tool_calls=CALLS * 2, reasoning_content="hm")
    assert supervised(THINKING, row, tool_calls=False) == ["hm\n</think>\n\nwait", "<|end|>"]
    assert supervised(THINKING, row, tool_calls=False, thinking=False) == ["wait", "<|end|>"]
    assert supervised(BRACKETED, row, tool_calls=False) == ["wait"]


def test_a_user_who_writes_a_marker_changes_nothing():
    row = conversation("<think>a</think><tool_call>", "one")
    assert supervised(PLAIN, row, thinking=False, tool_calls=False) == ["one<|end|>"]


def test_what_cannot_be_left_out_is_refused_not_ignored():
    unmarked = PLAIN.replace(
        "{{ m['content'] }}", "{{ m['reasoning_content'] }}{{ m['content'] }}{{ m['tool_calls'] }}"
    )
    row = conversation("hi", "yes", reasoning_content="hm", tool_calls=CALLS)
    assert len(supervised(unmarked, row)) == 1
    with pytest.raises(TemplateRefusal, match="thinking cannot be told apart"):
        supervised(unmarked, row, thinking=False)
    with pytest.raises(TemplateRefusal, match="tool calls cannot be told apart"):
        supervised(unmarked, row, tool_calls=False)


def shown(tmp_path, count, *rows, **console):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = Console(file=io.StringIO(), width=200, **console)
    tokenizer = chat_tokenizer()
    rules = {"max_context": 64, "block_size": 4, "vocab_size": len(tokenizer), "anchor_rule": "next-supervised"}
    summary = show_rows([tmp_path / "rows.jsonl"], Template(tokenizer), count, out, **rules)
    return summary, out.file.getvalue()


def chat(answer):
    return {"messages": [{"role": "user", "content": "[bold]hi"}, {"role": "assistant", "content": answer}]}


def test_shown_rows_are_the_first_used_ones_with_supervised_text_marked(tmp_path):
    summary, text = shown(tmp_path, 2, {"messages": []}, chat("yes sir"), {"text": "all of it"}, chat("unread"))
    assert summary["rows_read"] == 3
    assert "rows.jsonl:2: 8 of 36 tokens supervised (prefix)" in text
    assert "<|start|>user\n[bold]hi<|end|>\n<|start|>assistant\n\u27e6yes sir<|end|>\u27e7\n" in text
    assert "\u27e6all of it\u27e7" in text
    assert "unread" not in text


def test_shown_rows_are_coloured_where_there_is_colour(tmp_path):
    _, text = shown(tmp_path, 1, chat("yes"), force_terminal=True, color_system="standard")
    assert "\x1b[1;32myes<|end|>\x1b[0m" in text
    assert "\u27e6" not in text


def test_nothing_to_show_is_a_readable_error(tmp_path):
    with pytest.raises(DataError, match=r"no row can be used\nrows: 1 read, 0 used"):
        shown(tmp_path, 1, {"messages": []})
