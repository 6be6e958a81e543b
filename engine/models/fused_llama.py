"""The fused forward of Llama, Qwen2 and Qwen3: see fused.py for what it promises."""

from typing import Any

from torch import Tensor

from draftgraph.engine.models.fused import FusedForward, Mixer, Project, Rotary, attend


class FusedLlama(FusedForward):
    def mixer(self, layer: Any) -> Mixer:
        return Attention(layer.self_attn, self.ops, self.eps, self.project)


class Attention:
    """Grouped-query attention; q, k and v in one GEMM. Qwen3 norms the heads of q and k, Qwen2 has biases."""

    def __init__(self, module: Any, ops: Any, eps: float, project: Project):
        self.qkv = project(module.q_proj, module.k_proj, module.v_proj)
        self.out = project(module.o_proj)
        self.head_dim, self.ops, self.eps = module.head_dim, ops, eps
        norms = ("q_norm", "k_norm")
        self.q_norm, self.k_norm = (getattr(module, name).weight if hasattr(module, name) else None for name in norms)

    def __call__(self, x: Any, rotary: Rotary) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv.split(x))
        q = self.ops.norm_rope(q, self.q_norm, *rotary, self.eps)
        k = self.ops.norm_rope(k, self.k_norm, *rotary, self.eps)
        return self.out(attend(q, k, v).flatten(2))
