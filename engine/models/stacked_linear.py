"""Several linear layers of one input as one product, their parameters apart under their own names.

Promises: one GEMM forward and two backward, whatever the number of weights; nothing is copied where the weights lie
below each other in memory, as `FlatParameters` lays out parameters that are registered one after the other. Elsewhere,
such as in a drafter loaded for decoding, they are copied together at each call.
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
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != end:
            return torch.cat(weights)
        end += weight.nbytes
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, stack(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_grad = grad @ stack(tuple(weights)) if ctx.needs_input_grad[0] else None
        weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return x_grad, *weight_grad.split([len(weight) for weight in weights])
