"""Norms, rotary heads and SwiGLU against twins and plain definitions, in the interpreter without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftgraph.kernels import reference, rms_norm, rope, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CENTRED = pytest.mark.parametrize("zero_centred", [False, True])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def strided(*shape: int, seed: int = 0) -> Tensor:
    """A slice of a wider tensor: rows further apart than they are long."""
    return random(*shape[:-1], shape[-1] + 9, seed=seed)[..., 5:-4]


def results(function: Callable, leaves: list[Tensor], *arguments: Any) -> list[Tensor]:
    """Every output of function(*leaves, *arguments), and the gradients of a random sum of them."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves, *arguments)
    outputs = list(out) if isinstance(out, tuple) else [out]
    couts = [random(*o.shape, seed=i + 1) for i, o in enumerate(outputs)]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, couts)]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = 2e-6) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        difference = (a - b).abs().max().item()
        assert a.shape == b.shape and difference <= tolerance * max(1.0, b.abs().max().item()), (i, difference)


def tables(num_positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(num_positions)[:, None] / 100.0 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    angles = torch.cat([angles, angles], -1).to(DEVICE)
    return angles.cos(), angles.sin()


@CENTRED
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5, 64), (4100, 3), (17, 1000), (5, 5120), (1, 8192)])
def test_rms_norm_equals_its_twin(shape: tuple[int, ...], zero_centred: bool) -> None:
    leaves = [strided(*shape), random(shape[-1], seed=9)]
    found = results(rms_norm.rms_norm, leaves, EPS, zero_centred)
    assert_equal(found, results(reference.rms_norm, leaves, EPS, zero_centred), 1e-5)


@CENTRED
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 64), (17, 1000), (2, 5120)])
def test_add_rms_norm_equals_its_twin(shape: tuple[int, ...], zero_centred: bool) -> None:
    leaves = [strided(*shape), random(*shape, seed=4), random(shape[-1], seed=9)]
    found = results(rms_norm.add_rms_norm, leaves, EPS, zero_centred)
    assert_equal(found, results(reference.add_rms_norm, leaves, EPS, zero_centred), 1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_or_a_norm_that_nobody_uses_has_no_gradient(used: int) -> None:
    leaves = [random(6, 40), random(6, 40, seed=4), random(40, seed=9)]
    grads = []
    for function in (rms_norm.add_rms_norm, reference.add_rms_norm):
        inputs = [x.detach().requires_grad_() for x in leaves]
        function(*inputs, EPS)[used].pow(2).sum().backward()
        grads.append([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs])
    assert_equal(*grads, 1e-5)


def test_the_twin_of_rms_norm_is_torchs() -> None:
    x, weight = random(9, 33), random(33, seed=1)
    torch.testing.assert_close(reference.rms_norm(x, weight, EPS), F.rms_norm(x, (33,), weight, EPS))
    torch.testing.assert_close(reference.rms_norm(x, weight, EPS, True), F.rms_norm(x, (33,), 1 + weight, EPS))


@pytest.mark.gpu  # the interpreter cuts float32 off where a GPU rounds it
def test_the_norm_is_of_the_rounded_sum() -> None:
    x, residual, weight = (random(4, 256, seed=i).bfloat16() for i in range(3))
    normed, total = rms_norm.add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(x + residual, weight[0], EPS), rtol=2**-7, atol=1e-6)


