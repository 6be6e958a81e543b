"""The whole target over static caches, a fixed number of tokens at a time, for decoding: every row at its own position.

Promises: one path eager and captured, no wait, no mask made by the module; taking tokens back costs no forward. Keys
and values lie in a slot per position: what is beyond a row's position is hidden until it is overwritten. A recurrent
state has no positions, so a forward leaves it alone, and `commit` then brings it over the tokens that are kept.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from draftgraph.engine.models.cached_delta import CachedDelta
from draftgraph.engine.models.fused import worst_token_difference
from draftgraph.engine.models.fused_qwen3_5 import require_fla
from draftgraph.engine.models.layers import require_layer_loop, rotary_tables, unsupported
from draftgraph.engine.models.ops import twins


class SlotCache:
    """What an attention layer of transformers takes for its cache: `update` writes new tokens and returns all slots."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values  # [R, G, slots, C]
        self.slots: Tensor  # [R, n] of the tokens of this forward

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        index = self.slots[:, None, :, None].expand(keys.shape)
        self.keys.scatter_(2, index, keys)
        self.values.scatter_(2, index, values)
        return self.keys, self.values

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots [R, n] to other slots [R, n] of their rows."""
        for cache in (self.keys, self.values):
            shape = (-1, cache.shape[1], -1, cache.shape[3])
            moved = cache.gather(2, source[:, None, :, None].expand(shape))
            cache.scatter_(2, target[:, None, :, None].expand(shape), moved)


class CachedTarget:
    """A causal LM of transformers over caches of `num_rows` rows and `num_slots` tokens.

    Args:
        target_layer_ids: N taps.
        num_slots: of a row; no forward may go beyond.
    Raises:
        CaptureError: a family that is no loop over its layers.
    Owns: the caches, zero at first; `tensors` names them.
    """

    def __init__(self, model: Any, target_layer_ids: tuple[int, ...], num_rows: int, num_slots: int):
        self.decoder, self.lm_head = model.get_decoder(), model.get_output_embeddings()
        require_layer_loop(self.decoder)
        self.model, self.config, self.target_layer_ids = model, self.decoder.config, target_layer_ids
        weight = self.decoder.embed_tokens.weight
        self.device, self.dtype, self.num_rows = weight.device, weight.dtype, num_rows
        self.window: int = getattr(self.config, "sliding_window", None) or 0
        # A family that does not say which layers slide lets all of them, as in layers.py.
        everywhere = "sliding_attention" if self.window else "full_attention"
        self.kinds = getattr(self.config, "layer_types", None) or [everywhere] * len(self.decoder.layers)
        self.rope = rotary_tables(self.decoder.rotary_emb, set(self.kinds), num_slots, self.dtype, self.device)
        self.slots = torch.arange(num_slots, device=self.device)
        self.additive = self.config._attn_implementation == "eager"
        self.caches = [self.cache_of(layer, kind) for layer, kind in zip(self.decoder.layers, self.kinds, strict=True)]
        self.recurrent = [cache for cache in self.caches if isinstance(cache, CachedDelta)]
        named = inspect.signature(self.decoder.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"

    def cache_of(self, layer: Any, kind: str) -> SlotCache | CachedDelta:
        if kind == "linear_attention":
            if not hasattr(layer.linear_attn, "in_proj_qkv"):
                raise unsupported(self.config, "its linear attention cannot be decoded over static caches")
            if self.device.type == "cuda":
                require_fla()
            return CachedDelta(layer.linear_attn, self.num_rows, self.dtype, self.device)
        heads = self.config.num_key_value_heads
        shape = (self.num_rows, heads, len(self.slots), layer.self_attn.head_dim)
        return SlotCache(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every cache by name: static, written in place."""
        named: dict[str, Tensor] = {}
        for i, cache in enumerate(self.caches):
            if isinstance(cache, SlotCache):
                named |= {f"keys {i}": cache.keys, f"values {i}": cache.values}
            else:
                named |= {f"convolution {i}": cache.convolution, f"memory {i}": cache.memory}
        return named

    def reset(self) -> None:
        """Empty rows: a recurrent state starts at zero, and no slot beyond a row's position is ever seen."""
        for cache in self.recurrent:
            cache.convolution.zero_()
            cache.memory.zero_()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None = None,
        visible: Tensor | None = None,
        slot_positions: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run n tokens of every row.

        Args:
            tokens, positions: [R, n] int64.
            slots: [R, n] int64, where their keys and values go; default: their positions.
            visible: [R, n, slots] bool, which slots a token sees; default: those up to its own.
            slot_positions: [R, slots] int64, of what the slots hold; default: their numbers.
            kept: [R], how many of the tokens stay, where it is known before: they are committed layer by layer, which
                keeps the tokens of one layer in memory, not those of all.
        Returns:
            hidden states [R, n, D] after the last norm; taps [R, n, N*D].
        """
        slots = positions if slots is None else slots
        masks = self.masks(positions, visible, self.slots if slot_positions is None else slot_positions[:, None])
        rope = {kind: (cos[0][positions], sin[0][positions]) for kind, (cos, sin) in self.rope.items()}
        x, taps = self.decoder.embed_tokens(tokens), []
        for i, (layer, kind, cache) in enumerate(zip(self.decoder.layers, self.kinds, self.caches, strict=True)):
            if isinstance(cache, CachedDelta):
                x = x + cache.forward(layer.input_layernorm(x))
                if kept is not None:
                    cache.commit(kept)
                out = layer.mlp(layer.post_attention_layernorm(x))
                x = x + (out[0] if isinstance(out, tuple) else out)
            else:
                cache.slots = slots
                named = {self.cache_name: cache, "attention_mask": masks[kind], "position_embeddings": rope[kind]}
                x = layer(x, use_cache=True, **named)
            if i in self.target_layer_ids:
                taps.append(x)
        return self.decoder.norm(x), torch.cat(taps, -1) if taps else x[..., :0]

    def masks(self, positions: Tensor, visible: Tensor | None, slot_positions: Tensor) -> dict[str, Tensor]:
        """[R, 1, n, slots] of each kind of attention, bool, or to be added to the scores."""
        full = self.slots <= positions[..., None] if visible is None else visible
        masks = {"full_attention": full}
        if "sliding_attention" in self.kinds:
            masks["sliding_attention"] = full & (slot_positions > positions[..., None] - self.window)
        if self.additive:
            low = torch.finfo(self.dtype).min
            return {k: torch.zeros_like(m, dtype=self.dtype).masked_fill_(~m, low)[:, None] for k, m in masks.items()}
        return {kind: mask[:, None] for kind, mask in masks.items()}

    def commit(self, num_kept: Tensor) -> None:
        """Bring the recurrent states over the first num_kept [R] tokens of the last forward; 0 changes nothing."""
        for cache in self.recurrent:
            cache.commit(num_kept)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden states after the last norm."""
        logits = self.lm_head(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def difference_from_module(self, num_tokens: int) -> float:
        """Of logits, rows at different positions, from the untouched module's; leaves the caches reset."""
        generator = torch.Generator().manual_seed(0)
        length = min(len(self.slots), 2 * num_tokens + 2)
        ids = torch.randint(self.config.vocab_size, (self.num_rows, length), generator=generator).to(self.device)
        steps = torch.arange(num_tokens, device=self.device).repeat(self.num_rows, 1)
        kept = torch.full((self.num_rows,), num_tokens, device=self.device)
        kept[::2] -= 1
        positions = kept[:, None] + steps
        self.reset()
        with torch.cuda.device_of(ids):  # where Triton launches; nothing on CPU
            self.forward(ids[:, :num_tokens], steps)
            self.commit(kept)
            hidden, _ = self.forward(ids.gather(1, positions), positions)
            with twins(self.model):
                expected = self.model(ids, use_cache=False).logits
        self.reset()
        expected = expected.gather(1, positions[..., None].expand(-1, -1, expected.shape[-1]))
        return worst_token_difference(self.logits(hidden), expected).item()

    def check_against_module(self) -> None:
        """Refuse a family that needs more than a loop over its layers; rounding adds up over them all.

        Raises:
            CaptureError: with the family and the difference.
        """
        difference, allowed = self.difference_from_module(8), 0.15 if self.dtype == torch.bfloat16 else 0.02
        if not difference <= allowed:
            raise unsupported(
                self.config, f"decoding it over static caches differs by {difference:.1e} (allowed {allowed:.0e})"
            )
