"""RMS norm of rows, alone or behind a residual sum, forward and backward.

Promises: float32 arithmetic and one rounding at the end, the same bits on every run (no atomics, a grid that depends on
shapes alone), no wait for the device, every output element written, no row looks at another. Does not tune itself.
For a product in FP8 the forward can leave e4m3 and a scale per row instead of rounding to x's dtype.
Why not fla's: autotuned by shape, copies strided rows, has no 1 + w. Why not torch's: it does not add the residual.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftgraph.kernels.reference import E4M3, Quantised

# Of e4m3; a row whose largest element is below the second is scaled as if it had that one.
LARGEST: tl.constexpr = tl.constexpr(448.0)
SMALLEST: tl.constexpr = tl.constexpr(1e-12)
# Programs of the backward, each with one partial sum of the weight's gradient: a part of the bits.
GRADIENT_PROGRAMS = 512


def tile(size: int) -> tuple[dict[str, int], int]:
    """Constants of the forward kernel and its warps: at most 32 elements a thread."""
    block_d = triton.next_power_of_2(size)
    return {"ROWS": max(1, 4096 // block_d), "BLOCK_D": block_d}, 4 if block_d <= 4096 else 8


def gradient_tile(size: int, element_size: int) -> tuple[dict[str, int], int]:
    """The same of the backward kernel: 16 elements a thread, and the next rows loaded while these are computed.

    In float32, which is for verification, the next rows of the largest size would not fit sm_120's shared memory.
    """
    block_d = triton.next_power_of_2(size)
    constants = {"ROWS": max(1, 2048 // block_d), "BLOCK_D": block_d, "STAGES": 2 if element_size == 2 else 1}
    return constants, max(4, block_d // 512)


def as_rows(x: Tensor) -> Tensor:
    """[..., D] as [M, D] with one stride between rows: a view where the leading dims have one, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def rms_norm_kernel(
    x, residual, weight, normed, total, scales, x_stride, residual_stride, M, D, eps,
    ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < M) & (column < D)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * D + column, rounded, mask=inside)
        # The norm is that of the sum as it is stored.
        value = rounded.to(tl.float32)
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    value = value * scale[:, None] * factor
    if scales is not None:
        row_scale = tl.maximum(tl.max(tl.abs(value), 1), SMALLEST)[:, None] / LARGEST
        tl.store(scales + row, row_scale, mask=row < M)
        value /= row_scale
    tl.store(normed + row * D + column, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_gradient_kernel(
    x, weight, normed_grad, total_grad, x_grad, partial, x_stride, normed_stride, total_stride, M, D, eps,
    ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and per program a partial sum of the weight's gradient. The scale is computed again, not kept."""
    column = tl.arange(0, BLOCK_D)[None, :]
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor += 1.0
    weight_grad = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < M) & (column < D)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(normed_grad + row * normed_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale
        weight_grad += grad * value
        grad *= factor
        grad = (grad - value * (tl.sum(grad * value, 1) / D)[:, None]) * scale
        if total_grad is not None:
            grad += tl.load(total_grad + row * total_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_grad + row * D + column, grad.to(x_grad.dtype.element_ty), mask=inside)
    address = partial + tl.program_id(0) * D + tl.arange(0, BLOCK_D)
    tl.store(address, tl.sum(weight_grad, 0), mask=tl.arange(0, BLOCK_D) < D)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x: [..., D], D at most 8192, the last dim contiguous; copied where its leading dims have no common stride.
        weight: [D]. Its gradient is summed in float32, in a fixed order.
        zero_centred: the factor is 1 + weight, added in float32 (Qwen3.5).
    Returns:
        [..., D] contiguous, in x's dtype.
    Error: float32 1e-6 of the largest element; bfloat16 the one rounding at the end, 2^-9 of each element. Qwen3's
        module rounds twice (before the weight): it differs by up to 2^-8 of an element from this one.
    Cost: reads and writes x once; the backward reads x and the gradient and writes one.
    """
    return _RMSNorm.apply(x, None, weight, eps, zero_centred)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to x's dtype, and its `rms_norm`, in one pass: (normed, total).

    Args:
        residual: like x; the other arguments are those of `rms_norm`.
    Cost: reads x and the residual, writes two; the backward reads three and writes one, the gradient of both.
    """
    assert x.shape == residual.shape and x.dtype == residual.dtype
    return _RMSNorm.apply(x, residual, weight, eps, zero_centred)


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Quantised:
    """`rms_norm` as e4m3 with a scale per row, not rounded in between; no gradient. Writes half of what that writes."""
    normed, _, scales = launch(x, None, weight, eps, zero_centred, quantise=True)
    return Quantised(normed, scales)


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Quantised, Tensor]:
    """`add_rms_norm` with its norm as in `rms_norm_quantised`."""
    normed, total, scales = launch(x, residual, weight, eps, zero_centred, quantise=True)
    return Quantised(normed, scales), total


def launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centred: bool, quantise: bool = False
) -> tuple[Tensor, Any, Any]:
    """(normed, total or None, scales or None)."""
    rows = as_rows(x)
    M, D = rows.shape
    assert weight.shape == (D,) and D <= 8192
    normed = torch.empty(x.shape, dtype=E4M3 if quantise else x.dtype, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device) if quantise else None
    total = other = None
    if residual is not None:
        total, other = torch.empty(x.shape, dtype=x.dtype, device=x.device), as_rows(residual)
    constants, num_warps = tile(D)
    rms_norm_kernel[(triton.cdiv(M, constants["ROWS"]),)](
        rows, other, weight, normed, total, scales,
        rows.stride(0), 0 if other is None else other.stride(0), M, D, eps,
        ZERO_CENTRED=zero_centred, num_warps=num_warps, **constants,
    )  # fmt: skip
    return normed, total, scales


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centred: bool) -> Any:
        normed, total, _ = launch(x, residual, weight, eps, zero_centred)
        ctx.save_for_backward(x if total is None else total, weight)
        ctx.eps, ctx.zero_centred, ctx.added = eps, zero_centred, total is not None
        ctx.set_materialize_grads(False)
        return normed if total is None else (normed, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, normed_grad: Tensor | None, total_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if normed_grad is None:
            return total_grad, total_grad, None, None, None
        x, weight = ctx.saved_tensors
        rows, grad = as_rows(x), as_rows(normed_grad)
        other = None if total_grad is None else as_rows(total_grad)
        M, D = rows.shape
        constants, num_warps = gradient_tile(D, x.element_size())
        programs = min(GRADIENT_PROGRAMS, triton.cdiv(M, constants["ROWS"]))
        x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.empty(programs, D, dtype=torch.float32, device=x.device)
        rms_norm_gradient_kernel[(programs,)](
            rows, weight, grad, other, x_grad, partial,
            rows.stride(0), grad.stride(0), 0 if other is None else other.stride(0), M, D, ctx.eps,
            ZERO_CENTRED=ctx.zero_centred, num_warps=num_warps, **constants,
        )  # fmt: skip
        return x_grad, x_grad if ctx.added else None, partial.sum(0), None, None
