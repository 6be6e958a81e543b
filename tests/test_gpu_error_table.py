"""Every compiled kernel against its float32 twin at awkward sizes, by the table in tolerances.py.

`pytest -m gpu -s tests/test_gpu_error_table.py` prints what was found beside what is allowed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import draw_inputs, empty_is_nan
from tolerances import TOLERANCE
from torch import Tensor

from draftgraph.engine.models.target import quiet
from draftgraph.kernels import cross_entropy, fused, reference

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EPS = 1e-6

# (R, S, A, K, H, G, C) and the valid anchors of each row: S = 1, no valid anchor, 1:1, 3:1 and 4:1 heads, head_dim 64,
# 128 and 256, and A*K that is no multiple of a tile.
ATTENTION = [
    ((1, 1, 1, 2, 2, 2, 64), (1,)),
    ((2, 3, 2, 8, 4, 1, 128), (0, 0)),
    ((2, 77, 5, 10, 3, 1, 256), (5, 0)),
    ((1, 300, 13, 10, 6, 2, 128), (13,)),
    ((2, 129, 37, 16, 8, 2, 64), (37, 20)),
    ((1, 200, 9, 15, 4, 4, 256), (8,)),
    ((3, 1, 3, 16, 4, 1, 128), (1, 0, 1)),
]
ATTENTION_CASES = [(sizes, valid, window) for sizes, valid in ATTENTION for window in (None, 50)]


def steps(*shape: int, seed: int = 0) -> Tensor:
    """In steps of 1/8 below 4: bfloat16 holds them and their sums, so that the twin's truth is the kernel's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-31, 32, shape, generator=generator).cuda() / 8


def tables(rotary_dim: int, num_positions: int = 400) -> tuple[Tensor, Tensor]:
    angles = torch.arange(num_positions)[:, None] / 1e4 ** (torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    angles = torch.cat([angles, angles], -1).cuda()
    return angles.cos(), angles.sin()


def positions(count: int) -> Tensor:
    return torch.arange(count, device="cuda", dtype=torch.int32) * 3


# Kernel, what it is called with ((ops, leaves) -> outputs), and the shapes of the leaves.
Elementwise = tuple[str, Callable[[Any, list[Tensor]], Any], list[tuple[int, ...]]]
DIFFERENTIABLE: list[Elementwise] = [
    *(("rms_norm", lambda o, x: o.rms_norm(*x, EPS), [s, s[-1:]]) for s in ((1, 3), (3, 5, 1000), (1, 5120))),
    ("rms_norm", lambda o, x: o.rms_norm(*x, EPS, True), [(7, 5120), (5120,)]),
    *(("add_rms_norm", lambda o, x: o.add_rms_norm(*x, EPS), [s, s, s[-1:]]) for s in ((1, 3), (3, 129, 1000))),
    *(
        ("norm_rope", lambda o, x, n=s[1], r=r: o.norm_rope(*x, *tables(r), positions(n), EPS, True), [s, s[-1:]])
        for s, r in (((1, 1, 3, 64), 64), ((2, 77, 3, 128), 128), ((2, 1, 5, 256), 64))
    ),
    *(
        (
            "norm_rope_split",
            lambda o, x, n=n, c=c, h=h: o.norm_rope_split(x[0], h, x[1:], *tables(c), positions(n), EPS),
            [(2, n, sum(h) * c), (c,), (c,)],
        )
        for n, c, h in ((1, 64, (1, 1, 1)), (77, 128, (6, 2, 2)), (33, 256, (8, 2, 2)))
    ),
    *(("swiglu", lambda o, x: o.swiglu(*x), [s]) for s in ((1, 2), (5, 14), (3, 1, 34816))),
]
FORWARD_ONLY: list[Elementwise] = [
    *(
        ("causal_conv", lambda o, x, n=n: o.causal_conv(*x, n), [(2, t, h, c), (h * c, 4)])
        for t, h, c in ((1, 2, 128), (3, 3, 64), (65, 1, 256))
        for n in (False, True)
    ),
    *(
        (name, call, [(2, t, h, c), (2, t, h, c), (c,)])
        for t, h, c in ((1, 1, 128), (65, 3, 256), (5, 7, 64))
        for name, call in (
            ("gated_rms_norm", lambda o, x: o.gated_rms_norm(*x, EPS)),
            ("sigmoid_gate", lambda o, x: o.sigmoid_gate(*x[:2])),
        )
    ),
]


def compare(kernel: str, what: object, dtype: torch.dtype, found: list[Tensor], truth: list[Tensor]) -> None:
    allowed = TOLERANCE[kernel][dtype]
    assert allowed is not None and len(found) == len(truth)
    worst = 0.0
    for a, b in zip(found, truth, strict=True):
        largest = max(b.float().abs().max().item(), 1e-30)
        difference = (a.float() - b.float()).abs().max().item()
        worst = max(worst, difference / largest) if difference == difference else float("nan")
        assert torch.isfinite(a).all()
    print(f"{kernel:24} {str(dtype)[6:]:9} {worst:8.1e} of {allowed:.0e}  {what}")
    assert worst <= allowed, (kernel, what, worst)


def outputs(call: Callable, ops: Any, leaves: list[Tensor], out_grads: list[Tensor] | None) -> list[Tensor]:
    """All outputs and, with `out_grads`, the gradients of all leaves."""
    leaves = [leaf.detach().requires_grad_(out_grads is not None) for leaf in leaves]
    out = call(ops, leaves)
    found = list(out) if isinstance(out, tuple) else [out]
    if out_grads is None:
        return found
    grads = torch.autograd.grad(found, leaves, [g.to(o.dtype) for g, o in zip(out_grads, found, strict=True)])
    return [*(o.detach() for o in found), *grads]


@DTYPES
@pytest.mark.parametrize(("sizes", "valid", "window"), ATTENTION_CASES)
def test_anchor_attention(sizes, valid, window, dtype):
    inputs = draw_inputs(sizes, valid, dtype, "cuda")
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9)).to("cuda", dtype)

    def attend(ops: Any, leaves: list[Tensor]) -> Tensor:
        return ops.anchor_attention(*leaves, *inputs[5:], window, sizes[-1] ** -0.5)

    truth = outputs(attend, reference, [x.float() for x in inputs[:5]], [dout.float()])
    with empty_is_nan():
        found = outputs(attend, fused, inputs[:5], [dout])
    compare("anchor_attention", (sizes, valid, window), dtype, found, truth)


