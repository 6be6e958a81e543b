"""Whatever a file holds: every row comes out as a row or a trouble, and a file is at worst one readable error."""

import gzip
import json

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from test_data_files import CONTAINERS, ROWS
from test_data_template import THINKING, chat_tokenizer

from draftgraph.engine.data.doctor import ADVICE, Doctor, report
from draftgraph.engine.data.examine import Examiner, Kept, Rules
from draftgraph.engine.data.files import read_conversations
from draftgraph.engine.data.formats import FORMS, KEYS, ROLES, Conversation, Rendered, Tokens, Trouble
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError

# Nothing is stored between runs, and a slow machine is no failure.
often = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXT = some.text(some.characters(categories=None), max_size=12)  # halves of surrogate pairs too
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | TEXT,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
PARTS = some.fixed_dictionaries({"type": some.sampled_from(["text", "reasoning", "tool_call", "image"])}, optional={
    "text": TEXT | VALUES, "value": TEXT | VALUES
})  # fmt: skip
CALLS = some.fixed_dictionaries(
    {"name": TEXT}, optional={"arguments": VALUES | TEXT.map(json.dumps), "function": VALUES, "id": VALUES}
)
MESSAGES = some.fixed_dictionaries(
    {"role": some.sampled_from(sorted(ROLES)) | VALUES, "content": TEXT | VALUES | some.lists(PARTS, max_size=3)},
    optional={"from": VALUES, "reasoning_content": TEXT | VALUES, "tool_calls": some.lists(CALLS, max_size=2) | VALUES},
)
NUMBERS = some.lists(some.integers(-1, 300) | some.sampled_from([0, 1, float("nan"), 2**40]), max_size=9)
FIELDS = VALUES | TEXT | NUMBERS | MESSAGES | some.lists(MESSAGES, max_size=4)
TOKEN_ROWS = some.fixed_dictionaries({"input_ids": NUMBERS, "loss_mask": NUMBERS | some.lists(some.booleans())})
LIKELY = some.dictionaries(some.sampled_from(sorted(KEYS)), FIELDS, max_size=4) | TOKEN_ROWS
ANYTHING = VALUES | LIKELY

EXAMINER = Examiner(Template(chat_tokenizer(THINKING)), Rules(64, 4, 258, "next-supervised"))


def examined(found):
    """Through all that prepare does to a row; every outcome is one the report can tell."""
    doctor = Doctor()
    for row in found:
        assert isinstance(row, Conversation | Rendered | Tokens | Trouble)
        verdict = EXAMINER.examine(row)
        if isinstance(verdict, Kept):
            assert len(verdict.input_ids) == len(verdict.loss_mask) <= 64
            assert verdict.loss_mask.any() and verdict.input_ids.dtype == np.int32
        else:
            assert verdict.reason in ADVICE
            doctor.skip(verdict.reason, row.where, verdict.detail)
    assert len(report(doctor.summary()).splitlines()) <= 2 + 4 * len(doctor.rows_skipped)


@often
@given(some.lists(ANYTHING, max_size=4), some.sampled_from([None, *FORMS]))
def test_any_values_are_read_row_by_row_in_every_form(tmp_path, values, form):
    lines = "".join(json.dumps(value) + "\n" for value in values)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(values))
    from_lines = list(read_conversations(tmp_path / "rows.jsonl", form))
    from_list = list(read_conversations(tmp_path / "rows.json", form))
    assert len(from_lines) == len(from_list) == len(values)
    assert [type(row) for row in from_lines] == [type(row) for row in from_list]
    examined(from_lines)


@often
@given(some.binary(max_size=200), some.sampled_from(sorted(CONTAINERS)))
def test_any_bytes_are_rows_troubles_or_one_readable_error(tmp_path, content, name):
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get((tmp_path / name).suffix)
    for whole in (content, packed(content) if packed else CONTAINERS[name][:8] + content):
        (tmp_path / name).write_bytes(whole)
        try:
            examined(read_conversations(tmp_path / name))
        except DataError as error:
            assert name in str(error)


@often
@given(some.sampled_from(sorted(CONTAINERS)), some.data())
def test_a_file_cut_anywhere_gives_a_beginning_of_its_rows(tmp_path, name, data):
    content = CONTAINERS[name]
    (tmp_path / name).write_bytes(content[: data.draw(some.integers(0, len(content) - 1))])
    try:
        found = list(read_conversations(tmp_path / name))
    except DataError as error:
        assert name in str(error)
        return
    rows = [row.messages for row in found if isinstance(row, Conversation)]
    assert rows == [row["messages"] for row in ROWS[: len(rows)]]
    assert sum(isinstance(row, Trouble) for row in found) <= 1


@often
@given(some.sampled_from(sorted(CONTAINERS)), some.data())
def test_a_file_with_a_wrong_byte_anywhere_never_raises_anything_else(tmp_path, name, data):
    content = bytearray(CONTAINERS[name])
    content[data.draw(some.integers(0, len(content) - 1))] = data.draw(some.integers(0, 255))
    (tmp_path / name).write_bytes(content)
    try:
        examined(read_conversations(tmp_path / name))
    except DataError as error:
        assert name in str(error)


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_deep_nesting_is_never_a_traceback(tmp_path, name, depth):
    good, deep = json.dumps(ROWS[0]), '{"messages": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / name).write_text(f"{good}\n{deep}\n" if name == "rows.jsonl" else f"[{good}, {deep}]")
    first, trouble = read_conversations(tmp_path / name)
    assert first.messages == ROWS[0]["messages"]
    assert isinstance(trouble, Trouble)
