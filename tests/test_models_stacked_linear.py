"""Several linear layers as one product: equal to the layers, without a copy of parameters that lie together."""

import pytest
import torch
from torch import nn
from vectors_step import NAMES, read_vector

from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.stacked_linear import stack, stacked_linear
from draftgraph.engine.run.optimizer import FlatParameters

CPU = torch.device("cpu")


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, rows, bias=False) for rows in (4, 3, 5)]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("leading", [(1,), (2, 7)])
def test_one_product_equals_its_layers(flat, leading):
    ours, theirs = nn.ModuleList(layers()), layers()
    if flat:
        start = [layer.weight.detach().clone() for layer in ours]
        FlatParameters(ours, torch.float32, CPU)
        for layer, weight in zip(ours, start, strict=True):
            layer.weight.data.copy_(weight)
    x = torch.randn(*leading, 6, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    expected = torch.cat([layer(other) for layer in theirs], -1)
    found = stacked_linear(x, *(layer.weight for layer in ours))
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, other.grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.weight.grad, b.weight.grad)


def test_a_frozen_input_gets_no_gradient():
    x, ours = torch.randn(3, 6), layers()
    stacked_linear(x, *(layer.weight for layer in ours)).sum().backward()
    assert x.grad is None and ours[1].weight.grad is not None


def test_weights_that_do_not_lie_together_are_copied():
    memory = torch.randn(20, 6)
    assert stack((memory[:4], memory[4:9])).data_ptr() == memory.data_ptr()
    for weights in ((memory[:4], memory[5:9]), (memory[4:9], memory[:4]), (memory[:4], memory[4:9].clone())):
        assert torch.equal(stack(weights), torch.cat(weights))


def test_a_training_drafter_copies_no_weights():
    drafter = Drafter(read_vector(NAMES[0]).shape, max_context=8)
    flat = FlatParameters(drafter, torch.bfloat16, CPU)
    flat.values.normal_()
    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups = [
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ]
        for group in groups:
            weights = tuple(linear.weight for linear in group)
            stacked = stack(weights)
            assert stacked.data_ptr() == weights[0].data_ptr() and torch.equal(stacked, torch.cat(weights))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the first product of autograd's thread
def test_gradients_of_several_passes_add_up_in_float32_memory(device, dtype):
    ours = nn.ModuleList(layers()).to(device)
    flat = FlatParameters(ours, dtype, torch.device(device))
    flat.values.normal_()
    address = flat.grads.data_ptr()
    expected = torch.zeros(12, 6, dtype=torch.float64)
    for _ in range(20):
        x, gradient = torch.randn(2, 7, 6, device=device).to(dtype), torch.randn(2, 7, 12, device=device).to(dtype)
        stacked_linear(x, *(layer.weight for layer in ours)).backward(gradient)
        # The last two layers again, as a context's keys and values share weights with the block's.
        stacked_linear(x, ours[1].weight, ours[2].weight).backward(gradient[..., 4:])
        wide, part = x.double().cpu().flatten(0, 1), gradient.double().cpu().flatten(0, 1)
        expected += part.T @ wide
        expected[4:] += part[:, 4:].T @ wide
    assert flat.grads.data_ptr() == address and ours[0].weight.grad.data_ptr() == address
    # On the CPU a bfloat16 product is rounded before it is added; on a GPU it is not.
    rounded = dtype == torch.bfloat16 and device == "cpu"
    found = flat.grads.view(12, 6).double().cpu()
    torch.testing.assert_close(found, expected, rtol=1e-2 if rounded else 1e-5, atol=0.2 if rounded else 1e-4)