@DTYPES
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: f"{case[0]} {case[2][0]}")
def test_a_kernel_with_a_gradient(case, dtype):
    kernel, call, shapes = case
    leaves = [steps(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    wide = [leaf.float() for leaf in leaves]
    out_grads = [steps(*o.shape, seed=7 + i) for i, o in enumerate(outputs(call, reference, wide, None))]
    truth = outputs(call, reference, wide, out_grads)
    with empty_is_nan():
        found = outputs(call, fused, leaves, out_grads)
    compare(kernel, shapes[0], dtype, found, truth)


@DTYPES
@pytest.mark.parametrize("case", FORWARD_ONLY, ids=lambda case: f"{case[0]} {case[2][0]}")
def test_a_kernel_of_the_frozen_target(case, dtype):
    kernel, call, shapes = case
    leaves = [steps(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    with torch.no_grad(), empty_is_nan():
        found = outputs(call, fused, leaves, None)
    compare(kernel, shapes[0], dtype, found, outputs(call, reference, [leaf.float() for leaf in leaves], None))


@pytest.mark.parametrize(("S", "H", "HV"), [(1, 1, 3), (65, 2, 2), (200, 2, 6)])
def test_gated_delta(S, H, HV):
    from draftgraph.kernels.gated_delta import implementation

    with quiet():
        implementation()  # fla warns on import
    q, k = (F.normalize(steps(2, S, H, 128, seed=s) + 0.01, dim=-1).bfloat16() for s in (0, 1))
    v, a, b = (steps(2, S, HV, *d, seed=3 + i).bfloat16() for i, d in enumerate(((128,), (), ())))
    inputs = (q, k, v, a, b, steps(HV, seed=6).bfloat16() / 4, steps(HV, seed=7).bfloat16())
    truth = reference.gated_delta(*(x.float() for x in inputs))
    compare("gated_delta", (S, H, HV), torch.bfloat16, [fused.gated_delta(*inputs)], [truth])


@DTYPES
@pytest.mark.parametrize(("M", "V"), [(1, 2), (3, 7), (5, 16_385), (2, 40_001)])
def test_cross_entropy(M, V, dtype):
    logits = steps(M, V).to(dtype)
    labels = torch.randint(V, (M,), generator=torch.Generator().manual_seed(1)).cuda()
    weights = torch.rand(M, generator=torch.Generator().manual_seed(2)).cuda()
    exact, ours = logits.float(), logits.clone()
    truth_ce, truth_best = reference.cross_entropy_gradient_(exact, labels, weights)
    ce, best = cross_entropy.cross_entropy_gradient_(ours, labels, weights)
    compare("cross_entropy_gradient_", (M, V), dtype, [ce, ours], [truth_ce, exact])
    assert torch.equal(best, truth_best)


@pytest.mark.parametrize("sizes", [(1, 16, 16), (37, 1040, 2064), (129, 17408, 512)])
def test_scaled_linear(sizes):
    M, D, N = sizes
    x, weight = fused.quantise_rows(steps(M, D).bfloat16()), fused.quantise_rows(steps(N, D, seed=1).bfloat16())
    found = fused.scaled_linear(x, weight, None, torch.bfloat16)
    compare("scaled_linear", sizes, torch.bfloat16, [found], [reference.scaled_linear(x, weight, None, torch.float32)])
