"""What a drafter is worth: acceptance length by real speculative decoding of prompts, beside plain greedy decoding.

Promises: every answer is compared token for token with the target's own greedy one; sums are pooled over prompts, so a
long answer counts more than a short one. The bonus token is counted: a useless drafter has an acceptance length of 1.
Does not do: batches (one row at a time), sampling.
"""

import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph.engine.data.prompts import render_prompt
from draftgraph.engine.models.decode import decode_plain, decode_speculative
from draftgraph.engine.models.drafter import Drafter, RotaryTable
from draftgraph.engine.progress import progress_bar


def encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """Token ids [S] of the prompt as a user's turn, up to where the answer starts."""
    # The template wrote the special tokens already.
    return torch.tensor(tokenizer(render_prompt(tokenizer, prompt), add_special_tokens=False)["input_ids"])


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

    bar = progress_bar(disable=not progress)
    tokens, forwards, seconds, identical = 0, 0, 0.0, True
    accepted = [0] * (block_size - 1)
    answers: list[PlainAnswer] = []
    with bar:
        task = bar.add_task("evaluate", total=len(rows))
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
            bar.update(task, advance=1, description=f"evaluate, acceptance {1 + sum(accepted) / max(1, forwards):.3f}")
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
