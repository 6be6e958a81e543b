"""The target answers prompts: one row each, in order, going on where it stopped."""

import json

import pytest
import torch
from test_data_template import chat_tokenizer
from tiny import write_target

from draftgraph.engine.data.regenerate import regenerate
from draftgraph.engine.errors import DataError
from draftgraph.engine.models.target import load_model


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    name = write_target(tmp_path_factory.mktemp("target"), vocab_size=300)
    model = load_model(name, torch.float32, torch.device("cpu"))
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token

    def call(prompts, out, batch_size=2):
        return regenerate(prompts, model, tokenizer, out, max_new_tokens=5, batch_size=batch_size, progress=False)

    return call


def write_prompts(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return path


def test_answers_do_not_depend_on_the_batch_and_a_second_call_goes_on(tmp_path, answer):
    prompts = write_prompts(tmp_path / "p.jsonl", "a", "much longer\u2028than that", "bb")
    assert answer(prompts, tmp_path / "whole.jsonl")["rows_answered"] == 3
    answer(write_prompts(tmp_path / "first.jsonl", "a"), tmp_path / "parts.jsonl")
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"messages": [{"ro')  # an interruption tore the line
    summary = answer(prompts, tmp_path / "parts.jsonl", batch_size=1)
    assert (summary["rows_skipped"], summary["rows_answered"]) == (1, 2)
    assert (tmp_path / "parts.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_files_that_cannot_be_used_are_one_sentence(tmp_path, answer):
    prompts = write_prompts(tmp_path / "p.jsonl", "a")
    for text in ("[1]\n", '[{"my": "only copy"}]', '{"prompt": "a"}\n{"prompt": "b"}'):
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(DataError, match="something other than regenerated rows"):
            answer(prompts, tmp_path / "other.jsonl")
        assert (tmp_path / "other.jsonl").read_text() == text
    with pytest.raises(DataError, match="cannot write"):
        answer(prompts, prompts / "below.jsonl")
