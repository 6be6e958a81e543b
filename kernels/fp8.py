"""Products in FP8 (e4m3) with a scale per row: rows quantised in one kernel, alone or behind SwiGLU, and the product.

Promises: float32 arithmetic and one rounding to e4m3, the same bits on every run, no wait for the device, no row looks
at another; a row of zeros stays zeros, a NaN stays in its row. Does not: differentiate. Needs compute capability 8.9;
the norm that quantises is `rms_norm.rms_norm_quantised`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgraph.kernels.reference import E4M3, Quantised
from draftgraph.kernels.rms_norm import LARGEST, SMALLEST, as_rows

BLOCK_N = 4096
NUM_WARPS = 8


@triton.jit
def load_columns(x, start, D, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns of a row in float32; GATED: silu of them times those D further."""
    column = start + tl.arange(0, BLOCK_N)
    value = tl.load(x + column, mask=column < D, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.sigmoid(value) * tl.load(x + D + column, mask=column < D, other=0.0).to(tl.float32)
    return value


@triton.jit
def quantise_rows_kernel(x, values, scales, stride, D, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """One row; read twice, the second time from a cache."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    largest = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, D, BLOCK_N):
        largest = tl.maximum(largest, tl.abs(load_columns(x, start, D, GATED, BLOCK_N)))
    scale = tl.maximum(tl.max(largest, 0), SMALLEST) / LARGEST
    tl.store(scales + row, scale)
    for start in range(0, D, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        value = load_columns(x, start, D, GATED, BLOCK_N) / scale
        tl.store(values + row * D + column, value.to(values.dtype.element_ty), mask=column < D)


def quantise_rows(x: Tensor) -> Quantised:
    """x as e4m3 times a float32 scale per row of the last dim.

    Args:
        x: [..., D], the last dim contiguous; copied where its leading dims have no common stride.
    Error: 2^-4 of each element, or 2^-18 of its row's largest where that is more.
    Cost: reads x once (and from cache again), writes a byte an element.
    """
    return launch(x, x.shape[-1], gated=False)


def swiglu_quantised(gate_up: Tensor) -> Quantised:
    """`quantise_rows` of `swiglu`, which is not rounded in between; arguments as there."""
    return launch(gate_up, gate_up.shape[-1] // 2, gated=True)


def launch(x: Tensor, size: int, gated: bool) -> Quantised:
    rows = as_rows(x)
    values = torch.empty(*x.shape[:-1], size, dtype=E4M3, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = min(BLOCK_N, triton.next_power_of_2(size))
    quantise_rows_kernel[(len(rows),)](
        rows, values, scales, rows.stride(0), size, GATED=gated, BLOCK_N=block, num_warps=NUM_WARPS
    )
    return Quantised(values, scales)


def scaled_linear(x: Quantised, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x times the weight [N, D] transposed, plus the bias, in bfloat16; D and N are multiples of 16.

    Error: that of the two quantisations. Partial sums are kept in the tensor cores' own registers (fast accumulation),
        whose rounding is far below that of e4m3.
    Cost: 2 FLOPs per pair of elements at the FP8 rate.
    """
    assert dtype == torch.bfloat16
    out = torch._scaled_mm(
        x.values.flatten(0, -2),
        weight.values.T,
        scale_a=x.scales.flatten(0, -2),
        scale_b=weight.scales.T,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out.view(*x.values.shape[:-1], -1)
