"""One parsed row, in the forms that people have conversations in, turned into what `prepare` works on.

Promises: every value becomes a Conversation, Rendered text, Tokens, or a Trouble that says why not; it never raises.
Does not: open files, which is `files`; tokenise, count, or judge a row's content: `template`, `doctor` and `prepare`.

Forms, told apart per row by its keys unless one is named: see FORMS. A `tools` key (list, or JSON text of one) and a
`system` key are kept. Of a preference pair the chosen side is read.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

# Why something is no row. What is wrong with a row that was read, the doctor says.
BAD_JSON = "bad json"
NOT_UTF8 = "bytes that are not UTF-8"
TOO_LONG = "row too long"
DAMAGED = "damaged file"
NOT_A_CONVERSATION = "not a conversation"
EMPTY = "empty row"
OUT_OF_RANGE = "token ids out of range"

# Each form with the keys that it needs; the first that a row has all of is the row's.
FORMS = {
    "tokens": ("input_ids",),
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
KEYS = {key for keys in FORMS.values() for key in keys} | {"loss_mask", "input", "prompt", "system", "tools"}

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "tool": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Chat messages ready for a chat template: role, content text, and where given reasoning_content and tool_calls."""

    where: str
    done: float  # share of its file read so far, for progress bars
    messages: list[dict[str, Any]]
    tools: list[Any] | None


@dataclass(frozen=True)
class Rendered:
    """Text as a chat template would have written it, special tokens included; all of it is supervised."""

    where: str
    done: float
    text: str


@dataclass(frozen=True)
class Tokens:
    """A row that came already tokenised."""

    where: str
    done: float
    input_ids: np.ndarray  # [n] int
    loss_mask: np.ndarray  # [n] bool


@dataclass(frozen=True)
class Trouble:
    """A row that is nothing we can read: a short reason to count by, and what was found."""

    where: str
    done: float
    reason: str
    detail: str


Row = Conversation | Rendered | Tokens


class _Misfit(Exception):
    """Why a parsed row is not one of the forms."""


def read_row(where: str, done: float, row: Any, form: str | None = None) -> Row | Trouble:
    """Read one parsed row, in the form that is named, else in the first one whose keys it has."""
    try:
        if not isinstance(row, dict):
            raise _Misfit(f"expected an object, found {_kind(row)}")
        form = form or _form(row)
        if missing := [key for key in FORMS[form] if key not in row]:
            raise _Misfit(f"no key {missing[0]!r}, which the form {form} needs")
        if form == "tokens":
            return _tokens(row, where, done)
        if form == "text":
            text = _text(row["text"], "text")
            return Rendered(where, done, text) if text else Trouble(where, done, EMPTY, "no text")
        messages = _messages(row, form)
        if not messages:
            return Trouble(where, done, EMPTY, "no messages")
        system = _text(row.get("system"), "system")
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(where, done, messages, _tools(row.get("tools")))
    except _Misfit as misfit:
        return Trouble(where, done, NOT_A_CONVERSATION, str(misfit))


def parse(text: bytes | str) -> list[Any]:
    """The JSON value as a list of one, or an empty list: None is a value too."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


def _form(row: dict[str, Any]) -> str:
    for form, keys in FORMS.items():
        if all(key in row for key in keys):
            return form
    found = ", ".join(sorted(row)[:6]) or "none"
    raise _Misfit(f"keys {found}; expected {', '.join('+'.join(keys) for keys in FORMS.values())}")


def _messages(row: dict[str, Any], form: str) -> list[dict[str, Any]]:
    if form == "messages" or form == "sharegpt":
        return _turns(row[FORMS[form][0]], FORMS[form][0])
    if form == "preference":
        return _chosen(row)
    question = _question(row)
    answer = _text(row[FORMS[form][1]], FORMS[form][1])
    return _exchange(question, answer) if question or answer else []


def _chosen(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt and the chosen answer; a chosen side that does not start with an answer is the whole conversation."""
    chosen = row["chosen"]
    if not isinstance(chosen, (dict, list)):
        question, answer = _question(row), _text(chosen, "chosen")
        if answer and not question:
            raise _Misfit("'chosen' is text and there is no prompt")
        return _exchange(question, answer) if answer else []
    turns = _turns(chosen if isinstance(chosen, list) else [chosen], "chosen")
    if not turns or turns[0]["role"] != "assistant":
        return turns
    for key in ("messages", "conversations", "prompt"):
        if isinstance(row.get(key), list):
            return _turns(row[key], key) + turns
    if not (question := _question(row)):
        raise _Misfit("'chosen' starts with an answer and there is no prompt")
    return [{"role": "user", "content": question}, *turns]


