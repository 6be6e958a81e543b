"""The kernels under one name, as `reference` holds their twins: `ops = fused if x.is_cuda else reference`."""

from draftgraph.kernels.adamw import adamw_
from draftgraph.kernels.anchor_attention import anchor_attention
from draftgraph.kernels.causal_conv import causal_conv
from draftgraph.kernels.fp8 import quantise_rows, scaled_linear, swiglu_quantised
from draftgraph.kernels.gated_delta import gated_delta, gated_delta_from
from draftgraph.kernels.gates import gated_rms_norm, sigmoid_gate
from draftgraph.kernels.rms_norm import add_rms_norm, add_rms_norm_quantised, rms_norm, rms_norm_quantised
from draftgraph.kernels.rope import norm_rope, norm_rope_split
from draftgraph.kernels.swiglu import swiglu

__all__ = [
    "adamw_",
    "add_rms_norm",
    "add_rms_norm_quantised",
    "anchor_attention",
    "causal_conv",
    "gated_delta",
    "gated_delta_from",
    "gated_rms_norm",
    "norm_rope",
    "norm_rope_split",
    "quantise_rows",
    "rms_norm",
    "rms_norm_quantised",
    "scaled_linear",
    "sigmoid_gate",
    "swiglu",
    "swiglu_quantised",
]
