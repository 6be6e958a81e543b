"""The weights of a target: how many bytes a run keeps of them."""

from typing import Any


def weight_bytes(decoder: Any, last_layer: int, element_size: int, precision: str) -> int:
    """Bytes of what a run keeps of a target: its layers up to the last tap, its embedding and its lm_head."""
    config, layers = decoder.config, decoder.layers[: last_layer + 1]
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() > 1)
    others = sum(p.numel() for p in layers.parameters() if p.dim() == 1)
    heads = 1 if getattr(config, "tie_word_embeddings", False) else 2
    kept = others + heads * config.vocab_size * config.hidden_size
    return matrices * (1 if precision == "fp8" else element_size) + kept * element_size
