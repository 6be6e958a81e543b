"""From conversations to shards: every row is used or counted."""

import json

import pytest
from test_data_template import PLAIN, chat_tokenizer

from draftgraph.engine.data.doctor import ADVICE
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

TOKENIZER = chat_tokenizer()
V = len(TOKENIZER)
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes sir"}]}
SETTINGS = {"max_context": 64, "block_size": 4, "vocab_size": V, "anchor_rule": "next-supervised"}
SETTINGS |= {"target": "tiny", "progress": False}


def tokens(ids, mask):
    return {"input_ids": ids, "loss_mask": mask}


def good(number):
    return {"messages": [GOOD["messages"][0], {"role": "assistant", "content": f"yes sir {number}"}]}


def run(tmp_path, *rows, template=PLAIN, **changes):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    chat = Template(chat_tokenizer(template))
    return prepare([tmp_path / "rows.jsonl"], chat, tmp_path / "shards", **{**SETTINGS, **changes})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "bad json"),
        ({"note": "hello"}, "not a conversation"),
        ({"messages": []}, "empty row"),
        (tokens([], []), "empty row"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no supervised token"),
        (tokens([1] * 9, [0] * 9), "no supervised token"),
        (tokens([1] * 90, [0] * 80 + [1] * 10), "no supervised token"),
        (tokens([1] * 9, [0] * 4 + [1] + [0] * 4), "no valid anchor"),
        (tokens([1] * 9, [0] * 8 + [1]), "no valid anchor"),
        (tokens([1], [1]), "shorter than a block"),
        (tokens([1, 2], [1, 1]), "shorter than a block"),
        (tokens([1, 2, 3], [1, 1, 1]), "shorter than a block"),
        (tokens([1, 2, 3, -1], [1, 1, 1, 1]), "token ids out of range"),
        (tokens([1, 2, 3, V], [1, 1, 1, 1]), "token ids out of range"),
        (tokens([1, 2, 3, 2**40], [1, 1, 1, 1]), "token ids out of range"),
        ({"messages": [*GOOD["messages"], {"role": "assistant", "content": "\ud800"}]}, "template refused"),
    ],
)
def test_a_bad_row_is_counted_and_never_stops_the_rest(tmp_path, row, reason):
    summary = run(tmp_path, good(1), row, good(2))
    assert summary["rows_read"] == 3
    assert summary["rows_used"] == 2
    assert summary["rows_skipped"] == {reason: 1}
    assert "rows.jsonl:2" in summary["examples"][reason][0]
    assert reason in ADVICE
    assert len(ShardReader(tmp_path / "shards")) == 2


def test_the_templates_own_message_is_shown(tmp_path):
    template = "{{ raise_exception('No user query found in messages.') }}"
    with pytest.raises(DataError, match="No user query found"):
        run(tmp_path, GOOD, template=template)


def test_shards_hold_the_rendered_tokens_and_the_assistants_mask(tmp_path):
    summary = run(tmp_path, GOOD)
    ids, mask = ShardReader(tmp_path / "shards")[0]
    assert TOKENIZER.decode(ids) == "<|start|>user\nhi<|end|>\n<|start|>assistant\nyes sir<|end|>\n"
    assert TOKENIZER.decode(ids[mask]) == "yes sir<|end|>"
    assert summary["tokens"] == len(ids)
    assert summary["supervised_tokens"] == mask.sum()
    assert summary["shards"] == 1


@pytest.mark.parametrize("length", [4, 5, 64, 65, 200])
def test_rows_of_a_block_and_more_are_used_and_cut_only_beyond_max_context(tmp_path, length):
    summary = run(tmp_path, tokens(list(range(length)), [1] * length))
    assert ShardReader(tmp_path / "shards")[0][0].tolist() == list(range(min(length, 64)))
    assert summary["rows_cut"] == (length > 64)
    assert summary["tokens_cut"] == max(0, length - 64)


@pytest.mark.parametrize(("rule", "used"), [("next-supervised", 2), ("in-row", 1)])
def test_the_anchor_rule_decides_which_rows_can_train(tmp_path, rule, used):
    # Only the last K - 1 tokens are supervised: no whole block fits behind one of them.
    summary = run(tmp_path, GOOD, tokens([1] * 9, [0] * 6 + [1] * 3), anchor_rule=rule)
    assert summary["rows_used"] == used


def test_files_and_folders_of_several_forms_go_into_one_shard_folder(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"instruction": "hi", "output": f"yes sir {number}"} for number in range(3)]
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "b.jsonl").write_text(json.dumps({"text": "yes sir"}))
    (tmp_path / "c.jsonl").write_text(json.dumps(GOOD))
    summary = prepare([folder, tmp_path / "c.jsonl"], Template(TOKENIZER), tmp_path / "out", **SETTINGS)
    reader = ShardReader(tmp_path / "out")
    assert summary["rows_used"] == len(reader) == 5
    assert TOKENIZER.decode(reader[3][0]) == "yes sir" and reader[3][1].all()
    assert reader.fingerprint == Template(TOKENIZER).fingerprint()
    assert reader.facts["doctor"]["rows_used"] == 5


def test_no_usable_row_is_a_readable_error_that_counts(tmp_path):
    with pytest.raises(
        DataError, match=r"no row can be used\n(.*\n)*skipped: 1 bad json (.*\n)*skipped: 1 not a conversation"
    ):
        run(tmp_path, "{broken", {"note": "x"})
    assert not (tmp_path / "shards").exists()


def test_a_missing_input_is_found_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        prepare([tmp_path / "absent.jsonl"], Template(TOKENIZER), tmp_path / "out", **SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_on_stderr_only(tmp_path, capsys):
    run(tmp_path, GOOD, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prepare" in captured.err
