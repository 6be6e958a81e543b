"""The target answers prompts: one row each, in order, going on where it stopped."""

import json

import pytest
import torch
from test_data_template import chat_tokenizer
from tiny import write_target

from draftgraph.engine.data.answers import Sampling
from draftgraph.engine.data.formats import Trouble
from draftgraph.engine.data.local_target import LocalTarget
from draftgraph.engine.data.prompts import load_questions
from draftgraph.engine.data.regenerate import regenerate
from draftgraph.engine.errors import DataError, RunError, UsageError
from draftgraph.engine.models.target import load_model


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    name = write_target(tmp_path_factory.mktemp("target"), vocab_size=300)
    model = load_model(name, torch.float32, torch.device("cpu"))
    tokenizer = chat_tokenizer()

    def call(prompts, out, batch_size=2, max_new_tokens=5, template=None, **sampling):
        if template:
            tokenizer.chat_template = template
        target = LocalTarget("tiny", model, tokenizer, Sampling(max_new_tokens, **sampling), batch_size)
        return regenerate(str(prompts), target, out, progress=False)

    return call


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts(path, *prompts):
    return write_rows(path, *({"prompt": p} for p in prompts))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_answers_do_not_depend_on_the_batch_and_a_second_call_goes_on(tmp_path, answer):
    prompts = write_prompts(tmp_path / "p.jsonl", "a", "much longer\u2028than that", "bb", "a")
    summary = answer(prompts, tmp_path / "whole.jsonl")
    assert (summary["rows_read"], summary["rows_answered"], summary["rows_skipped"]) == (4, 3, {"duplicate": 1})
    assert (summary["tokens"], summary["rows_cut"], summary["retries"]) == (15, 3, 0)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    parts = tmp_path / "parts.jsonl"
    answer(prompts, parts, batch_size=1)
    assert parts.read_bytes() == whole
    first, second, _ = whole.splitlines(keepends=True)
    for torn in range(len(second)):  # an interruption tore the second line
        parts.write_bytes(first + second[:torn])
        if torn in (0, 1, 9, 40, len(second) - 1):
            summary = answer(prompts, parts)
            assert (summary["rows_kept"], summary["rows_answered"]) == (1, 2)
            assert parts.read_bytes() == whole
    assert answer(prompts, parts)["rows_answered"] == 0


def test_sampled_answers_repeat_with_their_seed_also_after_an_interruption(tmp_path, answer):
    prompts = write_prompts(tmp_path / "p.jsonl", *"abcd")
    made = {}
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        answer(prompts, tmp_path / name, temperature=1.0, top_p=0.9, seed=seed)
        made[name] = (tmp_path / name).read_bytes()
    answer(prompts, tmp_path / "greedy")
    assert made["one"] == made["again"]
    assert len({made["one"], made["two"], (tmp_path / "greedy").read_bytes()}) == 3
    (tmp_path / "one").write_bytes(b"".join(made["one"].splitlines(keepends=True)[:2]))
    answer(prompts, tmp_path / "one", temperature=1.0, top_p=0.9, seed=1)
    assert (tmp_path / "one").read_bytes() == made["one"]


def test_another_setting_or_other_prompts_are_refused_by_name(tmp_path, answer):
    prompts, out = write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "o.jsonl"
    answer(prompts, out)
    before = out.read_bytes()
    for changes, message in [
        ({"temperature": 0.5}, r"temperature: 0\.0, not 0\.5\)"),
        ({"max_new_tokens": 6}, "max_new_tokens: 5, not 6"),
        ({"temperature": 0.5, "seed": 3}, "temperature: 0.0, not 0.5; seed: 0, not 3"),
    ]:
        with pytest.raises(DataError, match=message):
            answer(prompts, out, **changes)
    with pytest.raises(DataError, match=r"\(prompts: '\w{16}', not '\w{16}'\)"):
        answer(write_prompts(tmp_path / "q.jsonl", "a", "b"), out)
    assert out.read_bytes() == before


