"""Tiny targets whose answers wander, and the shape of a drafter for them: what tests of decoding share."""

import torch
import transformers
from torch import Tensor

from draftgraph.engine.models.drafter import DrafterShape
from draftgraph.engine.models.ops import choose_ops_by_device

VOCAB, HIDDEN, TAPS, PROMPT = 32, 32, (0, 2), 7
NO_STOP: frozenset[int] = frozenset()


def tiny_target(family: str, tied: bool = False) -> torch.nn.Module:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
    }
    if family == "qwen3_5_text":  # three GatedDeltaNet layers, then one of attention
        sizes |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
    if family == "gemma3_text":  # a window shorter than prompt and answer
        sizes |= {"sliding_window": 12, "eos_token_id": None}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    choose_ops_by_device(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "lm_head" not in name:
            parameter.normal_(0, 0.3)  # answers that wander, where the usual 0.02 repeats one token
    torch.nn.init.orthogonal_(model.get_output_embeddings().weight)
    return model


def tiny_shape(block_size: int) -> DrafterShape:
    return DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        vocab_size=VOCAB,
        mask_token_id=VOCAB - 1,
        target_layer_ids=TAPS,
        num_target_layers=4,
        layer_types=("full_attention",),
        sliding_window=None,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
    )


def prompt() -> Tensor:
    return torch.randint(VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
