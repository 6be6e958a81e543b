"""Targets that the CPU and the GPU tests of fused forwards share: families, and weights that make every part matter."""

import pytest
import torch
from tiny import VOCAB, write_target

from draftgraph.engine.models.target import load_model

SCALED_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Name: (family, what differs from the sizes of `write_target`).
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama, biases and scaled rotary": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "rope_parameters": SCALED_ROTARY},
    ),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3_5, HV = 2H": ("qwen3_5_text", {}),
    "qwen3_5, HV = H": ("qwen3_5_text", {"linear_num_value_heads": 2, "num_key_value_heads": 4}),
}

TAPS = (1, 4)
EVERY_CASE = pytest.mark.parametrize("case", list(CASES))


def token_ids(rows, num_context, seed=0):
    return torch.randint(VOCAB, (rows, num_context), generator=torch.Generator().manual_seed(seed))


def extract(target, ids):
    taps = torch.full((*ids.shape, len(TAPS) * 32), float("nan"))
    target.extract(ids, taps)
    return taps


def make_model(tmp_path, case, dtype, device, **sizes):
    """A random target whose norms, biases and attention are far from trivial."""
    family, extra = CASES[case]
    model = load_model(write_target(tmp_path, family, **{**extra, **sizes}), dtype, device)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(device, dtype)
        if parameter.dim() == 1:
            parameter.add_(0.2 * noise)
        elif "embed" not in name:
            parameter.copy_(noise / parameter.shape[1] ** 0.5 if "conv" not in name else noise / 2)
    return model
