"""A server answers prompts, or does not."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate

import pytest
from chat_server import ChatServer, asked, completion
from test_data_regenerate import read_rows, write_prompts, write_rows

from draftgraph.engine.cli import main
from draftgraph.engine.data import server as server_module
from draftgraph.engine.data.answers import Sampling
from draftgraph.engine.data.files import read_conversations
from draftgraph.engine.data.formats import Conversation
from draftgraph.engine.data.regenerate import MAX_UNANSWERED, regenerate
from draftgraph.engine.data.server import Server, api_key, on_the_wire, read_answer, retry_after
from draftgraph.engine.errors import DataError, RunError, UsageError

KEY = "sk-secret-0123456789"


@pytest.fixture
def chat(monkeypatch):
    monkeypatch.setattr(server_module, "BACKOFF_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def ask(chat, prompts, out, url=None, key="", concurrency=1, timeout=5.0, retries=2, **sampling):
    how = Sampling(sampling.pop("max_new_tokens", 9), **sampling)
    server = Server(
        url or chat.url, "tiny", "served", how, key=key, concurrency=concurrency, timeout=timeout, retries=retries
    )
    return regenerate(str(prompts), server, out, progress=False)


def one_prompt(tmp_path):
    return write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "o.jsonl"


def test_a_request_says_what_was_asked_for_and_no_more(tmp_path, chat):
    prompts, out = write_prompts(tmp_path / "p.jsonl", "a", "b"), tmp_path / "o.jsonl"
    ask(chat, prompts, out, url=chat.url + "/v1/", key=KEY)
    messages = [{"role": "user", "content": "a"}]
    assert chat.bodies[0] == {"model": "served", "messages": messages, "max_tokens": 9, "temperature": 0.0}
    assert chat.headers[0]["Authorization"] == f"Bearer {KEY}"
    ask(chat, prompts, tmp_path / "sampled.jsonl", temperature=0.7, top_p=0.9, seed=5)
    assert [(b["temperature"], b["top_p"], b["seed"]) for b in chat.bodies[2:]] == [(0.7, 0.9, 5), (0.7, 0.9, 6)]
    assert "Authorization" not in chat.headers[2]


def test_requests_at_once_are_bounded_and_rows_end_in_the_order_of_the_prompts(tmp_path, chat):
    def slow_at_first(body, number):
        time.sleep(0.1 if number <= 4 else 0.01)
        return completion(f"\u00e9\u4e2d\U0001f600 \u2028 {asked(body)}")

    chat.script = slow_at_first
    prompts = [f"p{i}" for i in range(40)]
    summary = ask(chat, write_prompts(tmp_path / "p.jsonl", *prompts), tmp_path / "o.jsonl", concurrency=4)
    assert chat.most_at_once == 4 and len(chat.bodies) == 40
    assert (summary["rows_answered"], summary["tokens"], summary["retries"]) == (40, 280, 0)
    rows = read_rows(tmp_path / "o.jsonl")
    assert [row["index"] for row in rows] == list(range(40))
    assert rows[3] == {
        "index": 3,
        "messages": [
            {"role": "user", "content": "p3"},
            {"role": "assistant", "content": "\u00e9\u4e2d\U0001f600 \u2028 p3"},
        ],
        "finish_reason": "stop",
    }
    assert all(isinstance(row, Conversation) for row in read_conversations(tmp_path / "o.jsonl"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl", "o.jsonl.settings", "p.jsonl"]


@pytest.mark.parametrize(
    "trouble",
    [
        (500, {}, b"oops"),
        (503, {"Retry-After": "0"}, b""),
        (200, {}, b"<html>garbage"),
        (200, {}, b"\xff\xfe{"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b'{"choices": [{"message": {"content": {"no": "text"}}}]}'),
        (200, {"Content-Length": "500"}, b'{"choices": [{"mess'),  # the connection drops in the middle
    ],
)
def test_what_passes_is_tried_again(tmp_path, chat, trouble):
    chat.script = lambda body, number: trouble if number <= 2 else completion("at last")
    summary = ask(chat, *one_prompt(tmp_path))
    assert (summary["rows_answered"], summary["retries"], len(chat.bodies)) == (1, 2, 3)
    assert read_rows(tmp_path / "o.jsonl")[0]["messages"][1]["content"] == "at last"


def test_a_retry_after_is_honoured(tmp_path, chat):
    chat.script = lambda body, number: (429, {"Retry-After": "0.5"}, b"slow down") if number == 1 else completion("x")
    assert ask(chat, *one_prompt(tmp_path))["retries"] == 1
    assert chat.times[1] - chat.times[0] >= 0.5
    assert 55 < (retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert (retry_after("-3"), retry_after("soon"), retry_after(None), retry_after("1e9")) == (0, None, None, 600)


def test_a_hang_is_a_timeout_and_is_tried_again(tmp_path, chat):
    chat.script = lambda body, number: None if number == 1 else completion("x")
    assert ask(chat, *one_prompt(tmp_path), timeout=0.2)["retries"] == 1
    chat.script = lambda body, number: None
    with pytest.raises(RunError, match=r"p.jsonl:1: .* failed 2 times, at last with: timed out \(--timeout 0.2\)"):
        ask(chat, tmp_path / "p.jsonl", tmp_path / "never.jsonl", timeout=0.2, retries=1)


def test_an_error_hangs_up_on_the_requests_under_way(tmp_path, chat):
    def script(body, number):
        if asked(body) == "hangs":
            return None
        while chat.at_once < 2:
            time.sleep(0.01)
        return 401, {}, b"who are you"

    chat.script = script
    with pytest.raises(RunError, match=r"status 401: who are you; is the key right\?"):
        prompts = write_prompts(tmp_path / "p.jsonl", "hangs", "a", "b")
        ask(chat, prompts, tmp_path / "o.jsonl", concurrency=2, timeout=60)
    assert not [thread for thread in threading.enumerate() if "(work)" in thread.name]


def test_what_does_not_pass_ends_with_the_servers_words_and_the_answers_so_far(tmp_path, chat):
    prompts, out = write_prompts(tmp_path / "p.jsonl", "a", "b", "c"), tmp_path / "o.jsonl"
    chat.script = lambda body, number: (500, {}, b"out of\nmemory") if asked(body) == "b" else completion("x")
    with pytest.raises(RunError, match=r"p.jsonl:2: .* failed 3 times, at last with: status 500: out of memory\. What"):
        ask(chat, prompts, out)
    assert [row["index"] for row in read_rows(out)] == [0]
    error = json.dumps({"error": {"message": "no model " + "x" * 900}}).encode()
    chat.script = lambda body, number: (404, {}, error)
    with pytest.raises(RunError, match=r"status 404: no model x{291}; are --server and --server-model right"):
        ask(chat, prompts, out)
    chat.script = lambda body, number: (307, {"Location": "http://elsewhere.invalid"}, b"")
    with pytest.raises(RunError, match="status 307"):
        ask(chat, prompts, out)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(RunError, match=r"failed 2 times, .*refused"):
            ask(chat, prompts, tmp_path / "n.jsonl", url=url, retries=1)


def test_refused_and_empty_answers_are_left_out_and_counted_unless_there_are_only_those(tmp_path, chat):
    def script(body, number):
        if asked(body) == "long":
            return 400, {}, b'{"object": "error", "message": "longer than 4096 tokens"}'
        return completion({"empty": " \n", "cut": "and then", "half": "\ud83d"}.get(asked(body), "x"), asked(body))

    chat.script = script
    prompts, out = write_prompts(tmp_path / "p.jsonl", "long", "length", "empty", "half", "b"), tmp_path / "o.jsonl"
    summary = ask(chat, prompts, out)
    assert summary["rows_skipped"] == {
        "refused by the server (400)": 1,
        "empty answer": 1,
        "half of a surrogate pair": 1,
    }
    assert summary["examples"]["refused by the server (400)"] == f"{prompts}:1: status 400: longer than 4096 tokens"
    assert (summary["rows_answered"], summary["rows_cut"]) == (2, 1)
    assert [row["finish_reason"] for row in read_rows(out)] == ["length", "b"]
    assert ask(chat, prompts, out)["rows_kept"] == 2  # the others are asked again
    chat.script = lambda body, number: (400, {}, b"bad template")
    with pytest.raises(RunError, match=r"not one prompt got an answer.*bad template"):
        ask(chat, prompts, tmp_path / "none.jsonl")
    many = write_prompts(tmp_path / "many.jsonl", *map(str, range(2 * MAX_UNANSWERED)))
    chat.bodies.clear()
    with pytest.raises(RunError, match=f"{MAX_UNANSWERED} prompts in a row got no answer, the last one: .*many.*:20"):
        ask(chat, many, tmp_path / "none.jsonl")
    assert len(chat.bodies) <= MAX_UNANSWERED + 2


def test_another_server_or_model_is_refused_by_name(tmp_path, chat):
    prompts, out = one_prompt(tmp_path)
    ask(chat, prompts, out)
    with pytest.raises(DataError, match=r"server: 'http://127[^']*', not 'http://other/v1/chat/completions'"):
        ask(chat, prompts, out, url="http://other")
    with pytest.raises(DataError, match=r"temperature: 0\.0, not 0\.1"):
        ask(chat, prompts, out, temperature=0.1)


def test_tool_calls_and_reasoning_go_there_and_come_back(tmp_path, chat):
    call = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    chat.script = lambda body, number: completion(None, "tool_calls", tool_calls=[call], reasoning="hm")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "somebody else's"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = write_rows(tmp_path / "p.jsonl", {"messages": messages, "tools": tools})
    ask(chat, prompts, tmp_path / "o.jsonl")
    sent = chat.bodies[0]
    assert sent["tools"] == tools and [m["role"] for m in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]
    assert sent["messages"][2]["tool_call_id"] == "call_1_0"
    (row,) = read_conversations(tmp_path / "o.jsonl")
    assert (
        isinstance(row, Conversation)
        and row.tools == tools
        and row.messages[1]["tool_calls"][0]["function"]
        == {
            "name": "f",
            "arguments": {"x": 1},
        }
    )
    assert row.messages[3] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 2}}, "id": "c9"}],
    }
    assert on_the_wire([{"role": "tool", "content": "alone"}]) == [{"role": "tool", "content": "alone"}]


def test_tokens_that_a_server_does_not_count_are_null(tmp_path, chat):
    assert read_answer(b'{"choices": [{"message": {"content": "x"}}]}').tokens is None
    chat.script = lambda body, number: {"choices": completion("x")["choices"]}
    assert ask(chat, *one_prompt(tmp_path))["tokens"] is None


def test_the_key_is_in_no_output_no_error_and_no_file(tmp_path, chat, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    prompts, out = one_prompt(tmp_path)
    command = ["regenerate", str(prompts), "--target", "tiny", "--out", str(out), "--server", chat.url, "--json"]
    for status, place in ((200, 250), (400, 275), (401, 275), (500, 260)):
        # What is said is cut at 300 characters, in the middle of the key.
        quoting = f"{'x' * place} Bearer {KEY} is wrong".encode()
        chat.script = lambda body, number, status=status, quoting=quoting: (status, {}, quoting)
        assert main([*command, "--api-key-env", "MY_KEY", "--retries", "1"]) == 5
        said, err = capsys.readouterr()
        shown = "".join((said + err).split())
        assert "Bearer***" in shown and "sk-" not in shown
    assert main([*command, "--api-key-env", "NOT_SET"]) == 2
    chat.script = lambda body, number: completion("fine")
    assert main([*command, "--api-key-env", "MY_KEY"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["rows_answered"], summary["tokens"]) == (1, 7)
    assert {headers["Authorization"] for headers in chat.headers} == {f"Bearer {KEY}"}
    assert not [p for p in tmp_path.iterdir() if "sk-" in p.read_text()]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\u00e9")
    with pytest.raises(UsageError, match="characters that no HTTP header takes") as error:
        api_key(None)
    assert "sk-" not in str(error.value)


def test_urls_that_are_none_are_usage_errors(chat, tmp_path):
    for url in ("localhost:8000", "ftp://x", "http://", "http://me:sk-1@host", "http://:sk-1@h", "http://h?key=sk-1"):
        with pytest.raises(UsageError, match="--server") as error:
            ask(chat, *one_prompt(tmp_path), url=url)
        assert "sk-1" not in str(error.value)
    with pytest.raises(UsageError, match="--server"):
        ask(chat, *one_prompt(tmp_path), url="http://h:port")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_stopped_ends_at_once_and_goes_on_later(tmp_path, chat, number):
    def script(body, count):
        return None if int(asked(body)) >= 5 else completion(f"answer to {asked(body)}")

    plain, chat.script = chat.script, script
    prompts, out = write_prompts(tmp_path / "p.jsonl", *map(str, range(12))), tmp_path / "o.jsonl"
    command = ["regenerate", str(prompts), "--target", "tiny", "--out", str(out), "--server", chat.url, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "draftgraph.engine.cli", *command, "--concurrency", "3"],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (len(chat.bodies) == 8 and out.exists() and out.read_bytes().count(b"\n") == 5):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    # The requests under way are never answered, and would be waited for ten minutes.
    assert process.wait(timeout=30) == (-number if number == signal.SIGKILL else 130)
    assert {row["index"] for row in read_rows(out)} == set(range(5))
    with out.open("a") as file:
        file.write('{"index": 5, "messages": [{"ro')
    chat.script = plain
    chat.bodies.clear()
    assert main(command) == 0
    assert sorted(int(asked(body)) for body in chat.bodies) == list(range(5, 12))
    rows = read_rows(out)
    assert [row["index"] for row in rows] == list(range(12))
    assert all(row["messages"][1]["content"] == f"answer to {row['index']}" for row in rows)
