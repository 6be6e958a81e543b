"""Every form that conversations come in, and every way that they are broken."""

import json

import pytest

from draftgraph.engine.data.files import read_conversations
from draftgraph.engine.data.formats import FORMS, Conversation, Rendered, Tokens, Trouble

PAIR = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(tmp_path, *rows, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return list(read_conversations(file))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR},
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in PAIR]},
        {"messages": [{"role": m["role"], "content": [{"type": "text", "value": m["content"]}]} for m in PAIR]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "tools": "[]"},
        {"conversations": PAIR, "id": 9},
        {"instruction": "hi", "input": "", "output": "yes"},
        {"instruction": "hi", "output": "yes"},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": "hi", "chosen": PAIR, "rejected": PAIR[:1], "messages": PAIR},
        {"prompt": PAIR[:1], "chosen": PAIR[1:], "rejected": []},
        {"chosen": PAIR, "rejected": PAIR},
        {"instruction": "hi", "chosen": "yes", "rejected": "no"},
        {
            "conversations": PAIR[:1],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": ""},
        },
    ],
)
def test_every_form_is_read_as_the_same_messages(tmp_path, row):
    (found,) = read(tmp_path, row)
    assert isinstance(found, Conversation)
    assert found.messages == PAIR
    assert found.tools is None


def test_an_instruction_and_its_input_are_one_question(tmp_path):
    (found,) = read(tmp_path, {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"})
    assert [message["content"] for message in found.messages] == ["be brief", "add\n1 2", "3"]


def test_sharegpt_function_calls_become_tool_calls(tmp_path):
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    (found,) = read(tmp_path, {"conversations": turns, "tools": json.dumps([{"name": "add"}])})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert found.tools == [{"name": "add"}]


def test_reasoning_and_tool_calls_are_kept_from_parts_and_from_fields(tmp_path):
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    fields = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    as_text = {**fields, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    for message in ({"role": "assistant", "content": parts}, as_text):
        (found,) = read(tmp_path, {"messages": [PAIR[0], message]})
        assert found.messages[1] == {**fields, "content": "", "tool_calls": [call]}


def test_rendered_text_is_kept_as_it_is(tmp_path):
    (found,) = read(tmp_path, {"text": "<s>hi</s> \ud83d\ude00"})
    assert isinstance(found, Rendered)
    assert found.text == "<s>hi</s> \U0001f600"


def test_a_named_form_is_read_even_where_the_keys_tell_another(tmp_path):
    row = {"messages": PAIR, "text": "hello", "prompt": "a", "completion": "b"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    kinds = {form: next(read_conversations(file, form)) for form in FORMS}
    assert kinds["text"].text == "hello"
    assert kinds["messages"].messages == PAIR
    assert [message["content"] for message in kinds["completion"].messages] == ["a", "b"]
    assert kinds["alpaca"].detail == "no key 'instruction', which the form alpaca needs"


def test_tokenised_rows_keep_their_ids_and_mask(tmp_path):
    (found,) = read(tmp_path, {"input_ids": [5, -1, 7], "loss_mask": [0, 1, True]})
    assert isinstance(found, Tokens)
    assert found.input_ids.tolist() == [5, -1, 7]
    assert found.loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "bad json"),
        ('"text"', "not a conversation"),
        (7, "not a conversation"),
        ({}, "not a conversation"),
        ({"text": 5}, "not a conversation"),
        ({"text": ""}, "empty row"),
        ({"note": "hello"}, "not a conversation"),
        ({"messages": None}, "not a conversation"),
        ({"messages": "hi"}, "not a conversation"),
        ({"messages": [3]}, "not a conversation"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "not a conversation"),
        ({"messages": [{"content": "x"}]}, "not a conversation"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "not a conversation"),
        ({"messages": [{"role": "user", "content": 5}]}, "not a conversation"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "not a conversation"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}, "not a conversation"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 4}]}, "not a conversation"),
        ({"messages": PAIR, "tools": "{}"}, "not a conversation"),
        ({"messages": PAIR, "tools": 3}, "not a conversation"),
        ({"conversations": [{"from": "function_call", "value": "no json"}]}, "not a conversation"),
        ({"instruction": 1, "output": "x"}, "not a conversation"),
        ({"chosen": "yes", "rejected": "no"}, "not a conversation"),
        ({"chosen": PAIR[1:], "rejected": []}, "not a conversation"),
        ({"chosen": 4, "rejected": []}, "not a conversation"),
        ({"prompt": "hi", "chosen": [], "rejected": []}, "empty row"),
        ({"prompt": "hi", "chosen": "", "rejected": ""}, "empty row"),
        ({"messages": [{"role": "user", "content": [["nested"]]}]}, "not a conversation"),
        ({"prompt": ["nested"], "completion": "x"}, "not a conversation"),
        ({"text": ["nested"]}, "not a conversation"),
        ('{"input_ids": [1, 2], "loss_mask": [1, NaN]}', "not a conversation"),
        ('{"input_ids": [1, Infinity], "loss_mask": [1, 1]}', "not a conversation"),
        ({"messages": []}, "empty row"),
        ({"prompt": "", "completion": ""}, "empty row"),
        ({"input_ids": [], "loss_mask": []}, "empty row"),
        ({"input_ids": [1, 2]}, "not a conversation"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "not a conversation"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "not a conversation"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "not a conversation"),
        ({"input_ids": [[1], [2]], "loss_mask": [1, 1]}, "not a conversation"),
        ({"input_ids": [1, 2], "loss_mask": [1, 7]}, "not a conversation"),
        ({"input_ids": [1, 2**70], "loss_mask": [1, 1]}, "token ids out of range"),
    ],
)
def test_a_bad_row_is_one_trouble_and_the_rest_is_read(tmp_path, row, reason):
    before, trouble, after = read(tmp_path, {"messages": PAIR}, row, {"messages": PAIR})
    assert isinstance(trouble, Trouble)
    assert trouble.reason == reason
    assert trouble.where.endswith("rows.jsonl:2")
    assert before.messages == after.messages == PAIR
