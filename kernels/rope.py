"""Per-head RMS norm and rotary embedding of heads in one kernel, forward and backward.

Promises: float32 arithmetic (norm, weight, rotation) and one rounding at the end, the same bits on every run, no wait
for the device, every output element written, no head looks at another. Rows of the tables are read by position inside
the kernel. Does not tune itself. Why not fla's: its rotary is apart from its norm, so heads pass through memory twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftgraph.kernels.rms_norm import GRADIENT_PROGRAMS

NUM_WARPS = 4


def tile(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Constants of both kernels. A head is three pieces: the two halves that rotate, and the rest that does not."""
    rest = head_dim - rotary_dim
    return {
        "C": head_dim,
        "HALF": rotary_dim // 2,
        "ROWS": max(1, 4096 // triton.next_power_of_2(head_dim)),
        "BLOCK_HALF": triton.next_power_of_2(rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
    }


@triton.jit
def head_places(first, M, token_stride, head_stride, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Heads `first`.. of all tokens: index, token, and where each begins."""
    index = first + tl.arange(0, ROWS)
    token = index // HEADS
    place = token.to(tl.int64) * token_stride + (index % HEADS) * head_stride
    return index, token, place[:, None], (index < M)[:, None]


@triton.jit
def load_factor(weight, column, inside, ZERO_CENTRED: tl.constexpr):
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor += 1.0
    return factor


@triton.jit
def load_angles(cos, sin, positions, token, P, alive, column, inside, HALF: tl.constexpr):
    """cos and sin of the tokens' positions: the first half of a table's row, which its second half repeats."""
    position = tl.load(positions + token % P, mask=alive, other=0).to(tl.int64)[:, None]
    place = position * (2 * HALF) + column
    cosine = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    return cosine, tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_rope_kernel(
    x, weight, cos, sin, positions, out, token_stride, head_stride, M, P, eps,
    ZERO_CENTRED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    index, token, place, alive = head_places(tl.program_id(0) * ROWS, M, token_stride, head_stride, HEADS, ROWS)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = alive & (column < HALF)
    out_place = index.to(tl.int64)[:, None] * C
    left = tl.load(x + place + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + place + HALF + column, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(left * left + right * right, 1)
    if BLOCK_REST > 0:
        rest_column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_inside = alive & (rest_column < C)
        rest = tl.load(x + place + rest_column, mask=rest_inside, other=0.0).to(tl.float32)
        if weight is not None:
            squares += tl.sum(rest * rest, 1)
    if weight is not None:
        scale = tl.rsqrt(squares / C + eps)[:, None]
        left *= scale * load_factor(weight, column, column < HALF, ZERO_CENTRED)
        right *= scale * load_factor(weight, HALF + column, column < HALF, ZERO_CENTRED)
        if BLOCK_REST > 0:
            rest *= scale * load_factor(weight, rest_column, rest_column < C, ZERO_CENTRED)
    cosine, sine = load_angles(cos, sin, positions, token, P, index < M, column, inside, HALF)
    dtype = out.dtype.element_ty
    tl.store(out + out_place + column, (left * cosine - right * sine).to(dtype), mask=inside)
    tl.store(out + out_place + HALF + column, (right * cosine + left * sine).to(dtype), mask=inside)
    if BLOCK_REST > 0:
        tl.store(out + out_place + rest_column, rest.to(dtype), mask=rest_inside)


@triton.jit
def norm_rope_gradient_kernel(
    x, weight, cos, sin, positions, out_grad, x_grad, partial, token_stride, head_stride, grad_token_stride, M, P, eps,
    ZERO_CENTRED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Gradient of x, heads of a token C apart, and per program a partial sum of the weight's gradient."""
    column = tl.arange(0, BLOCK_HALF)[None, :]
    rest_column = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST > 0 else 1)[None, :]
    dtype = x_grad.dtype.element_ty
    if weight is not None:
        left_factor = load_factor(weight, column, column < HALF, ZERO_CENTRED)
        right_factor = load_factor(weight, HALF + column, column < HALF, ZERO_CENTRED)
        left_sum = tl.zeros((ROWS, BLOCK_HALF), tl.float32)
        right_sum = tl.zeros((ROWS, BLOCK_HALF), tl.float32)
        if BLOCK_REST > 0:
            rest_factor = load_factor(weight, rest_column, rest_column < C, ZERO_CENTRED)
            rest_sum = tl.zeros((ROWS, BLOCK_REST), tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        index, token, place, alive = head_places(first, M, token_stride, head_stride, HEADS, ROWS)
        inside = alive & (column < HALF)
        rest_inside = alive & (rest_column < C)
        out_place = index.to(tl.int64)[:, None] * C
        grad_place = token.to(tl.int64)[:, None] * grad_token_stride + (index % HEADS)[:, None] * C
        cosine, sine = load_angles(cos, sin, positions, token, P, index < M, column, inside, HALF)
        left_out = tl.load(out_grad + out_place + column, mask=inside, other=0.0).to(tl.float32)
        right_out = tl.load(out_grad + out_place + HALF + column, mask=inside, other=0.0).to(tl.float32)
        left_grad = left_out * cosine + right_out * sine
        right_grad = right_out * cosine - left_out * sine
        if BLOCK_REST > 0:
            rest_grad = tl.load(out_grad + out_place + rest_column, mask=rest_inside, other=0.0).to(tl.float32)
        if weight is not None:
            left = tl.load(x + place + column, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(x + place + HALF + column, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(left * left + right * right, 1)
            if BLOCK_REST > 0:
                rest = tl.load(x + place + rest_column, mask=rest_inside, other=0.0).to(tl.float32)
                squares += tl.sum(rest * rest, 1)
            scale = tl.rsqrt(squares / C + eps)[:, None]
            left *= scale
            right *= scale
            left_sum += left_grad * left
            right_sum += right_grad * right
            left_grad *= left_factor
            right_grad *= right_factor
            dot = tl.sum(left_grad * left + right_grad * right, 1)
            if BLOCK_REST > 0:
                rest *= scale
                rest_sum += rest_grad * rest
                rest_grad *= rest_factor
                dot += tl.sum(rest_grad * rest, 1)
            mean = (dot / C)[:, None]
            left_grad = (left_grad - left * mean) * scale
            right_grad = (right_grad - right * mean) * scale
            if BLOCK_REST > 0:
                rest_grad = (rest_grad - rest * mean) * scale
        tl.store(x_grad + grad_place + column, left_grad.to(dtype), mask=inside)
        tl.store(x_grad + grad_place + HALF + column, right_grad.to(dtype), mask=inside)
        if BLOCK_REST > 0:
            tl.store(x_grad + grad_place + rest_column, rest_grad.to(dtype), mask=rest_inside)
    if weight is not None:
        address = partial + tl.program_id(0) * C
        tl.store(address + column, tl.sum(left_sum, 0)[None, :], mask=column < HALF)
        tl.store(address + HALF + column, tl.sum(right_sum, 0)[None, :], mask=column < HALF)
        if BLOCK_REST > 0:
            tl.store(address + rest_column, tl.sum(rest_sum, 0)[None, :], mask=rest_column < C)


def norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> Tensor:
    """RMS norm of each head, then rotate-half RoPE over its first rotary dims.

    Args:
        x: [..., heads, C], the last dim contiguous, heads of any stride: a slice of a fused projection is not copied
            (only where the leading dims have no common stride).
        weight: [C], or None for no norm. Its gradient is summed in float32, in a fixed order.
        cos, sin: [num_positions, rotary_dim] contiguous, float32; the second half of a row repeats the first and is not
            read. rotary_dim is even and at most C.
        positions: int32 or int64, a row of the tables per token; its shape is that of x's leading dims or the last few
            of them ([S] for x of [R, S, heads, C]).
        zero_centred: the norm's factor is 1 + weight, added in float32 (Qwen3.5).
    Returns:
        [..., heads, C] contiguous, in x's dtype.
    Error: float32 1e-6 of the largest element; bfloat16 the one rounding at the end, 2^-9 of each element. Hugging Face
        rounds after the norm, cos and sin, and each product: it differs by up to 2^-6 of a head's largest element.
    Cost: reads and writes x once; the backward reads x and the gradient and writes one.
    """
    return _NormRope.apply(x, weight, cos, sin, positions, eps, zero_centred)


def norm_rope_split(
    fused: Tensor,
    num_heads: Sequence[int],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Heads of a fused projection: `norm_rope` of all groups but the last, and the last (the values) as it is.

    Args:
        fused: [..., sum(num_heads) * C] contiguous, the groups side by side.
        num_heads: heads of each group: (H, G, G) for q, k, v; (G, G) for k, v.
        weights: [C] of each group but the last.
        cos, sin, positions, eps: those of `norm_rope`.
    Returns:
        One tensor [..., heads, C] per group, contiguous. All gradients are written into one tensor like `fused`.
    """
    return _NormRopeSplit.apply(fused, tuple(num_heads), cos, sin, positions, eps, *weights)


def as_heads(x: Tensor) -> Tensor:
    """[..., heads, C] as [T, heads, C]: a view where the leading dims have one stride, else a copy."""
    heads = x.reshape(-1, *x.shape[-2:])
    return heads if heads.stride(2) == 1 else heads.contiguous()


def rotate(x: Tensor, weight: Tensor | None, tables: tuple[Tensor, ...], eps: float, zero_centred: bool) -> Tensor:
    """The forward kernel over x [T, heads, C]."""
    cos, sin, positions = tables
    T, H, C = x.shape
    # Tokens count up in the tables' rows from the last dim, so positions of the last few dims repeat.
    assert T % positions.numel() == 0 and cos.is_contiguous() and sin.is_contiguous() and positions.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = tile(C, cos.shape[-1])
    norm_rope_kernel[(triton.cdiv(T * H, sizes["ROWS"]),)](
        x, weight, cos, sin, positions, out, x.stride(0), x.stride(1), T * H, positions.numel(), eps,
        ZERO_CENTRED=zero_centred, HEADS=H, num_warps=NUM_WARPS, **sizes,
    )  # fmt: skip
    return out


def rotate_back(
    x: Tensor,
    weight: Tensor | None,
    tables: tuple[Tensor, ...],
    out_grad: Tensor,
    x_grad: Tensor,
    eps: float,
    zero_centred: bool,
) -> Tensor | None:
    """The backward kernel: writes x_grad [T, heads, C], tokens of any stride; returns the weight's gradient."""
    cos, sin, positions = tables
    T, H, C = x.shape
    sizes = tile(C, cos.shape[-1])
    programs = min(GRADIENT_PROGRAMS, triton.cdiv(T * H, sizes["ROWS"]))
    partial = None if weight is None else torch.empty(programs, C, dtype=torch.float32, device=x.device)
    norm_rope_gradient_kernel[(programs,)](
        x, weight, cos, sin, positions, out_grad.contiguous(), x_grad, partial,
        x.stride(0), x.stride(1), x_grad.stride(0), T * H, positions.numel(), eps,
        ZERO_CENTRED=zero_centred, HEADS=H, num_warps=NUM_WARPS, **sizes,
    )  # fmt: skip
    return None if partial is None else partial.sum(0)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, cos, sin, positions, eps: float, zero_centred: bool):
        assert positions.shape == x.shape[x.dim() - 2 - positions.dim() : -2]
        ctx.save_for_backward(x, weight, cos, sin, positions)
        ctx.rule = (eps, zero_centred)
        return rotate(as_heads(x), weight, (cos, sin, positions), *ctx.rule).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *tables = ctx.saved_tensors
        x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weight_grad = rotate_back(as_heads(x), weight, tuple(tables), out_grad, as_heads(x_grad), *ctx.rule)
        return x_grad, weight_grad, *(None,) * 5


class _NormRopeSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, num_heads: tuple[int, ...], cos, sin, positions, eps: float, *weights: Tensor):
        leading = fused.shape[:-1]
        assert fused.is_contiguous() and positions.shape == leading[len(leading) - positions.dim() :]
        ctx.save_for_backward(fused, cos, sin, positions, *weights)
        ctx.num_heads, ctx.eps = num_heads, eps
        *rotated, values = fused.view(-1, sum(num_heads), weights[0].numel()).split(num_heads, 1)
        tables = (cos, sin, positions)
        groups = [rotate(x, weight, tables, eps, False) for x, weight in zip(rotated, weights, strict=True)]
        return tuple(
            x.view(*leading, *x.shape[1:]) for x in (*groups, values.clone(memory_format=torch.contiguous_format))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *out_grads: Tensor) -> tuple[Tensor | None, ...]:
        fused, cos, sin, positions, *weights = ctx.saved_tensors
        grad = torch.empty_like(fused)
        heads = (-1, sum(ctx.num_heads), weights[0].numel())
        *inputs, _ = fused.view(heads).split(ctx.num_heads, 1)
        *grads, values_grad = grad.view(heads).split(ctx.num_heads, 1)
        weight_grads = [
            rotate_back(x, weight, (cos, sin, positions), out_grad, x_grad, ctx.eps, False)
            for x, weight, out_grad, x_grad in zip(inputs, weights, out_grads[:-1], grads, strict=True)
        ]
        values_grad.copy_(out_grads[-1].view(values_grad.shape))
        return grad, *(None,) * 5, *weight_grads
