"""config.json of an exported drafter, in the two forms that inference engines read.

The tensors are the same in both. speculators counts a layer's output by the index that `hidden_states` has in
transformers, where 0 is the embedding: its layer ids are z-lab's plus one.
"""

from typing import Any

import torch

from draftgraph.engine.models.drafter import DrafterShape

# The release whose loader our export was checked with (tests/peers).
SPECULATORS_VERSION = "0.9.0"


def qwen3_config(shape: DrafterShape, target_config: Any) -> dict[str, Any]:
    """The drafter as the Qwen3 decoder that both forms build its layers from."""
    return {
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "use_sliding_window": "sliding_attention" in shape.layer_types,
        "max_window_layers": shape.num_layers,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
    }


def zlab_config(shape: DrafterShape, target_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """z-lab's form; several facts stand in it twice because its readers look in different places."""
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
        "num_target_layers": shape.num_target_layers,
        **qwen3_config(shape, target_config),
        **dtype_names(dtype),
    }


def speculators_config(shape: DrafterShape, target_config: Any, dtype: torch.dtype, target: str) -> dict[str, Any]:
    """The form of the speculators library.

    Args:
        target: a hub name or a folder; its loader takes the embedding, the lm_head and the final norm from there.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": getattr(target_config, "architectures", None) or []},
        },
        "transformer_layer_config": qwen3_config(shape, target_config),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sliding_window_non_causal": shape.sliding_rule == "bidirectional",
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        **dtype_names(dtype),
    }


def dtype_names(dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}