def test_files_that_cannot_be_used_are_one_sentence(tmp_path, answer):
    prompts = write_prompts(tmp_path / "p.jsonl", "a")
    other = tmp_path / "other.jsonl"
    for text in (
        "[1]\n",
        '[{"my": "only copy"}]',
        '{"prompt": "a"}\n{"prompt": "b"}',
        '{"index": 7, "messages": []}\n',
    ):
        for settings in (None, "[]", (tmp_path / "good.jsonl.settings")):
            if settings:
                answer(prompts, tmp_path / "good.jsonl")
                content = settings if isinstance(settings, str) else settings.read_text()
                (tmp_path / "other.jsonl.settings").write_text(content)
            other.write_text(text)
            with pytest.raises(DataError, match="something other than regenerated rows"):
                answer(prompts, other)
            assert other.read_text() == text
    with pytest.raises(DataError, match="cannot write"):
        answer(prompts, prompts / "below.jsonl")


def test_what_a_template_refuses_is_counted_and_all_of_it_is_an_error(tmp_path, answer):
    template = chat_tokenizer().chat_template
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, {"messages": [{"role": "tool", "content": "x"}]})
    strict = "{% if messages[0]['role'] == 'tool' %}{{ 1 / 0 }}{% endif %}" + template
    summary = answer(prompts, tmp_path / "o.jsonl", template=strict)
    assert (summary["rows_answered"], summary["rows_skipped"]) == (1, {"template refused": 1})
    assert summary["examples"]["template refused"].startswith(f"{prompts}:2: the chat template refuses the prompt 'x'")
    with pytest.raises(RunError, match="not one prompt got an answer"):
        answer(prompts, tmp_path / "none.jsonl", template="{{ 1 / 0 }}")
    answer(prompts, tmp_path / "back.jsonl", template=template)


def test_sampling_that_makes_no_sense_is_a_usage_error():
    for values in ({"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0.5}, {"seed": 1}, {"top_p": 0}):
        with pytest.raises(UsageError):
            Sampling(5, **values)
    with pytest.raises(UsageError, match="--seed takes"):
        Sampling(5, temperature=1.0, seed=-1)


def test_prompts_and_conversations_end_where_the_answer_belongs(tmp_path):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    path = write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "one", "task_id": 7},
        {"turns": ["two", "later"]},
        {"prompt": "three", "completion": "gone"},
        {"system": "s", "conversations": [{"from": "human", "value": "four"}, {"from": "gpt", "value": "gone"}]},
        {"messages": [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant", "assistant")]},
        {
            "messages": [
                {"role": "user", "content": "five"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": ""},
                {"role": "assistant", "content": "gone"},
            ],
            "tools": '[{"name": "f"}]',
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "gone"}]},
        {"prompt": " ", "completion": "x"},
        {"turns": []},
        {"text": "rendered"},
        {"prompt": "half \ud800"},
        7,
    )
    found = list(load_questions(str(path)))
    texts = [[m["content"] for m in q.messages] for q in found[:6]]
    assert texts[:4] == [["one"], ["two"], ["three"], ["s", "four"]]
    assert texts[4:] == [["user", "assistant", "user"], ["five", "", ""]]
    assert found[5].tools == [{"name": "f"}] and found[5].messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "x": 1
    }
    assert all(isinstance(trouble, Trouble) for trouble in found[6:])
    assert [trouble.reason for trouble in found[6:]] == [
        "nothing to answer",
        "nothing to answer",
        "empty row",
        "not a conversation",
        "bytes that are not UTF-8",
        "not a conversation",
    ]


def test_a_file_without_any_prompt_says_what_it_holds(tmp_path, answer):
    with pytest.raises(DataError, match=r"holds none\. nothing to answer, .*:1: no text of a user"):
        answer(write_rows(tmp_path / "p.jsonl", {"prompt": " ", "completion": "x"}), tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()
