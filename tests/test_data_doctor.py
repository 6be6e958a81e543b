"""The doctor's report: one tiny file for each kind of trouble, and the exact lines that a person reads."""

import json
import re

import pytest
from test_data_template import PLAIN, chat_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftgraph.engine.data.doctor import ADVICE, Doctor, report
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.shards import PICTURE, ShardReader
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

TOKENIZER = chat_tokenizer()
SETTINGS = {"max_context": 64, "block_size": 4, "anchor_rule": "next-supervised", "target": "tiny", "progress": False}


def turns(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


GOOD = turns(("user", "hi"), ("assistant", "yes sir"))
THOUGHT = {"role": "assistant", "reasoning_content": "hm"}
ASK, ANSWER = ("user", "hi"), ("assistant", "yes sir")
# Rows, or bytes; then what the report says of the second line.
TROUBLES = {
    "bad json": (b'{"messages": [{"role": "user", "con', "the line is not one JSON value"),
    "bytes that are not UTF-8": (b'{"text": "caf\xe9 au lait"}', "byte 0xe9 at 13"),
    "row too long": (b'{"text": "' + b"x" * 2**23 + b'"}', "8,388,621 bytes"),
    "not a conversation": (
        {"question": "hi"},
        "keys question; expected input_ids, chosen+rejected, messages, conversations, instruction+output, "
        "prompt+completion, text",
    ),
    "empty row": (turns(), "no messages"),
    "roles out of order": (turns(("assistant", "hello"), ASK), "message 1 is the assistant's, behind nothing"),
    "empty turn": (turns(ASK, ("assistant", " \n")), "message 2, the assistant's"),
    "template refused": (turns(ASK, ("assistant", "\ud800")), "the text holds half of a surrogate pair"),
    "token ids out of range": ({"input_ids": [1, 2, 3, 999], "loss_mask": [1] * 4}, "ids 1 to 999, vocabulary 258"),
    "shorter than a block": ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "2 tokens, block 4"),
    "no supervised token": (turns(ASK), "10 tokens"),
    "no valid anchor": ({"input_ids": [1] * 9, "loss_mask": [0] * 8 + [1]}, "1 supervised of 9 tokens"),
    "duplicate": (GOOD, "30 tokens"),
}
# What else people's files hold.
MISFIT = "not a conversation"
MORE = [
    (
        MISFIT,
        b'{"input_ids": [1, 2, 3, 4], "loss_mask": [1, NaN, 1, 1]}',
        "'loss_mask' holds something besides 0 and 1",
    ),
    (
        MISFIT,
        b'{"input_ids": [1, 2, 3, NaN], "loss_mask": [1, 1, 1, 1]}',
        "'input_ids' holds a number that is no integer",
    ),
    (MISFIT, {"input_ids": [[1, 2], [3, 4]], "loss_mask": [1, 1]}, "'input_ids' is not a list of numbers"),
    (MISFIT, turns(("user", [["hi"]]), ANSWER), "'content' is a list, expected text"),
    (MISFIT, turns(("user", [{"type": "text", "text": ["hi"]}]), ANSWER), "'content' is a list, expected text"),
    (MISFIT, {"prompt": ["hi"], "completion": "yes sir"}, "'prompt' is a list, expected text"),
    (MISFIT, {"text": [["yes", "sir"]]}, "'text' is a list, expected text"),
    ("template refused", {"text": "yes \udc80 sir"}, "the text holds half of a surrogate pair"),
    ("template refused", turns(("user", "\ud83d"), ANSWER), "the text holds half of a surrogate pair"),
]


def run(tmp_path, *rows, tokenizer=TOKENIZER, **settings):
    content = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    (tmp_path / "rows.jsonl").write_bytes(content + b"\n")
    settings = {"vocab_size": len(tokenizer), **SETTINGS, **settings}
    return prepare([tmp_path / "rows.jsonl"], Template(tokenizer), tmp_path / "shards", **settings)


@pytest.mark.parametrize(("reason", "bad", "detail"), [(reason, *case) for reason, case in TROUBLES.items()] + MORE)
def test_each_trouble_has_its_line_its_place_and_its_advice(tmp_path, monkeypatch, reason, bad, detail):
    monkeypatch.chdir(tmp_path)
    summary = run(tmp_path.relative_to(tmp_path), GOOD, bad)
    assert report(summary).splitlines() == [
        "rows: 2 read, 1 used",
        "tokens: 30, 8 supervised",
        "masks found by: prefix (1 row)",
        f"skipped: 1 {reason} ({ADVICE[reason]})",
        f"    rows.jsonl:2: {detail}",
    ]
    assert ShardReader(tmp_path / "shards").facts["doctor"] == {
        key: value for key, value in summary.items() if key not in ("shards", "path", "picture")
    }


def test_every_reason_is_tried_but_damage_which_takes_a_file(tmp_path, monkeypatch):
    assert set(TROUBLES) == set(ADVICE) - {"damaged file"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text("[" + json.dumps(GOOD) + ',{"messages": [')
    settings = {"vocab_size": len(TOKENIZER), **SETTINGS}
    summary = prepare(["rows.json"], Template(TOKENIZER), "shards", **settings)
    assert report(summary).splitlines()[3:] == [
        f"skipped: 1 damaged file ({ADVICE['damaged file']})",
        "    rows.json: breaks behind 1 rows: the list is cut, or no JSON, in row 1",
    ]


def test_a_file_of_lines_cut_in_the_middle_gives_its_rows_and_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cut = b"\n".join(json.dumps(row).encode() for row in (GOOD, turns(("user", "ho"), ANSWER)))[:-9]
    summary = run(tmp_path.relative_to(tmp_path), cut)
    assert report(summary).splitlines()[3:] == [
        f"skipped: 1 bad json ({ADVICE['bad json']})",
        "    rows.jsonl:2: the line is not one JSON value",
    ]


def test_mixed_forms_in_one_file_are_told_row_by_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        GOOD,
        {"text": "yes sir"},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]},
        {"instruction": "a", "output": "no"},
        {"question": "hi"},
    ]
    assert report(run(tmp_path.relative_to(tmp_path), *rows)).splitlines() == [
        "rows: 5 read, 4 used",
        "tokens: 65, 21 supervised",
        "masks found by: prefix (2 rows), text (1 row), given (1 row)",
        f"skipped: 1 not a conversation ({ADVICE['not a conversation']})",
        f"    rows.jsonl:5: {TROUBLES['not a conversation'][1]}",
    ]


