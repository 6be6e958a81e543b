"""The flat optimizer against torch's AdamW on ordinary parameters."""

import math

import pytest
import torch
from torch import nn

from draftgraph.engine.config import OptimSection
from draftgraph.engine.run.optimizer import FlatParameters, OptimizerShard, rate

CPU = torch.device("cpu")


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def shard(flat, section, total, num_steps=20):
    with torch.no_grad():
        found = OptimizerShard(flat, 0, flat.size, section, num_steps, total, 1)
    found.reset()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_torchs_adamw_with_mean_gradient_clip_and_schedule(dtype):
    section = OptimSection(lr=1e-2, weight_decay=0.1, clip=0.5, warmup=0.2)
    plain, ours = module(), module()
    flat = FlatParameters(ours, dtype, CPU)
    start = torch.cat([p.detach().flatten() for p in plain.parameters()])
    flat.values.copy_(start)
    total = torch.zeros(4)
    optimizer = shard(flat, section, total)
    optimizer.master.data.copy_(start)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        weight = 3.0 + step
        gradient = torch.randn(flat.size, generator=generator) * (0.1 if step % 2 else 10)
        flat.grads.copy_(gradient)
        total[1] = weight
        offset = 0
        for p in plain.parameters():
            p.grad = (gradient[offset : offset + p.numel()] / weight).view_as(p).clone()
            offset += p.numel()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in theirs.param_groups:
            group["lr"] = float(rate(torch.tensor(float(step)), torch.tensor(20.0), section))
        theirs.step()
        optimizer.measure()
        optimizer.update()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(optimizer.master.detach(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flat.values, expected.to(dtype), rtol=1e-2, atol=1e-4)


def test_bf16_parameters_accumulate_their_gradients_in_float32_at_one_address():
    net = nn.Linear(4, 4, bias=False)
    flat = FlatParameters(net, torch.bfloat16, CPU)
    flat.values.fill_(1.0)
    address = net.weight.grad.data_ptr()
    for _ in range(300):
        net(torch.full((1, 4), 0.01, dtype=torch.bfloat16)).sum().backward()
    assert net.weight.grad.data_ptr() == address == flat.grads.data_ptr()
    # In bf16 the sum would have stopped growing near 2.
    assert float(flat.grads[0]) == pytest.approx(300 * 0.01, rel=2e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_keeps_the_state_and_is_counted(bad):
    flat = FlatParameters(module(), torch.float32, CPU)
    total = torch.tensor([0.0, 1.0, 0.0, 0.0])
    optimizer = shard(flat, OptimSection(), total)
    before = optimizer.master.detach().clone()
    flat.grads[3] = bad
    optimizer.measure()
    optimizer.update()
    assert torch.equal(optimizer.master.detach(), before) and not optimizer.state["exp_avg"].any()
    assert float(optimizer.skipped) == 1 and float(optimizer.state["step"]) == 0


def test_a_step_in_which_nothing_counted_changes_nothing():
    flat = FlatParameters(module(), torch.float32, CPU)
    optimizer = shard(flat, OptimSection(), torch.zeros(4))
    before = optimizer.master.detach().clone()
    optimizer.measure()
    optimizer.update()
    assert torch.equal(optimizer.master.detach(), before) and float(optimizer.skipped) == 1


def test_the_rate_warms_up_and_falls_to_zero():
    section = OptimSection(lr=2.0, warmup=0.04)
    rates = [float(rate(torch.tensor(float(s)), torch.tensor(100.0), section)) for s in range(100)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4:] == pytest.approx([1 + math.cos(math.pi * (s - 3) / 96) for s in range(4, 100)], abs=1e-5)
    assert rates[-1] == pytest.approx(0.0, abs=1e-6)
