"""The short causal convolution before a gated delta rule, with SiLU and, for queries and keys, the norm of each head.

Promises: one launch that reads a slice of a wider GEMM's output where it lies and writes what the delta rule takes;
float32 arithmetic with one rounding at the end, the same bits on every run, no tuning. Does not: differentiate, take a
bias, or carry a state from one call to the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_EPS = 1e-6  # fla's and transformers'
TILE_ELEMENTS = 4096


@triton.jit
def causal_conv_kernel(
    x, weight, out, S, x_row_stride, x_token_stride, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    tokens = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)
    inside = (channels < C)[None, :]
    x += row * x_row_stride + head * C
    weight += head * C * WIDTH
    total = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for tap in tl.static_range(WIDTH):
        source = tokens + (tap - WIDTH + 1)
        seen = ((source >= 0) & (source < S))[:, None] & inside
        value = tl.load(x + source[:, None] * x_token_stride + channels[None, :], mask=seen, other=0.0).to(tl.float32)
        factor = tl.load(weight + channels * WIDTH + tap, mask=channels < C, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    y = total * tl.sigmoid(total)
    if NORMALISE:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
    address = out + ((row * S + tokens) * tl.num_programs(1) + head)[:, None] * C + channels[None, :]
    tl.store(address, y.to(out.dtype.element_ty), mask=(tokens < S)[:, None] & inside)


def causal_conv(x: Tensor, weight: Tensor, normalise: bool) -> Tensor:
    """Convolve every channel with its own past, apply SiLU, and bring heads to length 1 if `normalise`.

    Args:
        x: [R, S, H, C], heads and channels adjacent, rows and tokens at any stride; float32 or bfloat16.
        weight: [H*C, W] contiguous; the last of the W columns belongs to the token itself.
        normalise: divide each head by sqrt(sum of squares + 1e-6).
    Returns:
        [R, S, H, C] contiguous, in x's dtype. Tokens before a row's first are zero.
    Stream: the current one of the current device, which is the tensors'.
    Error: 1e-5 of the largest element in float32; bfloat16 within one rounding of the result.
    Cost: reads x once from memory (W times from the caches) and writes it once.
    """
    R, S, H, C = x.shape
    assert x.stride(3) == 1 and (H == 1 or x.stride(2) == C) and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_c = triton.next_power_of_2(C)
    block_s = max(1, TILE_ELEMENTS // block_c)
    causal_conv_kernel[triton.cdiv(S, block_s), H, R](
        x, weight, out, S, x.stride(0), x.stride(1), NORM_EPS,
        C=C, WIDTH=weight.shape[1], NORMALISE=normalise, BLOCK_S=block_s, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out