def test_what_the_template_does_not_write_is_told(tmp_path):
    thought = {"messages": [GOOD["messages"][0], {**THOUGHT, "content": "yes sir"}], "tools": [{"name": "add"}]}
    lines = report(run(tmp_path, thought, turns(("user", "ho"), ANSWER))).splitlines()
    assert lines[3:] == ["not written by the chat template: thinking (1 row), tools (1 row)"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (turns(("system", "s"), ANSWER), "roles out of order"),
        (turns(ASK, ("system", "s"), ANSWER), "roles out of order"),
        (turns(ASK, ("tool", "4"), ANSWER), "roles out of order"),
        (turns(("user", " "), ANSWER), "empty turn"),
        (turns(ASK, ANSWER, ("tool", ""), ("tool", "4"), ANSWER), None),
        (turns(("system", ""), ASK, ASK, ANSWER, ANSWER), None),
        # Thinking is saying something; this template does not write it.
        ({"messages": [{"role": "user", "content": "hi"}, {**THOUGHT, "content": ""}]}, "no valid anchor"),
    ],
)
def test_order_and_emptiness_are_judged_as_conversations_mean_them(tmp_path, row, reason):
    different = turns(("user", "ho"), ANSWER)
    assert run(tmp_path, different, row, max_context=99)["rows_skipped"] == ({reason: 1} if reason else {})


def test_a_cut_row_is_used_and_the_report_says_by_how_much(tmp_path):
    summary = run(tmp_path, {"input_ids": [1] * 90, "loss_mask": [1] * 90})
    assert "cut to max_context: 1 rows, by 26 tokens in all" in report(summary).splitlines()


def test_many_unknown_tokens_hint_at_the_wrong_tokenizer(tmp_path):
    words = {"[UNK]": 0, "yes": 1, "sir": 2, "hi": 3}
    word_level = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="[UNK]")
    tokenizer.chat_template = PLAIN
    summary = run(tmp_path, {"text": "yes sir hi yes nein Herr"}, tokenizer=tokenizer)
    assert summary["unknown_tokens"] == 2
    assert "unknown to the tokenizer: 2 tokens (33.3%); is it the data's own?" in report(summary).splitlines()
    assert "unknown" not in report(run(tmp_path, {"text": "yes sir hi yes"}, tokenizer=tokenizer))


def test_an_unknown_token_that_also_ends_turns_hints_at_nothing(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token
    assert run(tmp_path, GOOD, tokenizer=tokenizer)["unknown_tokens"] == 0


def test_too_many_bad_rows_stop_with_the_report_and_nothing_is_written(tmp_path):
    rows = [GOOD, turns(), turns(ASK), turns(("user", "ho"), ANSWER)]
    with pytest.raises(DataError, match=r"50\.0% of the rows are bad, --max-bad-rows is 49\.0%\nrows: 4 read, 2 used"):
        run(tmp_path, *rows, max_bad_rows=0.49)
    assert not (tmp_path / "shards").exists()
    assert run(tmp_path, *rows, max_bad_rows=0.5)["rows_used"] == 2


def test_strict_stops_at_the_first_bad_row(tmp_path):
    with pytest.raises(DataError, match=r"--strict is on\nrows: 2 read, 1 used\n") as caught:
        run(tmp_path, GOOD, turns(), turns(ASK), strict=True)
    assert re.search(r"rows\.jsonl:2: no messages$", str(caught.value))
    assert not (tmp_path / "shards").exists()


def test_a_detail_is_one_line_however_much_of_the_row_it_quotes(tmp_path):
    summary = run(tmp_path, GOOD, turns(("wizard\n" * 5000, "abracadabra")))
    (line,) = summary["examples"]["not a conversation"]
    assert len(line) < 400 and "\n" not in line


def test_at_most_three_examples_of_a_reason_are_kept():
    doctor = Doctor()
    doctor.use(tokens=100, supervised_tokens=40, tokens_cut=0, unknown_tokens=0, found_by="prefix", left_out=[])
    for line in range(5):
        doctor.skip("bad json", f"[bold]rows.jsonl:{line}", "")
    shown = report(doctor.summary())
    assert [f"[bold]rows.jsonl:{line}" in shown for line in range(5)] == [True, True, True, False, False]


def test_the_shard_folder_has_a_picture_of_the_lengths_and_is_still_replaceable(tmp_path):
    for _ in range(2):
        summary = run(tmp_path, GOOD, turns(("user", "ho"), ANSWER))
    assert summary["picture"] == str(tmp_path / "shards" / PICTURE)
    picture = (tmp_path / "shards" / PICTURE).read_text()
    assert picture.startswith("<?xml") and "</svg>" in picture
    assert len(ShardReader(tmp_path / "shards")) == 2


def test_without_matplotlib_there_are_shards_and_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert run(tmp_path, GOOD)["picture"] is None
    assert not (tmp_path / "shards" / PICTURE).exists()
