"""Every form that conversations come in, and every way that they are broken."""

import json

import pytest

from draftgraph.engine.data.formats import Conversation, Tokens, Trouble, read_conversations
from draftgraph.engine.errors import DataError

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
        ({"text": "hello"}, "not a conversation"),
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


def test_a_json_file_holds_a_list_or_one_row_or_lines(tmp_path):
    row = {"messages": PAIR}
    for text in (json.dumps([row], indent=1), json.dumps(row, indent=1), json.dumps(row)):
        (found,) = read(tmp_path, text, name="rows.json")
        assert found.messages == PAIR
    assert len(read(tmp_path, row, "", row, name="rows.json")) == 2


def test_a_folder_is_read_file_by_file_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, text in (("b.jsonl", "b"), ("a.json", "a"), ("deep/c.jsonl", "c"), ("notes.txt", "no")):
        (tmp_path / name).write_text(json.dumps({"prompt": text, "completion": "yes"}))
    found = list(read_conversations(tmp_path))
    assert [row.messages[0]["content"] for row in found] == ["a", "b", "c"]
    assert all(0 < row.done <= 1 for row in found)


def test_a_line_that_is_no_utf8_is_one_trouble(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xff\xfe\xff\n" + json.dumps({"messages": PAIR}).encode() + b"\n" + b"[" * 100_000 + b"\n")
    assert [type(row) for row in read_conversations(file)] == [Trouble, Conversation, Trouble]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.jsonl", None),
        ("notes.txt", b"hello"),
        ("broken.json", b'[{"messages": ['),
        ("binary.json", bytes(range(256))),
        ("binary.jsonl", bytes(range(256))),
        ("lines.jsonl", b"no\njson\nat all\n"),
        ("empty.json", b""),
    ],
)
def test_a_file_that_is_missing_or_no_json_is_a_readable_error(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        list(read_conversations(tmp_path / name))


def test_a_folder_without_conversations_is_a_readable_error(tmp_path):
    with pytest.raises(DataError, match=r"no \.json or \.jsonl"):
        list(read_conversations(tmp_path))
