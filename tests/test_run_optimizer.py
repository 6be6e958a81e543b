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
    optimizer.master.copy_(start)
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
    torch.testing.assert_close(optimizer.master, expected, rtol=1e-4, atol=1e-6)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_owners_of_a_slice_each_step_like_one_of_all_and_leave_no_gradient(dtype):
    section, total = OptimSection(lr=1e-2, weight_decay=0.1, clip=0.5), torch.tensor([0.0, 3.0, 0.0, 0.0])
    flats = [FlatParameters(module(), dtype, CPU) for _ in range(3)]
    slices = [(0, flats[0].size), (0, 64), (64, flats[0].size)]
    whole, *owners = shards = [
        OptimizerShard(flat, low, high, section, 20, total, 1) for flat, (low, high) in zip(flats, slices, strict=True)
    ]
    for each in shards:
        each.flat.values.fill_(0.25)
        each.reset()
    for step in range(3):
        gradient = torch.randn(whole.flat.size, generator=torch.Generator().manual_seed(step))
        for each in shards:
            each.flat.grads.copy_(gradient)
            each.measure()
        torch.testing.assert_close(owners[0].norm_squared + owners[1].norm_squared, whole.norm_squared)
        for each in shards:
            each.norm_squared.copy_(whole.norm_squared)
            each.update()
            assert not each.flat.grads.any()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.cat([each.state[name] for each in owners]), whole.state[name])
    assert torch.equal(torch.cat([each.master for each in owners]), whole.master)
    assert torch.equal(torch.cat([flats[1].values[:64], flats[2].values[64:]]), whole.flat.values)
    # The peers' slices come from their owners, by a copy between the steps.
    assert (flats[1].values[64:] == 0.25).all() and (flats[2].values[:64] == 0.25).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_keeps_the_state_and_is_counted(bad):
    flat = FlatParameters(module(), torch.float32, CPU)
    total = torch.tensor([0.0, 1.0, 0.0, 0.0])
    optimizer = shard(flat, OptimSection(), total)
    before = optimizer.master.clone()
    flat.grads[3] = bad
    optimizer.measure()
    optimizer.update()
    assert torch.equal(optimizer.master, before) and not optimizer.state["exp_avg"].any() and not flat.grads.any()
    assert float(optimizer.skipped) == 1 and float(optimizer.state["step"]) == 0


def test_a_step_in_which_nothing_counted_changes_nothing():
    flat = FlatParameters(module(), torch.float32, CPU)
    optimizer = shard(flat, OptimSection(), torch.zeros(4))
    before = optimizer.master.clone()
    optimizer.measure()
    optimizer.update()
    assert torch.equal(optimizer.master, before) and float(optimizer.skipped) == 1


def test_the_rate_warms_up_and_falls_to_zero():
    section = OptimSection(lr=2.0, warmup=0.04)
    rates = [float(rate(torch.tensor(float(s)), torch.tensor(100.0), section)) for s in range(100)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4:] == pytest.approx([1 + math.cos(math.pi * (s - 3) / 96) for s in range(4, 100)], abs=1e-5)
    assert rates[-1] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.gpu
def test_the_norm_of_more_than_two_gigabytes_has_the_same_bits_each_time():
    gradient = torch.empty(2**29 + 2**20, device="cuda")
    gradient.normal_(generator=torch.Generator("cuda").manual_seed(0))
    norms = [torch.linalg.vector_norm(gradient).item() for _ in range(4)]
    assert len(set(norms)) == 1 and norms[0] == pytest.approx(gradient.numel() ** 0.5, rel=1e-3)
