"""What a decoder's layers are called with: rotary tables and masks, made once and sliced by every bucket.

Promises: no step makes a mask, so a family takes the same attention kernels eager and captured; a sliding layer sees
kv > q - window, as in transformers. Full layers of SDPA families get no mask at all: SDPA's own causal path is faster.
Does not do: padding masks (rows are right-padded and every layer is causal), other layers than attention and
GatedDeltaNet, tables that change with the length of a row.
Memory, with C the largest context: C*C bytes for the band, where a window is shorter than C (64 MiB at 8192). Families
without SDPA (soft-capped scores, sinks) need every mask added to the scores: C*C elements each, full and band.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from draftgraph.engine.errors import CaptureError

# Any other family that is the same loop passes the check too; these are tested.
TESTED = (
    "llama, mistral, phi3, olmo2, starcoder2, qwen2, qwen3, qwen3_5, gemma2, gemma3, and the mixtures of experts "
    "qwen3_moe, qwen3_5_moe, gpt_oss"
)
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


def unsupported(config: Any, reason: str) -> CaptureError:
    """The one refusal of a family, by its name."""
    return CaptureError(f"target family {config.model_type!r} is not supported: {reason}. Tested families: {TESTED}")


def require_layer_loop(decoder: Any) -> None:
    """Refuse a decoder that is not an embedding, rotary tables and a list of layers.

    Raises:
        CaptureError: with the family and what it lacks.
    """
    missing = [name for name in ("embed_tokens", "rotary_emb", "layers") if not hasattr(decoder, name)]
    if missing:
        raise unsupported(decoder.config, f"its decoder has no {', '.join(missing)}")
    unknown = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if unknown:
        raise unsupported(decoder.config, f"it has layers of type {', '.join(unknown)}")


def num_experts(config: Any) -> int:
    """How many experts a layer routes to; 0 for dense families, whichever name the family gives the number."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((number for name in names if (number := getattr(config, name, None))), 0)


class LayerInputs:
    """The arguments of every layer of one decoder, for any context up to the largest.

    Args:
        decoder: text decoder of transformers, on its device.
        max_context: C, tokens.
        dtype: of the hidden states.
    Raises:
        CaptureError: the decoder is not a loop over its layers.
    Owns: tables and masks, [1, C, ...]; what `of` returns are views of them.
    """

    def __init__(self, decoder: Any, max_context: int, dtype: torch.dtype):
        require_layer_loop(decoder)
        config, device = decoder.config, decoder.embed_tokens.weight.device
        self.window: int = getattr(config, "sliding_window", None) or 0
        # A family that does not say which layers slide lets all of them.
        everywhere = "sliding_attention" if self.window else "full_attention"
        self.layer_types = getattr(config, "layer_types", None) or [everywhere] * len(decoder.layers)
        self.slides = 0 < self.window < max_context and "sliding_attention" in self.layer_types
        self.rope = rotary_tables(decoder.rotary_emb, set(self.layer_types), max_context, dtype, device)
        additive = dtype if config._attn_implementation == "eager" else None
        self.causal = None if additive is None else band(max_context, max_context, additive, device)
        self.band = band(max_context, self.window, additive, device) if self.slides else None

    def of(self, layer: int, num_context: int) -> dict[str, Any]:
        """The keyword arguments of layer `layer` for rows of `num_context` tokens."""
        kind = self.layer_types[layer]
        mask = None if kind == "linear_attention" else self.causal
        # A window that holds the whole row hides nothing.
        if kind == "sliding_attention" and self.slides and num_context > self.window:
            mask = self.band
        cos, sin = self.rope[kind]
        return {
            "attention_mask": None if mask is None else mask[:, :, :num_context, :num_context],
            "position_embeddings": (cos[:, :num_context], sin[:, :num_context]),
            "use_cache": False,
        }


def rotary_tables(
    rotary: Any, layer_types: set[str], max_context: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, [1, C, ...], per type of layer; one pair for all where the family rotates all layers alike."""
    positions = torch.arange(max_context, device=device)[None]
    if hasattr(rotary, "mrope_section"):
        positions = positions.expand(3, 1, -1)  # M-RoPE of text: the same position on all three axes
    example = torch.empty(1, 1, 1, dtype=dtype, device=device)

    def table(*layer_type: str) -> tuple[Tensor, Tensor]:
        # NOTE: contiguous copies, so that the views of a shorter context keep one address for all buckets.
        cos, sin = rotary(example, positions, *layer_type)
        return cos.contiguous(), sin.contiguous()

    with torch.no_grad():
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            return {layer_type: table(layer_type) for layer_type in layer_types}
        return dict.fromkeys(layer_types, table())


def band(max_context: int, window: int, additive: torch.dtype | None, device: torch.device) -> Tensor:
    """[1, 1, C, C]: may query q see key kv, causal and at most window - 1 back; as bool, or to be added to scores."""
    seen = torch.ones(max_context, max_context, dtype=torch.bool, device=device).tril_().triu_(1 - window)[None, None]
    if additive is None:
        return seen
    return torch.zeros_like(seen, dtype=additive).masked_fill_(~seen, torch.finfo(additive).min)
