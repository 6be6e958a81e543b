"""Plain-PyTorch twins of the kernels: the truth that tests compare with, and the path that runs without a GPU.

A twin has the name and the signature of its kernel. It is differentiated by autograd, never waits for the device and
never lets data choose a shape, so it can be captured as well. It does not try to be lean: score matrices are dense.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

E4M3 = torch.float8_e4m3fn


class Quantised(NamedTuple):
    """A tensor as `values * scales`."""

    values: Tensor  # [..., D] float8_e4m3fn
    scales: Tensor  # [..., 1] float32


def anchor_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchor_positions: Tensor,
    anchor_valid: Tensor,
    window: int | None,
    scale: float,
    rule: str = "served",
) -> Tensor:
    """Attend from every draft block to the context before its anchor and to the block itself.

    Args:
        q: [R, A, K, H, C], the queries of the draft blocks.
        context_k, context_v: [R, S, G, C], H a multiple of G. Positions at or after a row's last anchor are never used.
        block_k, block_v: [R, A, K, G, C], the draft blocks' own keys and values.
        anchor_positions: [R, A] int32, ascending among the valid ones, which come first.
        anchor_valid: [R, A] bool. False in pad slots.
        window: None for a full layer: context kv < a, and the whole block. W for a sliding layer: context kv < a within
            what `rule` says, and the block up to and including slot k.
        scale: factor on q.k before the softmax.
        rule: of sliding layers. "served", as engines run it: kv >= a + k - (W - 1). "speculators": kv >= a - W for
            every slot. "bidirectional": the same, and all of the block.
    Returns:
        [R, A, K, H, C] in q's dtype. Zero in invalid blocks, and so are all gradients from and to them.
    Source: the block mask of the DFlash paper; softmax in float32 (float64 for float64 inputs).
    """
    R, A, K, H, C = q.shape
    S, G = context_k.shape[1:3]
    M = H // G  # query heads per kv head
    compute = torch.promote_types(q.dtype, torch.float32)
    valid = anchor_valid.view(R, A, 1, 1, 1)
    anchors = torch.where(anchor_valid, anchor_positions, 0)

    # Pads may hold anything, NaN included. A zero probability does not hide a NaN value, nor a zero gradient a NaN key:
    # they are replaced before the first product.
    kv = torch.arange(S, device=q.device)
    reachable = (kv < anchors.amax(dim=1, keepdim=True)).view(R, S, 1, 1)
    query = torch.where(valid, q, 0).to(compute).view(R, A, K, G, M, C).permute(0, 3, 1, 2, 4, 5)  # [R, G, A, K, M, C]
    context_k = torch.where(reachable, context_k, 0).to(compute).transpose(1, 2)  # [R, G, S, C]
    context_v = torch.where(reachable, context_v, 0).to(compute).transpose(1, 2)
    block_k = torch.where(valid, block_k, 0).to(compute).permute(0, 3, 1, 2, 4)  # [R, G, A, K, C]
    block_v = torch.where(valid, block_v, 0).to(compute).permute(0, 3, 1, 2, 4)

    slot = torch.arange(K, device=q.device)
    hidden = kv >= anchors.view(R, A, 1, 1)  # [R, A, 1, S], for a sliding layer [R, A, K, S]
    query = query * scale
    context_scores = (query.reshape(R, G, A * K * M, C) @ context_k.transpose(-1, -2)).view(R, G, A, K, M, S)
    block_scores = (query.reshape(R, G, A, K * M, C) @ block_k.transpose(-1, -2)).view(R, G, A, K, M, K)
    if window is not None:
        reach = slot - (window - 1) if rule == "served" else -window
        hidden = hidden | (kv < (anchors.view(R, A, 1) + reach).unsqueeze(-1))
    if window is not None and rule != "bidirectional":
        block_scores.masked_fill_((slot > slot.view(K, 1)).view(K, 1, K), float("-inf"))
    context_scores.masked_fill_(hidden.view(R, 1, A, -1, 1, S), float("-inf"))

    # An invalid block attends to its own zeros: no softmax is ever empty.
    probability = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1)
    from_context, from_block = probability.split([S, K], dim=-1)
    out = (from_context.reshape(R, G, A * K * M, S) @ context_v).view(R, G, A, K * M, C)
    out = out + from_block.reshape(R, G, A, K * M, K) @ block_v
    out = out.view(R, G, A, K, M, C).permute(0, 2, 3, 1, 4, 5).reshape(R, A, K, H, C)
    return torch.where(valid, out, 0).to(q.dtype)


def softmax_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, log of the sum of exponentials, and argmax of every row; see cross_entropy.softmax_statistics."""
    log_sum = torch.logsumexp(logits.float(), -1)
    return log_sum - logits.gather(1, labels[:, None])[:, 0].float(), log_sum, logits.argmax(-1)


