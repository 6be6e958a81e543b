"""The output gates of Qwen3.5: an RMS norm with a SiLU gate after a delta rule, a sigmoid gate after attention.

Promises: one launch that reads the gate where it lies in a wider GEMM's output and heads in any order; float32
arithmetic with one rounding at the end, the same bits on every run, no tuning. Does not: differentiate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 4096


@triton.jit
def gate_kernel(
    x, gate, weight, out, S, x_row_stride, x_token_stride, x_head_stride,
    gate_row_stride, gate_token_stride, gate_head_stride, eps,
    C: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    tokens = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)
    inside = (tokens < S)[:, None] & (channels < C)[None, :]
    x += row * x_row_stride + head * x_head_stride
    gate += row * gate_row_stride + head * gate_head_stride
    y = tl.load(x + tokens[:, None] * x_token_stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + tokens[:, None] * gate_token_stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    openness = tl.sigmoid(z)
    if NORMALISE:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / C + eps)[:, None]
        y *= tl.load(weight + channels, mask=channels < C, other=0.0).to(tl.float32)[None, :]
        openness *= z
    address = out + ((row * S + tokens) * tl.num_programs(1) + head)[:, None] * C + channels[None, :]
    tl.store(address, (y * openness).to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head, times weight, times silu(gate).

    Args:
        x, gate: [R, S, H, C], channels adjacent, the rest at any stride; float32 or bfloat16.
        weight: [C].
    Returns:
        [R, S, H*C] contiguous, in x's dtype.
    Stream: the current one of the current device, which is the tensors'.
    Error: 1e-5 of the largest element in float32; bfloat16 within one rounding of the result.
    Cost: reads x and gate once, writes once.
    """
    return launch(x, gate, weight, eps, normalise=True)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate); shapes, stream, error and cost as in `gated_rms_norm`."""
    return launch(x, gate, x, 0.0, normalise=False)


def launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, normalise: bool) -> Tensor:
    R, S, H, C = x.shape
    assert x.shape == gate.shape and x.stride(3) == gate.stride(3) == 1
    out = torch.empty(R, S, H * C, dtype=x.dtype, device=x.device)
    block_c = triton.next_power_of_2(C)
    block_s = max(1, TILE_ELEMENTS // block_c)
    gate_kernel[triton.cdiv(S, block_s), H, R](
        x, gate, weight, out, S, *x.stride()[:3], *gate.stride()[:3], eps,
        C=C, NORMALISE=normalise, BLOCK_S=block_s, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out
