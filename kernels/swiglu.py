"""SwiGLU over a fused gate-up projection, forward and backward.

Promises: float32 arithmetic and one rounding at the end, the same bits on every run, no wait for the device, every
output element written, rows of any stride. Does not: make the projection.
Why not fla's: it takes gate and up apart and contiguous, so a fused projection would be copied, and it is autotuned.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftgraph.kernels.rms_norm import as_rows

BLOCK_F = 1024
NUM_WARPS = 4


@triton.jit
def swiglu_kernel(gate_up, out, stride, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < F
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(gate_up, out_grad, grad, stride, out_stride, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < F
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(out_grad + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    gate_grad = dout * up * share * (1.0 + gate * (1.0 - share))
    address = grad + row * (2 * F) + column
    tl.store(address, gate_grad.to(grad.dtype.element_ty), mask=inside)
    tl.store(address + F, (dout * gate * share).to(grad.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [..., 2F], gate first, the last dim contiguous; copied where its leading dims have no common stride.
    Returns:
        [..., F] contiguous, in its dtype.
    Error: float32 1e-6 of the largest element; bfloat16 the one rounding at the end, 2^-9 of each element. Hugging Face
        modules round silu(gate) first: they differ by up to 2^-8 of an element from this one.
    Cost: reads 2F, writes F; the backward reads 3F and writes 2F.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = as_rows(gate_up)
        M, F = rows.shape[0], rows.shape[1] // 2
        out = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
        grid = (M, triton.cdiv(F, BLOCK_F))
        swiglu_kernel[grid](rows, out, rows.stride(0), F, BLOCK_F=BLOCK_F, num_warps=NUM_WARPS)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, dout = as_rows(gate_up), as_rows(out_grad)
        M, F = dout.shape
        grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        swiglu_gradient_kernel[(M, triton.cdiv(F, BLOCK_F))](
            rows, dout, grad, rows.stride(0), dout.stride(0), F, BLOCK_F=BLOCK_F, num_warps=NUM_WARPS
        )
        return grad
