"""The floating point operations of matrix products, forward and backward, however they are written."""

import torch
import torch.nn.functional as F

from draftgraph.capture.products import CountProducts


def test_products_are_counted_forward_and_backward_and_nothing_else_is():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    with CountProducts() as forward:
        y = F.silu(F.linear(x, weight)).sum()
    with CountProducts() as backward:
        y.backward()
    assert forward.flops == 2 * 6 * 8 * 5
    assert backward.flops == 2 * forward.flops


@torch.no_grad()
def test_every_form_of_a_product_counts_the_same():
    a, b, out = torch.randn(4, 6), torch.randn(6, 10), torch.empty(4, 10)
    bias = torch.zeros(10)
    for product in (
        lambda: a @ b,
        lambda: torch.mm(a, b, out=out),
        lambda: F.linear(a, b.T.contiguous(), bias),
        lambda: torch.addmm(bias, a, b),
    ):
        with CountProducts() as counted:
            product()
        assert counted.flops == 2 * 4 * 6 * 10
    with CountProducts() as counted:
        torch.bmm(a.expand(3, 4, 6), b.expand(3, 6, 10))
    assert counted.flops == 3 * 2 * 4 * 6 * 10
