"""A drafter that remembers its context: the keys and values of every layer over the tokens that were verified.

Promises: the weights are those of the drafter that trains, not copied; a block runs the code that it is trained
with, so training and decoding cannot drift apart. What lies at or beyond a row's anchor is hidden by the attention
itself, so rejected tokens are taken back by writing over them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftgraph.engine.models.drafter import Drafter, RotaryTable
from draftgraph.engine.models.fused import join


class CachedDrafter:
    """One block of each of `num_rows` rows over caches of `num_slots` tokens.

    Args:
        drafter: on its device.
        embedding, lm_head: [V, D], the target's, on the same device.
    Owns: the caches, zero at first; `tensors` names them.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, lm_head: Tensor, num_rows: int, num_slots: int):
        self.drafter, self.shape = with_positions(drafter, num_slots), drafter.shape
        self.embedding, self.lm_head = embedding, lm_head
        weight = drafter.fc.weight
        shape = (num_rows, num_slots, self.shape.num_kv_heads, self.shape.head_dim)

        def empty() -> Tensor:
            return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

        self.keys = [(empty(), empty()) for _ in range(self.shape.num_layers)]
        self.valid = torch.ones(num_rows, 1, dtype=torch.bool, device=weight.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every cache by name: static, written in place."""
        return {
            f"drafter {what} {i}": t for i, pair in enumerate(self.keys) for what, t in zip("kv", pair, strict=True)
        }

    def append(self, taps: Tensor, positions: Tensor) -> None:
        """Remember the taps [R, n, N*D] of tokens at positions [R, n] int64."""
        context = self.drafter.context(taps.to(self.drafter.fc.weight), positions.int())
        for layer, cached in zip(self.drafter.layers, self.keys, strict=True):
            for cache, new in zip(cached, layer.self_attn.context_keys(context), strict=True):  # type: ignore[operator, union-attr]
                cache.scatter_(1, positions[..., None, None].expand(new.shape), new)

    def logits(self, newest: Tensor, positions: Tensor) -> Tensor:
        """Draft the block that begins with each row's newest token.

        Args:
            newest, positions: [R] int64.
        Returns:
            [R, K-1, V], of slot 1 and on.
        """
        tokens = newest[:, None].repeat(1, self.shape.block_size)
        tokens[:, 1:] = self.shape.mask_token_id
        # NOTE: the rows themselves, as in training: Gemma's embedding module would scale them.
        embeddings = F.embedding(tokens, self.embedding).to(self.drafter.fc.weight)[:, None]
        hidden = self.drafter.draft(self.keys, embeddings, positions[:, None].int(), self.valid)
        return F.linear(hidden[:, 0, 1:].to(self.lm_head), self.lm_head)


def with_positions(drafter: Drafter, num_positions: int) -> Drafter:
    """A drafter of the same weights whose rotary table is long enough for `num_positions`.

    The weights are shared; only those that run as one product and do not lie in one piece are copied, as in a drafter
    that does not train.
    The table of the one that trains is left alone: captured graphs hold its address.
    """
    shape = drafter.shape
    with torch.device("meta"):
        other = Drafter(shape, max_context=1)
    other.load_state_dict(drafter.state_dict(), assign=True)
    with drafter.fc.weight.device:
        other.rotary = RotaryTable(num_positions + shape.block_size, shape.head_dim, shape.rope_theta)
    for layer in other.layers:
        join([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])  # type: ignore
        join([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])  # type: ignore
    return other.requires_grad_(False)
