"""Every kind of file that rows come in, and every way that a file breaks: rows before the break, then one trouble."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from draftgraph.engine.data import files
from draftgraph.engine.data.files import conversation_files, read_conversations
from draftgraph.engine.data.formats import Conversation, Trouble
from draftgraph.engine.errors import DataError, UsageError

PAIR = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ROWS = [{"messages": [{"role": "user", "content": f"question {n} \u00e9"}, PAIR[1]]} for n in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS, ensure_ascii=False).encode()


def read(tmp_path, *rows, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return list(read_conversations(file))


def zstd(content):
    return zstandard.ZstdCompressor().compress(content)


def arrow_stream(rows, in_file=False):
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if in_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


CONTAINERS = {
    "rows.jsonl": LINES,
    "rows.json": LIST,
    "lines.json": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "bom.json": b"\xef\xbb\xbf \n" + LIST,
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.json.gz": gzip.compress(LIST),
    "rows.jsonl.zst": zstd(LINES),
    "rows.json.zst": zstd(LIST),
    "frames.jsonl.zst": zstd(LINES[:2000]) + zstd(LINES[2000:]),
    "rows.parquet": parquet(ROWS),
    "stream.arrow": arrow_stream(ROWS),
    "file.arrow": arrow_stream(ROWS, in_file=True),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_rows_in_order(tmp_path, name):
    (tmp_path / name).write_bytes(CONTAINERS[name])
    found = list(read_conversations(tmp_path / name))
    assert [row.messages for row in found] == [row["messages"] for row in ROWS]
    assert all(0 <= row.done <= 1 for row in found) and found[-1].done > 0.9
    assert found[3].where.endswith((f"{name}:4", f"{name}[3]"))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_a_list_is_the_same_however_the_reads_fall(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(files, "_CHUNK", chunk)
    mixed = [*ROWS[:2], 12, "text", None, [1], *ROWS[2:4]]
    found = read(tmp_path, json.dumps(mixed), name="rows.json")
    assert [type(row) for row in found] == [Conversation] * 2 + [Trouble] * 4 + [Conversation] * 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "frames.jsonl.zst", "stream.arrow"])
def test_a_file_cut_in_the_middle_gives_its_rows_and_one_trouble(tmp_path, name):
    (tmp_path / name).write_bytes(CONTAINERS[name][: len(CONTAINERS[name]) * 2 // 3])
    *found, last = read_conversations(tmp_path / name)
    assert isinstance(last, Trouble)
    assert last.reason == ("bad json" if name == "rows.jsonl" else "damaged file")
    assert len(found) > 10
    assert [row.messages for row in found] == [row["messages"] for row in ROWS[: len(found)]]


@pytest.mark.parametrize("name", ["rows.parquet", "file.arrow"])
def test_a_table_that_lost_its_end_is_one_sentence(tmp_path, name):
    (tmp_path / name).write_bytes(CONTAINERS[name][:-20])
    with pytest.raises(DataError, match=f"{name}: cannot be read"):
        list(read_conversations(tmp_path / name))


def test_a_line_of_100_mb_is_one_trouble_and_little_memory(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(LINES + b'{"text": "')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'"}\n' + LINES)
    tracemalloc.start()
    found = list(read_conversations(tmp_path / "rows.jsonl"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row for row in found if isinstance(row, Trouble)] == [found[len(ROWS)]]
    assert (found[len(ROWS)].reason, found[len(ROWS)].detail) == ("row too long", "104,857,613 bytes")
    assert len(found) == 2 * len(ROWS) + 1
    assert peak < 2**26


@pytest.mark.parametrize("head", [b'{"text": "', b'[{"text": "'])
def test_a_json_file_of_one_endless_row_is_one_sentence_and_little_memory(tmp_path, head):
    (tmp_path / "rows.json").write_bytes(head + b"x" * (3 * files.ROW_BYTES))
    tracemalloc.start()
    try:
        found = list(read_conversations(tmp_path / "rows.json"))
    except DataError as error:
        assert "of one row" in str(error)
    else:
        assert [row.reason for row in found] == ["row too long"]
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_mixed_forms_in_one_file_are_each_read(tmp_path):
    rows = [
        {"messages": PAIR},
        {"text": "x"},
        {"input_ids": [1], "loss_mask": [1]},
        {"instruction": "a", "output": "b"},
    ]
    found = read(tmp_path, *rows)
    assert [type(row).__name__ for row in found] == ["Conversation", "Rendered", "Tokens", "Conversation"]


def test_bytes_that_are_no_utf8_are_named_in_lines_lists_and_tables(tmp_path):
    good = json.dumps({"text": "good"}).encode()
    bad = good.replace(b"good", b"\xe9t\xe9")
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + bad + b"\n" + good)
    (tmp_path / "b.json").write_bytes(b"[" + good + b"," + bad + b"," + good + b"]")
    text = pa.array([b"good", b"\xe9t\xe9", b"good"]).view(pa.string())
    pq.write_table(pa.table({"text": text}), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet"):
        before, trouble, after = read_conversations(tmp_path / name)
        assert before.text == after.text == "good"
        assert trouble.reason == "bytes that are not UTF-8"
        assert trouble.detail.startswith("byte 0xe9 at ")


def test_nulls_of_an_arrow_struct_are_keys_that_the_row_does_not_have(tmp_path):
    rows = [
        {"messages": [{"from": "human", "value": "hi"}, PAIR[1]], "tools": None},
        {"messages": PAIR, "tools": [{"name": "f"}]},
    ]
    (tmp_path / "rows.arrow").write_bytes(arrow_stream(rows))
    first, second = read_conversations(tmp_path / "rows.arrow")
    assert first.messages == second.messages == PAIR
    assert (first.tools, second.tools) == (None, [{"name": "f"}])


def test_a_table_without_a_known_column_is_one_sentence(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(parquet([{"question": "a", "answer": "b"}]))
    with pytest.raises(DataError, match="columns question, answer; expected some of"):
        list(read_conversations(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow"])
def test_a_missing_pyarrow_is_one_sentence_that_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / name).write_bytes(CONTAINERS[name])
    with pytest.raises(UsageError, match=r"pip install 'draftgraph\[data\]'"):
        list(read_conversations(tmp_path / name))


def saved(folder, rows, files=2):
    """What datasets' save_to_disk leaves, and a file of its cache."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{files:05d}.arrow" for index in range(files)]
    for index, name in enumerate(names):
        (folder / name).write_bytes(arrow_stream(rows[index::files]))
    (folder / "cache-12ab.arrow").write_bytes(arrow_stream(rows))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_a_saved_datasets_folder_gives_its_rows_once(tmp_path):
    saved(tmp_path / "set", ROWS)
    found = [row.messages for row in read_conversations(tmp_path / "set")]
    assert found == [row["messages"] for row in ROWS[0::2] + ROWS[1::2]]


def test_a_saved_dictionary_of_splits_gives_all_splits(tmp_path):
    for split in ("train", "test"):
        saved(tmp_path / "set" / split, ROWS)
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert len(list(read_conversations(tmp_path / "set"))) == 2 * len(ROWS)
    assert [file.parent.name for file in conversation_files(tmp_path / "set")] == ["test"] * 2 + ["train"] * 2
    (tmp_path / "set" / "test" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="_data_files"):
        conversation_files(tmp_path / "set")


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
    with pytest.raises(DataError, match=r"holds no \.json, \.jsonl"):
        list(read_conversations(tmp_path))
