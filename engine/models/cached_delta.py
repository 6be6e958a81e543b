"""One gated delta layer of Qwen3.5 with its two states, over a few tokens at a time; some of which may be taken back.

Promises: a forward reads the states and does not write them; `commit` runs the rule alone once more over the same
tokens, those that are not kept with a decay of one and nothing written: fixed shapes, no product of the layer again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftgraph.kernels import fused, reference


class CachedDelta:
    """The `linear_attn` module of a layer. Owns: convolution [R, channels, W-1] and memory [R, HV, C, CV] float32."""

    def __init__(self, module: Any, num_rows: int, dtype: torch.dtype, device: torch.device):
        self.module = module
        self.ops: Any = fused if device.type == "cuda" else reference
        channels, _, width = module.conv1d.weight.shape
        self.taps = torch.arange(width - 1, device=device)
        self.convolution = torch.zeros(num_rows, channels, width - 1, dtype=dtype, device=device)
        memory = (num_rows, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        self.memory = torch.zeros(memory, dtype=torch.float32, device=device)
        self.fed: Tensor  # [R, channels, W-1 + n], what the convolution of the last forward read
        self.written: tuple[Tensor, ...]  # q, k, v, log decay, write strength of the last forward

    def forward(self, x: Tensor) -> Tensor:
        """[R, n, D] after the input norm, to what is added to the residual stream."""
        module, (R, n) = self.module, x.shape[:2]
        self.fed = torch.cat([self.convolution, module.in_proj_qkv(x).transpose(1, 2)], -1)
        weight = module.conv1d.weight.float()
        mixed = sum(self.fed[..., j : j + n].float() * weight[..., j] for j in range(weight.shape[-1]))
        mixed = F.silu(mixed).to(x.dtype).transpose(1, 2)
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        q, k = (part.reshape(R, n, module.num_k_heads, module.head_k_dim) for part in (q, k))
        v = v.reshape(R, n, module.num_v_heads, module.head_v_dim)
        strength = module.in_proj_b(x).float().sigmoid()
        log_decay = -module.A_log.float().exp() * F.softplus(module.in_proj_a(x).float() + module.dt_bias)
        self.written = (q, k, v, log_decay, strength)
        out, _ = self.ops.gated_delta_from(*self.written, self.memory)
        z = module.in_proj_z(x).reshape(-1, module.head_v_dim)
        return module.out_proj(module.norm(out.reshape(-1, module.head_v_dim), z).reshape(R, n, -1))

    def commit(self, num_kept: Tensor) -> None:
        """Bring both states over the first num_kept [R] tokens of the last forward, once."""
        q, k, v, log_decay, strength = self.written
        kept = (torch.arange(q.shape[1], device=q.device) < num_kept[:, None])[..., None]
        _, memory = self.ops.gated_delta_from(q, k, v, log_decay * kept, strength * kept, self.memory)
        self.memory.copy_(memory)
        index = (num_kept[:, None] + self.taps)[:, None].expand(self.convolution.shape)
        self.convolution.copy_(self.fed.gather(2, index))
        # A graph's pool would hold them for every layer until the layer's next forward.
        del self.fed, self.written
