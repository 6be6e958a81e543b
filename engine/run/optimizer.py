"""Flat parameters and the optimizer step over them: reduce scale, clip, AdamW, low-precision copy, zero.

Promises: parameters, gradients and states keep their addresses; gradients accumulate in float32; the rate, the step
count and the skip flag live on the device, so the whole step can be captured; a non-finite gradient keeps the old
state and is counted. Of D drafters each owns 1/D of the flat range (see reduce.py).
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from draftgraph.engine.config import OptimSection
from draftgraph.kernels import fused, reference


class FlatParameters:
    """All parameters of a module as views of one flat tensor, their gradients as views of one flat float32 tensor.

    Owns: values [P] in `dtype`, grads [P] float32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device):
        parameters = list(module.named_parameters())
        self.size = sum(p.numel() for _, p in parameters)
        self.values = torch.zeros(self.size, dtype=dtype, device=device)
        self.grads = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.spans: dict[str, tuple[int, torch.Size]] = {}  # name -> (offset, shape)
        offset = 0
        for name, parameter in parameters:
            end = offset + parameter.numel()
            parameter.data = self.values[offset:end].view(parameter.shape)
            # A bf16 parameter refuses a float32 gradient unless told.
            parameter.grad_dtype = torch.float32
            parameter.grad = self.grads[offset:end].view(parameter.shape)
            self.spans[name] = (offset, parameter.shape)
            offset = end

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat [P] tensor under the parameters' names."""
        return {name: flat[o : o + shape.numel()].view(shape) for name, (o, shape) in self.spans.items()}


class OptimizerShard:
    """AdamW over the slice [low, high) of the flat range, with float32 masters.

    Args:
        total: [M] float32, sums over all drafters of a step; total[weight_index] is the global loss weight.
        norm_squared: [1] float32, the squared norm of all slices of the summed gradient.
    Owns: master [P/D], the values themselves where those are float32; state: both moments and the count of updates.
    """

    def __init__(
        self,
        flat: FlatParameters,
        low: int,
        high: int,
        section: OptimSection,
        num_steps: int,
        total: Tensor,
        weight_index: int,
    ):
        device = flat.values.device
        self.flat, self.low, self.high, self.section = flat, low, high, section
        self.total, self.weight_index = total, weight_index
        values, self.grads = flat.values[low:high], flat.grads[low:high]
        # Where the parameters are float32 already they are their own masters.
        self.values = None if values.dtype == torch.float32 else values
        self.master = values if self.values is None else values.float()
        scalar = partial(torch.zeros, (), dtype=torch.float32, device=device)
        self.lr, self.step_count, self.skipped, self.grad_norm = scalar(), scalar(), scalar(), scalar()
        self.grad_scale, self.skip = scalar(), scalar()
        self.num_steps = scalar().fill_(num_steps)
        self.rate_share = scalar().fill_(1.0)  # below one after a roll-back
        self.norm_squared = scalar().view(1)
        self.state = {
            "step": scalar(),
            "exp_avg": torch.zeros_like(self.master),
            "exp_avg_sq": torch.zeros_like(self.master),
        }

    @torch.no_grad()
    def measure(self) -> None:
        """Squared norm of this slice's gradient sum."""
        norm = torch.linalg.vector_norm(self.grads)
        self.norm_squared.copy_((norm * norm).view(1))

    @torch.no_grad()
    def update(self) -> None:
        """One step from the gradient sum, the global weight and the global norm; then all gradients are zero."""
        section = self.section
        weight = self.total[self.weight_index]
        # A step in which no slot counted has no gradient: divide by one, keep the state.
        divisor = torch.where(weight > 0, weight, 1.0)
        norm = self.norm_squared[0].sqrt() / divisor
        self.grad_norm.copy_(norm)
        usable = torch.isfinite(norm) & (weight > 0)
        self.skip.copy_(torch.where(usable, 0.0, 1.0))
        self.skipped.add_(self.skip)
        # The kernel divides the gradient by grad_scale: by the weight, and by norm / clip where that is above one.
        self.grad_scale.copy_(torch.where(usable, divisor * (norm / section.clip).clamp(min=1.0), 1.0))
        self.lr.copy_(rate(self.step_count, self.num_steps, section) * self.rate_share)
        ops = fused if self.master.is_cuda else reference
        ops.adamw_(
            self.grads,
            self.master,
            self.state["exp_avg"],
            self.state["exp_avg_sq"],
            self.values,
            self.lr,
            self.state["step"],
            self.grad_scale,
            self.skip,
            (section.betas[0], section.betas[1]),
            section.eps,
            section.weight_decay,
        )
        self.step_count.add_(1)
        # The peers' slices: their owners have added them to their own.
        self.flat.grads[: self.low].zero_()
        self.flat.grads[self.high :].zero_()

    @torch.no_grad()
    def reset(self) -> None:
        """Masters from the parameters, zero moments, gradients and counts: the state before step 1."""
        self.master.copy_(self.flat.values[self.low : self.high])
        for tensor in (*self.state.values(), self.flat.grads, self.step_count, self.skipped):
            tensor.zero_()
        self.rate_share.fill_(1.0)


def rate(step: Tensor, num_steps: Tensor, section: OptimSection) -> Tensor:
    """Learning rate of 0-D device step `step`: linear warm-up, then cosine to 0. Captured; no Python number changes."""
    warmup = (num_steps * section.warmup).ceil().clamp(min=1.0)
    rising = (step + 1) / warmup
    progress = ((step + 1 - warmup) / (num_steps - warmup).clamp(min=1.0)).clamp(0.0, 1.0)
    return section.lr * torch.where(step + 1 <= warmup, rising, 0.5 * (1 + torch.cos(math.pi * progress)))
