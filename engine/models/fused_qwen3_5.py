"""The fused forward of Qwen3.5 and Qwen3.6: gated delta layers and gated attention; see fused.py for its promises.

The delta rule takes grouped value heads as they are, its convolution writes q, k and v as the rule reads them, and the
four input projections of a layer are one GEMM. Does not need causal-conv1d.
"""

from typing import Any

from torch import Tensor

from draftgraph.engine.errors import CaptureError
from draftgraph.engine.models.fused import FusedForward, Mixer, Project, Rotary, attend
from draftgraph.kernels import fused as kernels
from draftgraph.kernels.gated_delta import implementation


class FusedQwen35(FusedForward):
    zero_centred = True

    def require_packages(self) -> None:
        require_fla()

    def mixer(self, layer: Any) -> Mixer:
        if hasattr(layer, "self_attn"):
            return GatedAttention(layer.self_attn, self.ops, self.eps, self.project)
        return GatedDelta(layer.linear_attn, self.ops, self.eps, self.project)

    def resolved_ops(self) -> dict[str, str]:
        rule = implementation() if self.ops is kernels else self.ops.gated_delta
        return {**super().resolved_ops(), "gated_delta": f"{rule.__module__}.{rule.__qualname__}"}


def require_fla() -> None:
    try:
        implementation()
    except ImportError as error:
        raise CaptureError(
            f"the fused forward of qwen3_5 and its decoding need fla, which does not import ({error}). Install it (pip "
            'install flash-linear-attention), or train with target.forward = "module" and accept slow PyTorch code by '
            'name: capture.allow_fallback = ["fla"]'
        ) from error


class GatedAttention:
    """Grouped-query attention with normed, partly rotated heads and a sigmoid gate; one input GEMM."""

    def __init__(self, module: Any, ops: Any, eps: float, project: Project):
        # Each head of q_proj is followed by its gate.
        self.qkv = project(module.q_proj, module.k_proj, module.v_proj)
        self.out = project(module.o_proj)
        self.head_dim, self.ops, self.eps = module.head_dim, ops, eps
        self.q_norm, self.k_norm = module.q_norm.weight, module.k_norm.weight

    def __call__(self, x: Any, rotary: Rotary) -> Tensor:
        q_and_gate, k, v = self.qkv.split(x)
        q, gate = q_and_gate.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        q = self.ops.norm_rope(q, self.q_norm, *rotary, self.eps, zero_centred=True)
        k = self.ops.norm_rope(k, self.k_norm, *rotary, self.eps, zero_centred=True)
        return self.out(self.ops.sigmoid_gate(attend(q, k, v), gate))


class GatedDelta:
    """Gated DeltaNet: one input GEMM, convolution with the heads' norm, delta rule, gated norm, output GEMM."""

    def __init__(self, module: Any, ops: Any, eps: float, project: Project):
        self.qkvzba = project(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        self.out = project(module.out_proj)
        self.ops, self.eps = ops, eps
        key_size, value_size = module.key_dim, module.value_dim
        self.sizes = [key_size, key_size, value_size, value_size, module.num_v_heads, module.num_v_heads]
        self.head_sizes = [module.head_k_dim, module.head_k_dim, module.head_v_dim, module.head_v_dim]
        self.conv = module.conv1d.weight.detach().squeeze(1).split(self.sizes[:3])
        self.norm, self.A_log, self.dt_bias = module.norm.weight, module.A_log, module.dt_bias

    def __call__(self, x: Any, rotary: Rotary) -> Tensor:
        *wide, b, a = self.qkvzba(x).split(self.sizes, -1)
        q, k, v, z = (part.unflatten(-1, (-1, size)) for part, size in zip(wide, self.head_sizes, strict=True))
        q, k = (self.ops.causal_conv(part, weight, True) for part, weight in zip((q, k), self.conv[:2], strict=True))
        v = self.ops.causal_conv(v, self.conv[2], False)
        out = self.ops.gated_delta(q, k, v, a, b, self.A_log, self.dt_bias)
        return self.out(self.ops.gated_rms_norm(out, z, self.norm, self.eps))
