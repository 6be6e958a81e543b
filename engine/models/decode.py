"""Greedy decoding of one row: plain, and speculative with a drafter.

Promises: speculative tokens are the target's own greedy tokens, whatever the drafter proposes; the drafter runs the
code that it is trained with (one block, one row), so training and decoding cannot drift apart.
A plain reference: `draftgraph eval` decodes batches, by run/decoding.py.
Does not do: batches, sampling, a key-value cache of the drafter (its context is projected anew for every block).

What is counted. A verify forward is one forward of the target over a draft block of K tokens; it accepts the longest
prefix of drafts that agree with the target and emits one token more, the target's own (the bonus token), so it emits 1
to K tokens. The prompt's forward is not a verify forward, and its one token is counted nowhere. Tokens after a stop
token or beyond max_new_tokens are not returned and not counted: a forward that returned n tokens accepted n - 1 drafts.
So acceptance length = (tokens - 1) / forwards = 1 + the sum of the acceptance per slot, exactly.
"""

import inspect
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from draftgraph.engine.models.drafter import Drafter


@dataclass(frozen=True)
class Decoded:
    """One speculatively decoded answer."""

    tokens: list[int]  # the answer, a stop token included
    forwards: int  # verify forwards of the target
    accepted_per_slot: list[int]  # K-1: how many verify forwards accepted the draft of this slot


class CachedTarget:
    """A target's own module with its cache, for one row."""

    def __init__(self, model: Any):
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        layers: list[Any] = self.cache.layers
        self.recurrent = [layer for layer in layers if hasattr(layer, "recurrent_states")]
        self.attention = [layer for layer in layers if not hasattr(layer, "recurrent_states")]
        for layer in self.attention:
            if layer.is_sliding:
                layer.activate_past_recording()  # else a window that is full cannot be cropped

    def forward(self, tokens: Tensor, target_layer_ids: tuple[int, ...] = (), **options: Any) -> tuple[Tensor, Tensor]:
        """Append tokens to the row.

        Args:
            tokens: [n] int64, on any device.
            target_layer_ids: N taps.
            options: for the module, such as `logits_to_keep`.
        Returns:
            logits [n, V], or as many of the last as are kept; taps [n, N*D], empty where none are asked for.
        """
        options[self.cache_name] = self.cache
        ids = tokens[None].to(self.model.device)
        out = self.model(ids, use_cache=True, output_hidden_states=bool(target_layer_ids), **options)
        # NOTE: hidden_states[0] is the embedding, so the output of layer i is at i + 1.
        taps = [out.hidden_states[i + 1][0] for i in target_layer_ids]
        return out.logits[0], torch.cat(taps, -1) if taps else out.logits.new_empty(len(tokens), 0)

    def keep(self, tokens: Tensor, num_kept: int, before: list[tuple[Tensor, Tensor]]) -> None:
        """Take back all but the first `num_kept` of the tokens that the last forward appended.

        A recurrent state has no positions to crop: it is set to what it was before, and the kept tokens are run again.

        Args:
            tokens: [n], what the last forward appended.
            before: `snapshot()` from before that forward.
        """
        rerun = bool(self.recurrent) and num_kept < len(tokens)
        for layer in self.attention:
            layer.crop(-len(tokens) if rerun else num_kept - len(tokens))
        if rerun:
            for layer, (convolution, recurrence) in zip(self.recurrent, before, strict=True):
                layer.conv_states[0].copy_(convolution)
                layer.recurrent_states[0].copy_(recurrence)
            self.forward(tokens[:num_kept], logits_to_keep=1)

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of what cannot be cropped: convolution and recurrence of every recurrent layer."""
        return [(layer.conv_states[0].clone(), layer.recurrent_states[0].clone()) for layer in self.recurrent]


@torch.no_grad()
def decode_plain(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, stop_ids: Set[int], block_size: int = 1
) -> list[int]:
    """The target's greedy answer, one token per forward.

    Args:
        model: a causal LM of transformers.
        input_ids: [S] int64, the prompt.
        max_new_tokens: at least 1.
        stop_ids: the answer ends with the first of these.
        block_size: 1 is ordinary decoding. K runs every token as the first of a block whose rest is taken back: the
            same shapes as a verify forward, the reference in bf16, where another shape may round a tie differently.
    """
    target = CachedTarget(model)
    logits, _ = target.forward(input_ids, logits_to_keep=1)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        block = torch.full((block_size,), tokens[-1], device=logits.device)
        before = target.snapshot() if block_size > 1 else []
        logits, _ = target.forward(block)
        target.keep(block, 1, before)
        tokens.append(int(logits[0].argmax()))
    return tokens


@torch.no_grad()
def decode_speculative(
    model: nn.Module, drafter: Drafter, input_ids: Tensor, max_new_tokens: int, stop_ids: Set[int]
) -> Decoded:
    """The target's greedy answer, up to K tokens per verify forward.

    Args:
        model: the causal LM that the drafter belongs to.
        drafter: on any device, its rotary table holding S + max_new_tokens positions.
        input_ids: [S] int64, the prompt.
        max_new_tokens, stop_ids: as for `decode_plain`.
    Source: DFlash paper, decoding: the newest token is the anchor, the drafter sees the taps of what is before it.
    """
    shape, weight = drafter.shape, drafter.fc.weight
    # NOTE: the rows themselves, as in training: Gemma's embedding module would scale them.
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings()  # type: ignore[operator]
    num_prompt, K = len(input_ids), shape.block_size
    target = CachedTarget(model)
    logits, prompt_taps = target.forward(input_ids, shape.target_layer_ids, logits_to_keep=1)
    taps = weight.new_empty(num_prompt + max_new_tokens + K, prompt_taps.shape[-1])
    taps[:num_prompt] = prompt_taps
    valid = torch.ones(1, 1, dtype=torch.bool, device=weight.device)
    block = torch.full((K,), shape.mask_token_id, device=logits.device)

    tokens, forwards, accepted_per_slot = [int(logits[-1].argmax())], 0, [0] * (K - 1)
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        start = num_prompt + len(tokens) - 1  # position of the newest token, which the target has not seen yet
        block[0], block[1:] = tokens[-1], shape.mask_token_id
        anchor = torch.full((1, 1), start, dtype=torch.int32, device=weight.device)
        hidden = drafter(taps[None, :start], F.embedding(block, embedding).to(weight)[None, None], anchor, valid)
        block[1:] = lm_head(hidden[0, 0, 1:].to(lm_head.weight)).argmax(-1)

        before = target.snapshot()
        logits, block_taps = target.forward(block, shape.target_layer_ids)
        taps[start : start + K] = block_taps  # those of rejected drafts are overwritten before they are looked at
        predicted = logits.argmax(-1)
        num_accepted = int((predicted[:-1] == block[1:]).long().cumprod(0).sum())
        target.keep(block, num_accepted + 1, before)

        emitted = until_stop(predicted[: num_accepted + 1].tolist(), stop_ids)[: max_new_tokens - len(tokens)]
        tokens += emitted
        forwards += 1
        for slot in range(len(emitted) - 1):
            accepted_per_slot[slot] += 1
    return Decoded(tokens, forwards, accepted_per_slot)


def until_stop(tokens: list[int], stop_ids: Set[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens
