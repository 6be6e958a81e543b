"""Inputs and comparisons that the CPU and the GPU tests of anchor attention share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tolerances
import torch
from torch import Tensor

# Largest difference over the largest element of the reference, per tensor; of compiled kernels see tolerances.py.
KERNEL = tolerances.TOLERANCE["anchor_attention"]
TOLERANCE: dict[str, float] = {
    "float64 twin, definition": 1e-12,
    "float32 kernel, twin": KERNEL[torch.float32],
    "float32 interpreter, twin": 1e-5,
    "bfloat16 kernel, float32 twin": KERNEL[torch.bfloat16],
}


def draw_inputs(
    sizes: tuple[int, ...],
    num_valid: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """The seven tensors of `anchor_attention` for sizes (R, S, A, K, H, G, C) with num_valid[r] anchors in row r."""
    R, S, A, K, H, G, C = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(R, A, K, H, C), (R, S, G, C), (R, S, G, C), (R, A, K, G, C), (R, A, K, G, C)]
    floats = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    positions = torch.zeros(R, A, dtype=torch.int32)
    for row, count in enumerate(num_valid):
        positions[row, :count] = torch.randperm(S, generator=generator)[:count].sort().values
    valid = torch.arange(A) < torch.tensor(num_valid).view(R, 1)
    return [*floats, positions.to(device), valid.to(device)]


def run(
    attention: Callable[..., Tensor], inputs: list[Tensor], window: int | None, dout: Tensor, rule: str = "served"
) -> list[Tensor]:
    """The output and the five gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:5]]
    out = attention(*leaves, *inputs[5:], window, inputs[0].shape[-1] ** -0.5, rule)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: str) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv", "block dk", "block dv"), found, expected, strict=True):
        difference = (a.to(b.dtype) - b).abs().max().item()
        largest = b.abs().max().item()
        assert difference <= TOLERANCE[tolerance] * largest, f"{name}: {difference} of {largest}"


def poison_pads(inputs: list[Tensor]) -> list[Tensor]:
    """NaN in every draft token of invalid blocks, and in the context from a row's last anchor on."""
    q, context_k, context_v, block_k, block_v, positions, valid = inputs
    last_anchor = torch.where(valid, positions, 0).amax(dim=1, keepdim=True)
    pad = torch.arange(context_k.shape[1], device=q.device) >= last_anchor
    drafts = [tensor.masked_fill(~valid[:, :, None, None, None], float("nan")) for tensor in (q, block_k, block_v)]
    contexts = [tensor.masked_fill(pad[:, :, None, None], float("nan")) for tensor in (context_k, context_v)]
    return [drafts[0], *contexts, *drafts[1:], positions, valid]


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Fresh memory of `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