def _question(row: dict[str, Any]) -> str:
    if "instruction" in row:
        parts = [_text(row["instruction"], "instruction"), _text(row.get("input"), "input")]
        return "\n".join(part for part in parts if part)
    return _text(row.get("prompt"), "prompt")


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _turns(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _Misfit(f"'{key}' is {_kind(value)}, expected a list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, Any]:
    """One message in the templates' own form; ShareGPT's names and typed parts are translated."""
    if not isinstance(message, dict):
        raise _Misfit(f"a message is {_kind(message)}, expected an object")
    name = message.get("role", message.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        raise _Misfit(f"a message has the role {name!r}, expected one of {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts, reasoning, calls = [], [], _calls(message.get("tool_calls") or [])
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get("text", part.get("value")) if isinstance(part, dict) else part
        if kind in (None, "text") and name != "function_call":
            texts.append(_text(value, "content"))
        elif kind == "reasoning":
            reasoning.append(_text(value, "reasoning"))
        elif kind == "tool_call" or name == "function_call":
            calls.extend(_calls(value))
        else:
            raise _Misfit(f"a message has a part of type {kind!r}, expected text, reasoning or tool_call")
    result: dict[str, Any] = {"role": ROLES[name], "content": "".join(texts)}
    if message.get("reasoning_content") or reasoning:
        result["reasoning_content"] = _text(message.get("reasoning_content"), "reasoning_content") or "".join(reasoning)
    if calls:
        result["tool_calls"] = [_call(call) for call in calls]
    if ROLES[name] == "tool":
        result.update({key: message[key] for key in ("name", "tool_call_id") if key in message})
    return result


def _calls(value: Any) -> list[Any]:
    """Tool calls, wherever a message has them: one or a list of them, or JSON text of either."""
    parsed = parse(value) if isinstance(value, str) else [value]
    if not parsed:
        raise _Misfit("a tool call is not JSON")
    return list(parsed[0]) if isinstance(parsed[0], list) else parsed


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Misfit("a tool call has no function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # Templates want a mapping. Text that is no JSON stays text, and the template judges it.
        arguments = (parse(arguments) or [arguments])[0]
    entry: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**entry, "id": call["id"]} if "id" in call else entry


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        if not value.strip():
            return None
        value = (parse(value) or [value])[0]
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise _Misfit(f"'tools' is {_kind(value)}, expected a list of objects or its JSON text")
    return value or None


def _tokens(row: dict[str, Any], where: str, done: float) -> Row | Trouble:
    ids, mask = (_numbers(row.get(key), key) for key in ("input_ids", "loss_mask"))
    if len(ids) != len(mask):
        raise _Misfit(f"{len(ids)} input_ids and {len(mask)} loss_mask entries")
    if not all(isinstance(item, int) for item in ids):
        raise _Misfit("'input_ids' holds a number that is no integer")
    if not all(item in (0, 1) for item in mask):
        raise _Misfit("'loss_mask' holds something besides 0 and 1")
    if not ids:
        return Trouble(where, done, EMPTY, "no tokens")
    if max(ids) >= 2**31 or min(ids) < -(2**31):
        return Trouble(where, done, OUT_OF_RANGE, f"ids {min(ids)} to {max(ids)}")
    return Tokens(where, done, np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))


def _numbers(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        raise _Misfit(f"'{name}' is not a list of numbers")
    return value


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Misfit(f"'{name}' is {_kind(value)}, expected text")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
