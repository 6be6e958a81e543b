"""Verification on eager lanes: it passes what only depends on its inputs, and finds what does not."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.capture.verify import compare, eager_references

CPU = torch.device("cpu")


def verified(lane: Lane) -> Lane:
    lane.warm_up(rounds=1)
    references = eager_references([lane])
    lane.capture()
    compare([lane], references)
    return lane


def lane_of(*steps: Step) -> Lane:
    lane = Lane("drafter 0", CPU, "eager")
    for step in steps:
        lane.add(step)
    return lane


def regression_step(bucket: str, rows: int, weight: torch.Tensor) -> Step:
    """Forward and backward of a tiny regression; the gradient accumulates in place."""
    x, loss = torch.zeros(rows, 3), torch.zeros(())

    def run() -> None:
        value = (x @ weight).square().sum()
        value.backward()
        loss.add_(value.detach())

    def fill(number: int) -> None:
        x.copy_(torch.randn(rows, 3, generator=torch.Generator().manual_seed(number)))
        weight.grad.zero_()  # type: ignore[union-attr]
        loss.zero_()

    assert weight.grad is not None
    return Step("drafter", bucket, run, {"x": x}, {"loss": loss, "weight.grad": weight.grad}, fill, rows)


def simple_step(run: Callable[[Tensor, Tensor], object], reset: bool = True, value: float = 1.0) -> Step:
    """One input and one output of 4 elements; run(out, x)."""
    x, out = torch.zeros(4), torch.zeros(4)

    def issue() -> None:
        run(out, x)

    def fill(number: int) -> None:
        x.fill_(number + value)
        if reset:
            out.zero_()

    return Step("target", "b", issue, {"x": x}, {"out": out}, fill, 0)


def test_buckets_that_share_a_gradient_verify_and_keep_its_address() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    weight.grad = torch.zeros(3, 2)
    address = weight.grad.data_ptr()
    lane = verified(lane_of(regression_step("small", 2, weight), regression_step("large", 5, weight)))
    assert [row.max_difference for row in lane.evidence] == [0.0, 0.0]
    assert weight.grad.data_ptr() == address


def test_a_step_that_reads_stale_state_is_found() -> None:
    with pytest.raises(CaptureFailure, match=r"lane 'drafter 0': output 'out' of step 'target' of bucket 'b'.*state"):
        verified(lane_of(simple_step(Tensor.add_, reset=False)))


def test_padding_left_over_from_another_bucket_is_found() -> None:
    buffer, seen = torch.zeros(8), torch.zeros(())

    def fill_large(number: int) -> None:
        buffer.fill_(number + 1.0)

    def fill_small(number: int) -> None:
        buffer[:4].fill_(number + 1.0)

    def run() -> None:
        seen.copy_(buffer.sum())

    large = Step("target", "large", run, {}, {"seen": seen}, fill_large, 8)
    small = Step("target", "small", run, {}, {"seen": seen}, fill_small, 4)
    with pytest.raises(CaptureFailure, match="bucket 'small'"):
        verified(lane_of(large, small))


def test_a_step_that_is_not_deterministic_is_called_so() -> None:
    with pytest.raises(CaptureFailure, match="two eager runs of this round differ"):
        verified(lane_of(simple_step(lambda out, x: out.normal_())))


def test_a_nan_that_repeats_bit_for_bit_is_no_difference() -> None:
    lane = verified(lane_of(simple_step(Tensor.copy_, value=math.nan)))
    assert lane.evidence[0].max_difference == 0.0
