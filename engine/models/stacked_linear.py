"""Several linear layers of one input as one product, their parameters apart under their own names.

Promises: one GEMM forward and two backward, whatever the number of weights; nothing is copied where the weights lie
below each other in memory, as `FlatParameters` lays out parameters that are registered one after the other; elsewhere
they are copied together at each call. Where the weights' gradients lie so too, their product adds to them itself: what
autograd would round to bfloat16, cast and add again in two more passes is added once, in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def stacked_linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x times each weight [rows, D] transposed: [..., sum of rows]."""
    return _StackedLinear.apply(x, *weights)


def stack(weights: tuple[Tensor, ...]) -> Tensor:
    """The weights [rows, D] below each other: a view of memory where they lie so, else a copy."""
    view = adjacent(weights)
    return torch.cat(weights) if view is None else view


def adjacent(tensors: tuple[Tensor, ...]) -> Tensor | None:
    """A view of tensors [rows, D] that lie below each other in memory, else None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    return first.as_strided((sum(len(tensor) for tensor in tensors), first.shape[1]), first.stride())


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights = weights  # NOTE: themselves: a checkpointed layer would hand back copies without gradients
        return F.linear(x, stack(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        x_grad = grad @ stack(weights) if ctx.needs_input_grad[0] else None
        into = [weight.grad for weight in weights]
        total = None if None in into else adjacent(tuple(into))
        if total is None:
            weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
            return x_grad, *weight_grad.split([len(weight) for weight in weights])
        add_product(total, grad.flatten(0, -2).T, x.flatten(0, -2))
        return x_grad, *[None] * len(weights)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in place; total float32, a and b of one dtype. On a GPU one GEMM, whatever the dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
