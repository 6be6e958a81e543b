"""AdamW's kernel and its twin against torch.optim.AdamW in float64, in the interpreter without a GPU."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from draftgraph.kernels import fused, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("ops", [fused, reference], ids=["kernel", "twin"])
# The interpreter cuts a bfloat16 off where a GPU rounds.
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1


class Flat:
    """What a step reads and writes; `first` elements lie before and behind it, which no step may touch."""

    def __init__(self, size: int, dtype: torch.dtype = LOW, first: int = 0):
        generator = torch.Generator(DEVICE).manual_seed(size)
        self.slice = slice(first, first + size)
        whole = torch.zeros(4, size + 2 * first, device=DEVICE)
        whole[1].normal_(generator=generator)
        self.whole = [*whole.unbind(), whole[1].to(dtype)]
        self.grads, self.master, self.exp_avg, self.exp_avg_sq, self.values = (t[self.slice] for t in self.whole)
        self.lr, self.step, self.grad_scale, self.skip = torch.tensor([1e-2, 0.0, 1.0, 0.0], device=DEVICE).unbind()

    def run(self, ops: ModuleType, decay: float = DECAY) -> None:
        values = None if self.values.dtype == torch.float32 else self.values
        states = (self.grads, self.master, self.exp_avg, self.exp_avg_sq, values)
        ops.adamw_(*states, self.lr, self.step, self.grad_scale, self.skip, BETAS, EPS, decay)

    def states(self) -> list[Tensor]:
        return [self.master, self.exp_avg, self.exp_avg_sq, self.values, self.step]


def gradient_of(step: int, size: int) -> Tensor:
    """Of a size that no step before had: a moment that is not kept, or a wrong correction, shows."""
    generator = torch.Generator(DEVICE).manual_seed(step)
    return torch.randn(size, generator=generator, device=DEVICE) * 10.0 ** (step % 5 - 3)


@BOTH
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_steps_are_those_of_torch_in_float64(ops: ModuleType, size: int, decay: float) -> None:
    flat = Flat(size)
    truth = flat.master.double().clone().requires_grad_()
    theirs = torch.optim.AdamW([truth], betas=BETAS, eps=EPS, weight_decay=decay)
    for step in range(8):
        gradient = gradient_of(step, size)
        flat.grads.copy_(gradient)
        flat.grad_scale.fill_(3.0 + step)
        flat.lr.fill_(0.01 / (step + 1))
        truth.grad = gradient.double() / (3.0 + step)
        theirs.param_groups[0]["lr"] = 0.01 / (step + 1)
        theirs.step()
        flat.run(ops, decay)
        assert not flat.grads.any() and flat.step.item() == step + 1
        torch.testing.assert_close(flat.master.double(), truth.detach(), rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            expected = theirs.state[truth][name]
            assert (getattr(flat, name) - expected).abs().max() <= 1e-6 * expected.abs().max(), name
        assert torch.equal(flat.values, flat.master.to(LOW))


@BOTH
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_keeps_every_bit_and_zeroes_the_gradient(ops: ModuleType, bad: float) -> None:
    flat = Flat(3000)
    flat.grads.copy_(gradient_of(0, 3000))
    flat.run(ops)
    before = [t.clone() for t in flat.states()]
    flat.grads.fill_(bad)
    flat.skip.fill_(1.0)
    flat.run(ops)
    assert all(torch.equal(a, b) for a, b in zip(before, flat.states(), strict=True)) and not flat.grads.any()
    # And the next step is that of a run which never saw the skipped one.
    flat.skip.fill_(0.0)
    flat.grads.copy_(gradient_of(1, 3000))
    flat.run(ops)
    other = Flat(3000)
    for step in range(2):
        other.grads.copy_(gradient_of(step, 3000))
        other.run(ops)
    assert all(torch.equal(a, b) for a, b in zip(other.states(), flat.states(), strict=True))


@BOTH
def test_a_slice_leaves_what_lies_around_it(ops: ModuleType) -> None:
    flat, alone = Flat(1000, first=64), Flat(1000)
    flat.whole[0].fill_(7.0)
    for ours, other in zip(flat.states(), alone.states(), strict=True):
        ours.copy_(other)
    before = [t.clone() for t in flat.whole]
    alone.grads.fill_(7.0)
    flat.run(ops)
    alone.run(ops)
    for whole, old, name in zip(
        flat.whole, before, ("grads", "master", "exp_avg", "exp_avg_sq", "values"), strict=True
    ):
        old[flat.slice] = getattr(alone, name)
        assert torch.equal(whole, old), name


@BOTH
def test_float32_parameters_are_their_own_masters(ops: ModuleType) -> None:
    flat, low = Flat(1500, torch.float32), Flat(1500)
    for each in (flat, low):
        each.grads.copy_(gradient_of(0, 1500))
        each.run(ops)
    assert torch.equal(flat.master, low.master)


@pytest.mark.gpu
def test_two_runs_and_a_replay_give_equal_bits_at_full_size() -> None:
    size = 2**27 + 48

    def after_two(captured: bool) -> list[Tensor]:
        flat = Flat(size)
        graph = torch.cuda.CUDAGraph()
        if captured:
            flat.run(fused)  # compiles
            with torch.cuda.graph(graph):
                flat.run(fused)
            for fresh, used in zip(Flat(size).states(), flat.states(), strict=True):
                used.copy_(fresh)
        for step in range(2):
            flat.grads.copy_(gradient_of(step, size))
            if captured:
                graph.replay()
            else:
                flat.run(fused)
        return flat.states()

    first = after_two(captured=False)
    for captured in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(first, after_two(captured), strict=True))


@pytest.mark.gpu
def test_the_last_element_behind_two_gigabytes_is_reached() -> None:
    size = 2**29 + 2**20 + 3
    flat, few = Flat(size), slice(size - 5000, size)
    tail = Flat(5000)
    for ours, other in zip(tail.states(), (flat.master, flat.exp_avg, flat.exp_avg_sq, flat.values), strict=False):
        ours.copy_(other[few])
    flat.grads.fill_(0.5)
    tail.grads.fill_(0.5)
    flat.run(fused)
    tail.run(fused)
    assert torch.equal(flat.master[few], tail.master) and torch.equal(flat.values[few], tail.values)
    assert not flat.grads.any()
