"""Reads conversations from JSON and JSON-lines files in the forms that people have them in.

Promises: every row of every file comes out once, in order, as a Conversation, as Tokens, or as a Trouble that says why
not. Only a file that cannot be read, or that is no JSON at all, raises. JSON-lines files are streamed.
Does not: tokenise, count, or judge a row's content; that is `template`, `doctor` and `prepare`.

Forms, told apart per row by its keys: `messages` | `conversations` (from/value or role/content) | `instruction`,
`input`, `output` | `prompt`, `completion` | `input_ids`, `loss_mask`. A `tools` key (list, or JSON text of one) and a
`system` key are kept.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.engine.errors import DataError

SUFFIXES = (".json", ".jsonl")

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


Row = Conversation | Tokens


class _Misfit(Exception):
    """Why a parsed row is not one of the forms."""


def conversation_files(path: str | Path) -> list[Path]:
    """The JSON files of a path: itself, or all below it in sorted order."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{path}: no conversations: the folder holds no .json or .jsonl file")
        return files
    if not path.exists():
        raise DataError(f"{path}: no such file or folder of conversations")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: expected a .json or .jsonl file of conversations, found '{path.suffix or path.name}'")
    return [path]


def read_conversations(path: str | Path) -> Iterator[Row | Trouble]:
    """Yield the rows of a file, or of all JSON files of a folder."""
    for file in conversation_files(path):
        try:
            yield from _read_lines(file) if file.suffix == ".jsonl" or _is_lines(file) else _read_whole(file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _is_lines(file: Path) -> bool:
    """Many a .json file holds JSON lines: its first line is an object by itself, and more follows."""
    with file.open("rb") as lines:
        filled = (line for line in lines if line.strip())
        first = _parse(next(filled, b""))
        return bool(first) and isinstance(first[0], dict) and next(filled, None) is not None


def _read_lines(file: Path) -> Iterator[Row | Trouble]:
    size, read, parsed, bad = max(1, file.stat().st_size), 0, 0, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            read += len(line)
            if not line.strip():
                continue
            where, done, value = f"{file}:{number}", min(1.0, read / size), _parse(line)
            if value:
                parsed += 1
                yield _read_row(value[0], where, done)
            else:
                bad += 1
                yield Trouble(where, done, "bad json", "the line is not one JSON value")
    if bad and not parsed:
        raise DataError(
            f"{file}: no line of it is JSON; expected one row a line (a .json file may hold one list of rows)"
        )


def _read_whole(file: Path) -> Iterator[Row | Trouble]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error}); expected one list of rows, or JSON lines") from error
    rows = value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        yield _read_row(row, f"{file}[{index}]", (index + 1) / len(rows))


def _parse(text: bytes | str) -> list[Any]:
    """The JSON value as a list of one, or an empty list: None is a value too."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


def _read_row(row: Any, where: str, done: float) -> Row | Trouble:
    try:
        if not isinstance(row, dict):
            raise _Misfit(f"expected an object, found {_kind(row)}")
        if "input_ids" in row:
            return _tokens(row, where, done)
        messages = _messages(row)
        if not messages:
            return Trouble(where, done, "empty row", "no messages")
        system = _text(row.get("system"), "system")
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(where, done, messages, _tools(row.get("tools")))
    except _Misfit as misfit:
        return Trouble(where, done, "not a conversation", str(misfit))


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    for key in ("messages", "conversations"):
        if key in row:
            if not isinstance(row[key], list):
                raise _Misfit(f"'{key}' is {_kind(row[key])}, expected a list of messages")
            return [_message(message) for message in row[key]]
    if "instruction" in row and "output" in row:
        question = [_text(row["instruction"], "instruction"), _text(row.get("input"), "input")]
        return _exchange("\n".join(part for part in question if part), _text(row["output"], "output"))
    if "prompt" in row and "completion" in row:
        return _exchange(_text(row["prompt"], "prompt"), _text(row["completion"], "completion"))
    keys = ", ".join(sorted(row)[:6]) or "none"
    raise _Misfit(
        f"keys {keys}; expected messages, conversations, instruction+output, prompt+completion or input_ids+loss_mask"
    )


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    if not question and not answer:
        return []
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
    parsed = _parse(value) if isinstance(value, str) else [value]
    if not parsed:
        raise _Misfit("a tool call is not JSON")
    return list(parsed[0]) if isinstance(parsed[0], list) else parsed


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Misfit("a tool call has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Templates want a mapping. Text that is no JSON stays text, and the template judges it.
        arguments = (_parse(arguments) or [arguments])[0]
    entry: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**entry, "id": call["id"]} if "id" in call else entry


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        if not value.strip():
            return None
        value = (_parse(value) or [value])[0]
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
        return Trouble(where, done, "empty row", "no tokens")
    if max(ids) >= 2**31 or min(ids) < -(2**31):
        return Trouble(where, done, "token ids out of range", f"ids {min(ids)} to {max(ids)}")
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
    return "null" if value is None else names[type(value)]
