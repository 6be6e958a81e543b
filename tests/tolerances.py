"""How far a kernel may be from its PyTorch twin in float32: the one table."""

import torch

# Largest |difference| over the largest |element| of the truth, per output and per gradient, for float32 inputs and for
# bfloat16 ones. One rounding of a bfloat16 is 2^-9 = 2e-3; None: the kernel takes no float32.
TOLERANCE: dict[str, dict[torch.dtype, float | None]] = {
    name: {torch.float32: single, torch.bfloat16: half}
    for name, single, half in (
        ("anchor_attention", 1e-4, 2e-2),
        ("rms_norm", 1e-5, 4e-3),
        ("add_rms_norm", 1e-5, 4e-3),
        ("norm_rope", 1e-5, 4e-3),
        ("norm_rope_split", 1e-5, 4e-3),
        ("swiglu", 1e-5, 4e-3),
        ("causal_conv", 1e-5, 4e-3),
        ("gated_rms_norm", 1e-5, 4e-3),
        ("sigmoid_gate", 1e-5, 4e-3),
        ("gated_delta", None, 2e-2),
        ("cross_entropy_gradient_", 1e-5, 4e-3),
        # Of e4m3, whose rounding is 2^-4: against the twin that rounds as well.
        ("scaled_linear", None, 5e-3),
    )
}