def softmax_gradient_(logits: Tensor, labels: Tensor, log_sum: Tensor, weights: Tensor) -> None:
    """Overwrite the logits with the gradient of sum(weights * cross_entropy); see cross_entropy.softmax_gradient_."""
    gradient = (logits.float() - log_sum[:, None]).exp_().mul_(weights[:, None])
    gradient.scatter_add_(1, labels[:, None], -weights[:, None])
    logits.copy_(torch.where((weights == 0)[:, None], 0.0, gradient))


def cross_entropy_gradient_(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and argmax of every row, the logits overwritten; see cross_entropy.cross_entropy_gradient_."""
    cross_entropy, log_sum, best = softmax_statistics(logits, labels)
    softmax_gradient_(logits, labels, log_sum, weights)
    return cross_entropy, best


def divergence_gradient_(logits: Tensor, others: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence from the others' distribution, the logits overwritten; see cross_entropy.divergence_gradient_."""
    best, other_best = logits.argmax(-1), others.argmax(-1)
    q, p = logits.float().log_softmax(-1), others.float().log_softmax(-1)
    share = p.exp()
    divergence = (share * (p - q)).sum(-1)
    logits.copy_(torch.where((weights == 0)[:, None], 0.0, (q.exp() - share) * weights[:, None]))
    return divergence, best, other_best


def adamw_(
    grads: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    values: Tensor | None,
    lr: Tensor,
    step: Tensor,
    grad_scale: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW in place, the gradient left zero; see adamw.adamw_. Torch's fused step: one pass on a CPU."""
    adamw(
        [master],
        [grads],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        fused=True,
        grad_scale=grad_scale,
        found_inf=skip,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if values is not None:
        values.copy_(master)
    grads.zero_()


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; see rms_norm.rms_norm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = weight.to(wide.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + factor if zero_centred else factor)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """(normed, total) of total = x + residual; see rms_norm.add_rms_norm."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centred), total


def norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> Tensor:
    """RMS norm of each head, then rotate-half RoPE over its first rotary dims; see rope.norm_rope."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        wide = rms_norm(wide, weight, eps, zero_centred)
    rotary_dim = cos.shape[-1]
    cosine, sine = (table[positions.long(), : rotary_dim // 2].unsqueeze(-2) for table in (cos, sin))
    left, right, rest = wide.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine, rest], -1).to(x.dtype)


def norm_rope_split(
    fused: Tensor,
    num_heads: Sequence[int],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """`norm_rope` of all groups of heads but the last, and the last as it is; see rope.norm_rope_split."""
    *rotated, values = fused.unflatten(-1, (sum(num_heads), -1)).split(tuple(num_heads), -2)
    groups = [norm_rope(x, weight, cos, sin, positions, eps) for x, weight in zip(rotated, weights, strict=True)]
    return *groups, values


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see swiglu.swiglu."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def quantise_rows(x: Tensor) -> Quantised:
    """x as e4m3 times a float32 scale per row; see fp8.quantise_rows."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(E4M3).max
    return Quantised((wide / scales).to(E4M3), scales)


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Quantised:
    """`rms_norm`, quantised; see rms_norm.rms_norm_quantised."""
    return quantise_rows(rms_norm(x.float(), weight, eps, zero_centred))


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Quantised, Tensor]:
    """`add_rms_norm`, its norm quantised; see rms_norm.add_rms_norm_quantised."""
    total = x + residual
    return rms_norm_quantised(total, weight, eps, zero_centred), total


def swiglu_quantised(gate_up: Tensor) -> Quantised:
    """`swiglu`, quantised; see fp8.swiglu_quantised."""
    return quantise_rows(swiglu(gate_up.float()))


def scaled_linear(x: Quantised, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x times the weight transposed, plus the bias, in `dtype`; see fp8.scaled_linear."""
    out = F.linear(x.values.float(), weight.values.float()) * x.scales * weight.scales[:, 0]
    return (out if bias is None else out + bias).to(dtype)


def causal_conv(x: Tensor, weight: Tensor, normalise: bool) -> Tensor:
    """Convolve every channel with its own past, apply SiLU, bring heads to length 1; see causal_conv.causal_conv."""
    R, S, H, C = x.shape
    compute = torch.promote_types(x.dtype, torch.float32)
    channels = x.flatten(2).transpose(1, 2).to(compute)
    width = weight.shape[1]
    y = F.silu(F.conv1d(channels, weight.to(compute)[:, None], padding=width - 1, groups=H * C)[..., :S])
    y = y.transpose(1, 2).view(R, S, H, C)
    if normalise:
        y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
    return y.to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head, times weight, times silu(gate); see gates.gated_rms_norm."""
    compute = torch.promote_types(x.dtype, torch.float32)
    y = x.to(compute)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(compute)
    return (y * F.silu(gate.to(compute))).flatten(2).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), heads joined; see gates.sigmoid_gate."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return (x.to(compute) * gate.to(compute).sigmoid()).flatten(2).to(x.dtype)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The gated delta rule, 64 tokens at a time; see gated_delta.gated_delta.

    Within a chunk each token's correction depends on those before it: (I + L) corrections = beta * (v - what the memory
    held), with L[i, j] = beta_i * (k_i . k_j) * decay from j to i, strictly lower triangular.
    Source: the chunked form of the Gated DeltaNet paper (arXiv 2412.06464).
    """
    S, (HV, CV), group = q.shape[1], v.shape[2:], v.shape[2] // q.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    chunk, dtype = 64, q.dtype
    log_decay = -A_log.to(compute).exp() * F.softplus(a.to(compute) + dt_bias.to(compute))

    def chunked(x: Tensor) -> Tensor:
        """[R, S, HV, ...] as [R, HV, chunks, 64, ...], zeros after the last token."""
        x = F.pad(x.to(compute).transpose(1, 2), (0, 0, 0, -S % chunk))
        return x.unflatten(2, (-1, chunk))

    q, k = (chunked(x.repeat_interleave(group, 2)) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, beta, log_decay = chunked(v), chunked(b.to(compute).sigmoid()[..., None]), chunked(log_decay[..., None])
    since_start = log_decay.cumsum(3)
    pairs = (since_start - since_start.transpose(3, 4)).tril().exp().tril()  # [..., i, j]: decay from j to i
    lower = (beta * (k @ k.transpose(3, 4)) * pairs).tril(-1)
    written, expected = torch.linalg.solve_triangular(
        lower, torch.cat([beta * v, beta * since_start.exp() * k], -1), upper=False, unitriangular=True
    ).split([CV, k.shape[-1]], -1)
    scores = (q @ k.transpose(3, 4)) * pairs
    read, keep = q * since_start.exp(), since_start[..., -1:, :]
    carried = k * (keep - since_start).exp()
    memory = q.new_zeros(q.shape[0], HV, q.shape[-1], CV)
    out = torch.empty_like(v)
    for n in range(v.shape[2]):
        correction = written[:, :, n] - expected[:, :, n] @ memory
        out[:, :, n] = read[:, :, n] @ memory + scores[:, :, n] @ correction
        memory = memory * keep[:, :, n].exp() + carried[:, :, n].transpose(2, 3) @ correction
    return out.flatten(2, 3)[:, :, :S].transpose(1, 2).contiguous().to(dtype)


def gated_delta_from(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule token by token from a memory; see gated_delta.gated_delta_from."""
    group, dtype = v.shape[2] // q.shape[2], q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    q, k = (x.to(compute) * torch.rsqrt(x.to(compute).square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, 2)[..., None] for x in (q * q.shape[-1] ** -0.5, k))
    out = []
    for t in range(v.shape[1]):
        memory = memory * log_decay[:, t, :, None, None].exp()
        held = (memory * k[:, t]).sum(-2)
        memory = memory + k[:, t] * (strength[:, t, :, None] * (v[:, t] - held))[..., None, :]
        out.append((memory * q[:, t]).sum(-2))
    return torch.stack(out, 1).to(dtype), memory