@CENTRED
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"),
    [((1,), 1, 16, 16), ((3, 5), 3, 64, 64), ((2, 3, 4), 6, 128, 128), ((7,), 2, 256, 64), ((2, 9), 3, 80, 20)],
)
def test_norm_rope_equals_its_twin(tokens, heads, head_dim, rotary_dim, norm: bool, zero_centred: bool) -> None:
    # Queries of a projection that interleaves them with gates: heads are not next to each other.
    x = random(*tokens, heads, 2 * head_dim)[..., :head_dim]
    leaves = [x, random(head_dim, seed=9)] if norm else [x]
    positions = torch.randint(50, tokens, generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
    arguments = (*(() if norm else (None,)), *tables(50, rotary_dim), positions, EPS, zero_centred)
    assert_equal(results(rope.norm_rope, leaves, *arguments), results(reference.norm_rope, leaves, *arguments), 1e-5)


def test_the_twin_of_norm_rope_is_the_modules_rotation() -> None:
    x, (cos, sin) = random(2, 7, 3, 32), tables(7, 24)
    rotated, rest = x[..., :24], x[..., 24:]
    turned = torch.cat([-rotated[..., 12:], rotated[..., :12]], -1)
    expected = torch.cat([rotated * cos[:, None] + turned * sin[:, None], rest], -1)
    torch.testing.assert_close(reference.norm_rope(x, None, cos, sin, torch.arange(7, device=DEVICE), EPS), expected)


def test_positions_of_the_last_dims_repeat() -> None:
    x, weight, (cos, sin) = random(3, 11, 2, 32), random(32, seed=2), tables(20, 32)
    positions = torch.arange(11, device=DEVICE) + 4
    short = rope.norm_rope(x, weight, cos, sin, positions, EPS)
    assert torch.equal(short, rope.norm_rope(x, weight, cos, sin, positions.expand(3, 11).contiguous(), EPS))


@pytest.mark.parametrize(("leading", "num_heads"), [((1,), (1, 1, 1)), ((3, 5), (6, 2, 2)), ((2, 7), (3, 3))])
def test_norm_rope_split_equals_its_twin(leading: tuple[int, ...], num_heads: tuple[int, ...]) -> None:
    C = 32
    leaves = [random(*leading, sum(num_heads) * C), *(random(C, seed=7 + i) for i in range(len(num_heads) - 1))]
    positions = torch.arange(leading[-1], device=DEVICE)

    def run(module: Any) -> list[Tensor]:
        def function(fused: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return module.norm_rope_split(fused, num_heads, weights, *tables(9, C), positions, EPS)

        return results(function, leaves)

    assert_equal(run(rope), run(reference), 1e-5)


@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (7, 2048), (2, 6000)])
def test_swiglu_equals_its_twin(shape: tuple[int, ...]) -> None:
    leaves = [3 * strided(*shape)]
    assert_equal(results(swiglu.swiglu, leaves), results(reference.swiglu, leaves), 1e-5)
    gate, up = leaves[0].chunk(2, -1)
    torch.testing.assert_close(reference.swiglu(leaves[0]), F.silu(gate) * up)


def test_nan_stays_in_its_row() -> None:
    x, weight, (cos, sin) = random(9, 2, 64), random(64, seed=1), tables(9, 64)
    poisoned = x.clone()
    poisoned[4] = float("nan")
    positions, rest = torch.arange(9, device=DEVICE), torch.arange(9, device=DEVICE) != 4
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: rms_norm.rms_norm(x, weight, EPS),
        lambda x: rms_norm.add_rms_norm(x, x, weight, EPS)[0],
        lambda x: rope.norm_rope(x, weight, cos, sin, positions, EPS),
        swiglu.swiglu,
    ]
    for function in functions:
        (clean, clean_grad), (found, found_grad) = (results(function, [leaf]) for leaf in (x, poisoned))
        assert torch.equal(found[rest], clean[rest]) and torch.equal(found_grad[rest], clean_grad[rest])
        assert found[4].isnan().all() and found_grad[4].isnan().all()


def test_a_bf16_weight_takes_its_gradient_in_float32() -> None:
    x = random(50, 64).bfloat16()
    weight = torch.nn.Parameter(random(64, seed=1).bfloat16())
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(64, device=DEVICE)
    gradient = random(50, 64, seed=2).bfloat16()
    rms_norm.rms_norm(x, weight, EPS).backward(gradient)
    exact = weight.detach().float().requires_grad_()
    reference.rms_norm(x.float(), exact, EPS).backward(gradient.float())
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-5, atol=1e-5)  # no rounding to bfloat16 on the way
