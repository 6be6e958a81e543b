"""Compiled norms, rotary heads and SwiGLU on a GPU at real shapes: error, repeatability, capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import empty_is_nan
from tolerances import TOLERANCE
from torch import Tensor

from draftgraph.kernels import fused, reference

pytestmark = pytest.mark.gpu

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

# What is called with (ops, leaves, cos and sin of 4096 positions, positions), and the shapes of its leaves.
Case = tuple[Callable[[Any, list[Tensor], tuple[Tensor, Tensor], Tensor], Any], list[tuple[int, ...]], int]
CASES: dict[str, Case] = {
    "rms_norm 1024": (lambda ops, x, *_: ops.rms_norm(*x, EPS), [(4096, 1024), (1024,)], 0),
    "rms_norm 1 + w": (lambda ops, x, *_: ops.rms_norm(*x, EPS, True), [(2, 1000, 5120), (5120,)], 0),
    "add_rms_norm 1024": (lambda ops, x, *_: ops.add_rms_norm(*x, EPS), [(4096, 1024), (4096, 1024), (1024,)], 0),
    "add_rms_norm 5120": (lambda ops, x, *_: ops.add_rms_norm(*x, EPS), [(999, 5120), (999, 5120), (5120,)], 0),
    "norm_rope 128": (lambda ops, x, t, p: ops.norm_rope(*x, *t, p, EPS), [(2, 999, 16, 128), (128,)], 128),
    "norm_rope 64 of 256": (
        lambda ops, x, t, p: ops.norm_rope(*x, *t, p, EPS, True),
        [(2, 999, 24, 256), (256,)],
        64,
    ),
    "norm_rope without norm": (lambda ops, x, t, p: ops.norm_rope(x[0], None, *t, p, EPS), [(2, 999, 9, 64)], 64),
    "norm_rope_split": (
        lambda ops, x, t, p: ops.norm_rope_split(x[0], (32, 8, 8), x[1:], *t, p, EPS),
        [(3, 500, 48 * 128), (128,), (128,)],
        128,
    ),
    "swiglu 3072": (lambda ops, x, *_: ops.swiglu(*x), [(3, 1000, 6144)], 0),
    "swiglu 17408": (lambda ops, x, *_: ops.swiglu(*x), [(501, 34816)], 0),
}
NAMES = pytest.mark.parametrize("name", CASES)


def draw(name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Leaves in steps of 1/8 below 8: bfloat16 holds them and their sums, so that the float32 twin is the truth."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = CASES[name][1]
    return [torch.randint(-63, 64, s, generator=generator, device="cuda").to(dtype) / 8 for s in shapes]


def tables(name: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rotary_dim = CASES[name][2]
    inverse = 1e-7 ** (torch.arange(0, rotary_dim, 2, device="cuda") / max(rotary_dim, 1))
    angles = torch.arange(4096, device="cuda")[:, None] * torch.cat([inverse, inverse])
    return (angles.cos(), angles.sin()), torch.arange(CASES[name][1][0][1], dtype=torch.int32, device="cuda") * 3


def run(ops: Any, name: str, leaves: list[Tensor], out_grads: list[Tensor] | None = None) -> list[Tensor]:
    """All outputs, and with `out_grads` the gradients of all leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = CASES[name][0](ops, leaves, *tables(name))
    outputs = list(out) if isinstance(out, tuple) else [out]
    grads = torch.autograd.grad(outputs, leaves, out_grads) if out_grads else ()
    return [*(o.detach() for o in outputs), *grads]


def out_grads_of(name: str, leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(o.shape, generator=generator, device="cuda").to(o.dtype) for o in run(fused, name, leaves)]


@DTYPES
@NAMES
def test_outputs_and_gradients_are_near_the_float32_twin(name: str, dtype: torch.dtype) -> None:
    leaves = draw(name, dtype)
    gradients = out_grads_of(name, leaves)
    truth = run(reference, name, [x.float() for x in leaves], [g.float() for g in gradients])
    with empty_is_nan():
        found = run(fused, name, leaves, gradients)
    for i, (a, b) in enumerate(zip(found, truth, strict=True)):
        difference, largest = (a.float() - b).abs().max().item(), b.abs().max().item()
        assert a.dtype == dtype and difference <= TOLERANCE[name.split()[0]][dtype] * largest, (i, difference, largest)


@NAMES
def test_two_runs_give_equal_bits(name: str) -> None:
    leaves = draw(name, torch.bfloat16)
    gradients = out_grads_of(name, leaves)
    first = run(fused, name, leaves, gradients)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(fused, name, leaves, gradients), strict=True))


@NAMES
def test_replay_equals_eager_on_changing_inputs(name: str) -> None:
    static = draw(name, torch.bfloat16)
    gradients = out_grads_of(name, static)
    constants = tables(name)

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in static]
        out = CASES[name][0](fused, leaves, *constants)
        outputs = list(out) if isinstance(out, tuple) else [out]
        return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, gradients)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for seed in (5, 6):
        for buffer, fresh in zip(static, draw(name, torch.bfloat16, seed), strict=True):
            buffer.copy_(fresh)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
