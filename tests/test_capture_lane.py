"""The life cycle of a lane and its guards, in the eager mode over static buffers."""

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from draftgraph.capture.errors import CaptureFailure, DeviceMemoryExhausted
from draftgraph.capture.graph import _failure
from draftgraph.capture.lane import Lane
from draftgraph.capture.memory import MemoryWatch
from draftgraph.capture.step import Step
from draftgraph.capture.syncs import count_syncs

CPU = torch.device("cpu")


def square_step(bucket: str, size: int, predicted_bytes: int = 0) -> Step:
    """out = x * x, accumulated into total."""
    x, out, total = torch.zeros(size), torch.zeros(size), torch.zeros(())

    def run() -> None:
        torch.mul(x, x, out=out)
        total.add_(out.sum())

    def fill(number: int) -> None:
        x.fill_(number + 2)
        total.zero_()

    return Step("target", bucket, run, {"x": x}, {"out": out, "total": total}, fill, predicted_bytes)


def ready_lane(*steps: Step) -> Lane:
    lane = Lane("target 0", CPU, "eager")
    for step in steps:
        lane.add(step)
    lane.warm_up(rounds=2)
    lane.capture()
    return lane


def test_replay_runs_the_step_over_its_static_buffers() -> None:
    small, large = square_step("r1-s2", 2), square_step("r1-s4", 4)
    lane = ready_lane(small, large)
    large.inputs["x"].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    large.outputs["total"].zero_()
    address = large.outputs["out"].data_ptr()
    lane.replay("target", "r1-s4")
    lane.replay("target", "r1-s4")
    assert large.outputs["out"].tolist() == [1.0, 4.0, 9.0, 16.0]
    assert large.outputs["total"].item() == 60.0
    assert large.outputs["out"].data_ptr() == address
    assert small.outputs["out"].tolist() == [9.0, 9.0]


def test_steps_are_captured_largest_first() -> None:
    lane = ready_lane(square_step("small", 1, 10), square_step("large", 1, 1000), square_step("middle", 1, 100))
    assert [row.bucket for row in lane.evidence] == ["large", "middle", "small"]


def test_unmeasured_evidence_is_none() -> None:
    (row,) = ready_lane(square_step("b", 1)).evidence
    assert (row.lane, row.device, row.step, row.bucket) == ("target 0", "cpu", "target", "b")
    assert row.eager_ms is not None and row.eager_ms > 0
    assert row.nodes is row.kernels is row.pool_bytes is row.replay_ms is row.capture_seconds is None
    assert row.max_difference is None


def test_a_sealed_lane_refuses_another_step_and_another_capture() -> None:
    lane = ready_lane(square_step("b", 1))
    for forbidden in (lambda: lane.add(square_step("c", 1)), lane.capture, lane.warm_up):
        with pytest.raises(CaptureFailure, match="sealed"):
            forbidden()


def test_replay_refuses_a_reallocated_input() -> None:
    step = square_step("b", 4)
    lane = ready_lane(step)
    step.inputs["x"].data = step.inputs["x"].clone()
    with pytest.raises(CaptureFailure, match=r"input 'x' of step 'target' of bucket 'b'.*address.*copy_"):
        lane.replay("target", "b")


def test_replay_refuses_a_replaced_input_of_another_shape_or_dtype() -> None:
    step = square_step("b", 4)
    lane = ready_lane(step)
    for changed, field in ((torch.zeros(5), "shape"), (torch.zeros(4, dtype=torch.bfloat16), "dtype")):
        step.inputs["x"] = changed  # type: ignore[index]
        with pytest.raises(CaptureFailure, match=field):
            lane.replay("target", "b")


def test_replay_refuses_what_the_host_changed_since_the_capture() -> None:
    taps = [(1, 4)]
    step = dataclasses.replace(square_step("b", 4), baked=lambda: taps[0])
    lane = ready_lane(step)
    lane.replay("target", "b")
    taps[0] = (1, 5)
    with pytest.raises(CaptureFailure, match=r"captured with \(1, 4\) and would now run with \(1, 5\)"):
        lane.replay("target", "b")


def test_a_shape_that_matches_no_bucket_is_refused_with_those_that_exist() -> None:
    lane = ready_lane(square_step("r1-s2", 2), square_step("r1-s4", 4))
    with pytest.raises(CaptureFailure, match=r"no step 'target' of bucket 'r9-s9'.*'r1-s2', .*'r1-s4'"):
        lane.replay("target", "r9-s9")


def test_the_guard_costs_less_than_20_microseconds_for_8_tensors() -> None:
    inputs = {f"x{i}": torch.zeros(4, 4) for i in range(8)}
    step = Step("drafter", "b", lambda: None, inputs, {}, lambda number: None, 0)
    lane = ready_lane(step)
    guard = lane._entries["drafter", "b"].guard
    assert guard is not None
    best = min(_seconds(guard.check, 500) for _ in range(5))
    assert best < 20e-6


def _seconds(call: Callable[[], None], repeats: int) -> float:
    # Time of this thread: other work on the machine does not count.
    started = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - started) / repeats


def test_a_closed_lane_holds_no_steps() -> None:
    lane = ready_lane(square_step("b", 1))
    lane.close()
    assert lane.steps == []
    with pytest.raises(CaptureFailure, match="sealed"):
        lane.add(square_step("b", 1))


def refused_by_capture(message: str) -> None:
    raise RuntimeError(message)


def test_a_capture_failure_names_the_bucket_the_line_and_what_to_change() -> None:
    text = "CUDA error: operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA"
    try:
        refused_by_capture(text)
    except RuntimeError as error:
        message = str(_failure(square_step("r4-s512", 1), CPU, error))
    assert "bucket 'r4-s512'" in message and "not permitted when stream is capturing" in message
    assert "test_capture_lane.py" in message and ".item()" in message and "TORCH_USE" not in message


def test_running_out_of_memory_names_the_step_and_the_device() -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 900.00 GiB")

    lane = Lane("drafter 0", CPU, "eager")
    lane.add(Step("drafter", "big", run, {}, {}, lambda number: None, 0))
    with pytest.raises(DeviceMemoryExhausted, match=r"bucket 'big' ran out of memory on cpu.*900\.00 GiB") as error:
        lane.warm_up()
    assert error.value.device == CPU


def test_without_a_gpu_memory_and_sync_figures_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryWatch([CPU])
    for _ in range(3):
        watch.mark()
    assert set(watch.report().values()) == {None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with count_syncs() as syncs:
        torch.zeros(1).item()
    assert syncs.value is None
