"""Greedy and speculative decoding by their definitions: no cache, no batch, a forward over the whole row per token."""

import torch
import torch.nn.functional as F


@torch.no_grad()
def greedy(model, prompt, new_tokens, stops=frozenset()):
    row = prompt
    while len(row) < len(prompt) + new_tokens and (len(row) == len(prompt) or int(row[-1]) not in stops):
        row = torch.cat([row, model(row[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return row[len(prompt) :].tolist()


@torch.no_grad()
def taps_of(model, row, target_layer_ids):
    states = model(row[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in target_layer_ids], -1)


@torch.no_grad()
def draft_logits(model, drafter, taps, row, start):
    """[K-1, V] of the block whose anchor is at `start`, by the forward that training runs."""
    shape = drafter.shape
    tokens = torch.full((1, 1, shape.block_size), shape.mask_token_id)
    tokens[..., 0] = row[start]
    embeddings = F.embedding(tokens, model.get_input_embeddings().weight)
    anchor, valid = torch.tensor([[start]], dtype=torch.int32), torch.ones(1, 1, dtype=torch.bool)
    hidden = drafter(taps[:, :start], embeddings, anchor, valid)
    return model.get_output_embeddings()(hidden[0, 0, 1:])


def speculative(model, drafter, prompt, new_tokens, stops=frozenset(), drafts=None):
    """Tokens, and [verify forwards, of them with slot 1 accepted, slot 2, ...].

    The target's own answer decides what is accepted, so it is decoded once, and its row is what all forwards see.

    Args:
        drafts: start -> [K-1] tokens, instead of the drafter's.
    """
    answer = greedy(model, prompt, new_tokens, stops)
    row = torch.cat([prompt, torch.tensor(answer)])
    taps, counts, start = (
        taps_of(model, row, drafter.shape.target_layer_ids),
        [0] * drafter.shape.block_size,
        len(prompt),
    )
    while start < len(row) - 1:
        proposed = drafts(start) if drafts else draft_logits(model, drafter, taps, row, start).argmax(-1).tolist()
        accepted = 0
        for draft, said in zip(proposed, row[start + 1 : -1].tolist(), strict=False):
            if draft != said:
                break
            accepted += 1
        counts = [counts[0] + 1] + [count + (accepted > k) for k, count in enumerate(counts[1:])]
        start += accepted + 1
    return answer, counts
