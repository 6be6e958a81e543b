"""The target answers on a server that speaks OpenAI's chat completions: vLLM, SGLang and others.

Promises: never more than `concurrency` requests at once. What may pass is tried again, later and later: 429, 5xx, lost
connections, timeouts, answers that are no JSON; a Retry-After is honoured. A prompt that the server refuses is left
out; anything else ends with one readable error. The key goes into the request's header and nowhere else.
Closing the iterator closes the connections, so that the server stops as well.
Does not: use proxies or follow redirects, which would carry the key along.
"""

import contextlib
import email.utils
import http.client
import json
import os
import queue
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from draftgraph.engine.data.answers import EMPTY_ANSWER, Answer, Answers, NoAnswer, Sampling
from draftgraph.engine.data.formats import Conversation, read_row
from draftgraph.engine.data.prompts import Question, is_text
from draftgraph.engine.errors import RunError, UsageError

DEFAULT_KEY = "OPENAI_API_KEY"
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 600.0
CONNECT_S = 30.0
SAID = 300  # characters of what a server says
# What a server says of one prompt: malformed for its template, longer than its context.
REFUSALS = (400, 413, 422)


class _Passing(Exception):
    """May go well another time; `after` is when the server wants to be asked again."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


def api_key(name: str | None) -> str:
    """The key in the environment variable `name`, or in OPENAI_API_KEY; empty where that is not set."""
    key = os.environ.get(name or DEFAULT_KEY, "").strip()
    if name and not key:
        raise UsageError(f"--api-key-env: the environment variable {name} is not set")
    if not re.fullmatch(r"[!-~]*", key):
        raise UsageError(f"the key in {name or DEFAULT_KEY} holds characters that no HTTP header takes")
    return key


class Server:
    """One server, asked by `concurrency` threads."""

    def __init__(
        self,
        url: str,
        target: str,
        model: str,
        sampling: Sampling,
        *,
        key: str,
        concurrency: int,
        timeout: float,
        retries: int,
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("--server takes a URL like http://localhost:8000")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise UsageError("--server takes a URL without user, query and fragment; a key goes into the environment")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.settings = {"target": target, "server": self.url, "server_model": model, **asdict(sampling)}
        self.retries = 0
        self._model, self._sampling, self._key = model, sampling, key
        self._concurrency, self._timeout, self._max_retries = concurrency, timeout, retries
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._sockets: set[socket.socket] = set()

    def answers(self, questions: list[Question], missing: Collection[int]) -> Answers:
        pending = deque(sorted(missing))
        results: queue.SimpleQueue[tuple[int, Answer | NoAnswer | Exception]] = queue.SimpleQueue()

        def work() -> None:
            while pending and not self._stop.is_set():
                try:
                    index = pending.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    results.put((index, self._ask(index, questions[index])))
                except Exception as error:
                    results.put((index, error))

        self._stop.clear()
        # Daemons: a command that is interrupted does not wait for answers that nobody wants any more.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._concurrency, len(pending)))]
        for thread in threads:
            thread.start()
        try:
            for _ in range(len(missing)):
                index, answer = results.get()
                if isinstance(answer, Exception):
                    raise answer
                yield index, answer
        finally:
            self._stop.set()
            with self._lock:
                for connected in self._sockets:
                    _hang_up(connected)
            soon = time.monotonic() + 1
            for thread in threads:
                thread.join(max(0.0, soon - time.monotonic()))

    def _ask(self, index: int, question: Question) -> Answer | NoAnswer:
        body = json.dumps(self._request(index, question)).encode()
        for attempt in range(self._max_retries + 1):
            try:
                return self._answer(*self._post(body))
            except (_Passing, OSError, http.client.HTTPException) as error:
                timed_out = f"timed out (--timeout {self._timeout:g})" if isinstance(error, TimeoutError) else ""
                what = self._hide(timed_out or str(error) or type(error).__name__)[:SAID]
                after = getattr(error, "after", None)
            if attempt < self._max_retries:
                backoff = min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.5)
                if self._stop.wait(backoff if after is None else after + random.uniform(0, BACKOFF_S)):
                    break
                with self._lock:
                    self.retries += 1
        raise RunError(
            f"{question.where}: {self.url} failed {self._max_retries + 1} times, at last with: {what}. "
            "What was answered is kept: the same command goes on from there"
        )

    def _request(self, index: int, question: Question) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": on_the_wire(question.messages),
            "max_tokens": self._sampling.max_new_tokens,
            "temperature": self._sampling.temperature,
        }
        if not self._sampling.greedy:
            # A seed of its own for every prompt: the same one would draw the same numbers for all of them.
            request |= {"top_p": self._sampling.top_p, "seed": self._sampling.seed + index}
        if question.tools:
            request["tools"] = question.tools
        return request

    def _post(self, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(CONNECT_S, self._timeout))
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with contextlib.closing(connection):
            connection.connect()
            connected: socket.socket = connection.sock
            connected.settimeout(self._timeout)
            with self._lock:
                if self._stop.is_set():
                    raise _Passing("stopped")
                self._sockets.add(connected)
            try:
                connection.request("POST", self._path, body, headers)
                with connection.getresponse() as response:
                    return response.status, response.headers, response.read()
            finally:
                with self._lock:
                    self._sockets.discard(connected)

    def _answer(self, status: int, headers: http.client.HTTPMessage, body: bytes) -> Answer | NoAnswer:
        if status == 200:
            return read_answer(body)
        said = f"status {status}: {self._hide(message_of(body))[:SAID]}"
        if status in (408, 429) or status >= 500:
            raise _Passing(said, retry_after(headers.get("Retry-After")))
        if status in REFUSALS:
            return NoAnswer(f"refused by the server ({status})", said)
        hint = {401: "; is the key right?", 403: "; is the key right?", 404: "; are --server and --server-model right?"}
        raise RunError(f"{self.url} says {said}{hint.get(status, '')}")

    def _hide(self, text: str) -> str:
        """Servers like to quote what they were sent."""
        return text.replace(self._key, "***") if self._key else text


def read_answer(body: bytes) -> Answer | NoAnswer:
    """The first choice of a chat completion, its message in the templates' own form."""
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        said, reason = choice["message"], choice.get("finish_reason") or "stop"
        usage = completion.get("usage") or {}
        tokens = usage.get("completion_tokens")
        # vLLM's name for it has changed.
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        said = {**said, "role": "assistant", "reasoning_content": reasoning}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _Passing(f"an answer that is no chat completion: {message_of(body) or 'nothing'}") from error
    row = read_row("answer", 1.0, {"messages": [said]})
    if not isinstance(row, Conversation):
        raise _Passing(f"an answer that is no message: {getattr(row, 'detail', '')}")
    message = row.messages[0]
    if not any(str(message.get(key) or "").strip() for key in ("content", "reasoning_content", "tool_calls")):
        return NoAnswer(EMPTY_ANSWER, f"finish_reason {reason}")
    if not is_text(json.dumps(message, ensure_ascii=False)):
        return NoAnswer("half of a surrogate pair", "in the answer")
    return Answer(message, str(reason), tokens if isinstance(tokens, int) else None)


def on_the_wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the API has them: arguments of tool calls are JSON text; calls have ids, which their results name."""
    sent, open_calls = [], deque[str]()
    for place, message in enumerate(messages):
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": f"call_{place}_{number}", **call, "function": _as_text(call["function"])}
                for number, call in enumerate(calls)
            ]
            open_calls = deque(call["id"] for call in message["tool_calls"])
        elif message["role"] == "tool" and open_calls:
            message.setdefault("tool_call_id", open_calls.popleft())
        sent.append(message)
    return sent


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def message_of(body: bytes) -> str:
    """What an error's body says, in one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found if isinstance(found, str) else str(found.get("message") or found.get("detail") or text)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(text.split())


def retry_after(value: str | None) -> float | None:
    """Seconds to wait, from either form of the header."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_S)


def _hang_up(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        connected.shutdown(socket.SHUT_RDWR)
