"""Graphs on a real device: replay equals eager, memory is shared and flat, failures are named."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from draftgraph.capture.bits import BitHasher
from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.lane import Lane, Mode
from draftgraph.capture.memory import MemoryWatch
from draftgraph.capture.step import Step
from draftgraph.capture.syncs import count_syncs
from draftgraph.capture.verify import compare, eager_references

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
WIDTH = 1024


@triton.jit
def scale_and_shift_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=inside) * 3.0 + 1.0, mask=inside)


def make_model(seed: int = 0) -> nn.Module:
    """A small network whose gradients are allocated once, in float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(GPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def training_step(model: nn.Module, bucket: str, rows: int) -> Step:
    """Forward and backward of a sum of squares; loss and gradients accumulate."""
    x, loss = torch.zeros(rows, WIDTH, device=GPU), torch.zeros((), device=GPU)
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}

    def run() -> None:
        value = model(x).square().sum()
        value.backward()
        loss.add_(value.detach())

    def fill(number: int) -> None:
        x.copy_(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * rows + number)))
        loss.zero_()
        for gradient in gradients.values():
            gradient.zero_()

    inputs = {"x": x, **dict(model.named_parameters())}
    return Step("drafter", bucket, run, inputs, {"loss": loss, **gradients}, fill, rows * WIDTH)


def elementwise_step(run_on: Callable[[Tensor, Tensor], None]) -> Step:
    x, out = torch.zeros(1000, device=GPU), torch.zeros(1000, device=GPU)

    def fill(number: int) -> None:
        x.fill_(number + 1)

    return Step("target", "r2-s8", lambda: run_on(x, out), {"x": x}, {"out": out}, fill, 0)


def verified_lane(*steps: Step, mode: Mode = "graph", name: str = "drafter 0") -> Lane:
    lane = Lane(name, GPU, mode)
    for step in steps:
        lane.add(step)
    lane.warm_up()
    references = eager_references([lane])
    lane.capture()
    compare([lane], references)
    return lane


def test_two_interleaved_buckets_replay_bit_equal_to_eager_forward_and_backward() -> None:
    model = make_model()
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    lane = verified_lane(training_step(model, "small", 64), training_step(model, "large", 512))
    for step, row in zip(lane.steps, lane.evidence, strict=True):
        assert row.max_difference == 0.0
        assert min(map(len, lane.timings(step))) >= 5
        assert row.eager_ms is not None and row.replay_ms is not None and row.replay_ms > 0
        assert row.capture_seconds is not None and row.capture_seconds > 0
        assert row.nodes is None or row.nodes > 10
    assert [row.bucket for row in lane.evidence] == ["large", "small"]
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == addresses
    lane.close()


def test_gradients_of_several_replays_add_up() -> None:
    model = make_model()
    step = training_step(model, "b", 64)
    lane = verified_lane(step)
    lane.fill(step, 0)
    lane.replay("drafter", "b")
    lane.synchronize()
    once = step.outputs["0.weight.grad"].clone()
    torch.cuda.synchronize()
    lane.replay("drafter", "b")
    lane.synchronize()
    assert torch.equal(step.outputs["0.weight.grad"], once + once)
    lane.close()


def test_the_smaller_graph_reuses_the_memory_of_the_larger() -> None:
    model = make_model()
    lane = verified_lane(training_step(model, "small", 512), training_step(model, "large", 16384))
    large, small = lane.evidence
    assert large.pool_bytes is not None and small.pool_bytes is not None
    assert large.pool_bytes > 2 * 16384 * 2 * WIDTH * 4
    assert small.pool_bytes <= large.pool_bytes // 8
    lane.close()


def test_200_replays_allocate_nothing_and_memory_stays_flat() -> None:
    model = make_model()
    lane = verified_lane(training_step(model, "small", 64), training_step(model, "large", 512))
    watch = MemoryWatch([GPU])
    watch.mark()
    with count_syncs() as syncs:
        for number in range(200):
            lane.replay("drafter", ("small", "large")[number % 2])
            watch.mark()
    lane.synchronize()
    report = watch.report()
    assert report["alloc_count"] == 0 and report["alloc_bytes_per_step"] == 0
    assert report["reserved_range_bytes"] == 0
    assert report["device_used_range_bytes"] in (0, None)
    assert syncs.value == 0
    lane.close()


def test_allocations_after_the_baseline_are_counted() -> None:
    watch = MemoryWatch([GPU])
    watch.mark()
    kept = [torch.empty(1 << 20, dtype=torch.uint8, device=GPU) for _ in range(4)]
    watch.mark()
    watch.mark()
    report = watch.report()
    assert report["alloc_count"] == len(kept)
    assert report["alloc_bytes_per_step"] == len(kept) * (1 << 20) / 2


def test_waits_for_the_device_are_counted() -> None:
    tensor = torch.ones(4, device=GPU)
    with count_syncs() as syncs:
        tensor.add_(1)
        assert syncs.value == 0
        tensor[0].item()
        assert syncs.value == 1
        torch.cuda.current_stream(GPU).synchronize()
        assert syncs.value == 2
        tensor.nonzero()
        counted = syncs.value
    assert counted is not None and counted > 2
    tensor[0].item()
    assert syncs.value == counted


def test_the_census_finds_a_triton_kernel_by_its_python_name() -> None:
    pytest.importorskip("cuda.bindings.driver")

    def run(x: Tensor, out: Tensor) -> None:
        scale_and_shift_kernel[(4,)](x, out, x.numel(), BLOCK=256)
        scale_and_shift_kernel[(4,)](out, out, x.numel(), BLOCK=256)

    lane = verified_lane(elementwise_step(run))
    (row,) = lane.evidence
    assert row.kernels == {"scale_and_shift_kernel": 2}
    assert row.nodes == 2 and row.node_types == {"kernel": 2}
    lane.close()


def test_a_reallocated_parameter_is_refused_before_replay() -> None:
    model = make_model()
    lane = verified_lane(training_step(model, "b", 64))
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(CaptureFailure, match=r"input '0\.weight'.*address"):
        lane.replay("drafter", "b")
    lane.close()


def test_a_number_baked_in_at_capture_is_found() -> None:
    scale = [1.0]

    def run(x: Tensor, out: Tensor) -> None:
        out.copy_(x * scale[0])

    step = elementwise_step(run)
    x = step.inputs["x"]

    def fill(number: int) -> None:
        x.fill_(1.0)
        scale[0] = float(number)

    changing = Step(step.step, step.bucket, step.run, step.inputs, step.outputs, fill, 0)
    with pytest.raises(CaptureFailure, match=r"output 'out'.*fixed at capture"):
        verified_lane(changing)


def test_an_eager_lane_on_a_gpu_verifies_without_graphs() -> None:
    lane = verified_lane(training_step(make_model(), "b", 64), mode="eager")
    (row,) = lane.evidence
    assert row.max_difference == 0.0 and row.eager_ms is not None
    assert row.nodes is row.pool_bytes is row.replay_ms is None
    lane.close()


def test_two_lanes_that_overlap_do_not_disturb_each_other() -> None:
    steps = [training_step(make_model(seed), f"b{seed}", 512) for seed in range(2)]
    lanes = [verified_lane(step, name=f"drafter {number}") for number, step in enumerate(steps)]
    alone = []
    for lane, step in zip(lanes, steps, strict=True):
        lane.fill(step, 0)
        for _ in range(20):
            lane.replay(step.step, step.bucket)
        lane.synchronize()
        alone.append({name: tensor.clone() for name, tensor in step.outputs.items()})
        torch.cuda.synchronize()
    for lane, step in zip(lanes, steps, strict=True):
        lane.fill(step, 0)
    for _ in range(20):
        for lane, step in zip(lanes, steps, strict=True):
            lane.replay(step.step, step.bucket)
    for lane, step, expected in zip(lanes, steps, alone, strict=True):
        lane.synchronize()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in step.outputs.items())
        lane.close()


def test_the_hash_is_the_same_on_both_devices() -> None:
    tensor = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        value = tensor.to(dtype)
        on_cpu = BitHasher(torch.device("cpu")).digest(value).tolist()
        assert BitHasher(GPU).digest(value.to(GPU)).tolist() == on_cpu


# The end of a script that defines `device`, `x` and `run`: its capture fails, and it says why.
FAILS_TO_CAPTURE = """
lane = Lane("target 0", device, "graph")
lane.add(Step("target", "r2-s8", run, {"x": x}, {"x": x}, lambda number: None, 0))
lane.warm_up()
try:
    lane.capture()
except CaptureFailure as error:
    print(error)
    sys.exit(4)
"""
READS_BACK = f"""
import sys, torch
from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
device = torch.device("cuda", 0)
x = torch.zeros(8, device=device)
def run():
    x.add_(1)
    if x.sum().item() > 0:
        x.zero_()
{FAILS_TO_CAPTURE}"""


def in_a_process(script: Path, content: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A failed capture leaves the allocator and the stream unusable, so it gets a process of its own."""
    script.write_text(content)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "1000"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_a_step_that_reads_a_value_back_fails_with_its_bucket_and_its_line(tmp_path: Path) -> None:
    result = in_a_process(tmp_path / "reads_back.py", READS_BACK)
    assert result.returncode == 4, result.stderr
    assert "step 'target' of bucket 'r2-s8'" in result.stdout
    assert "reads_back.py:10 `if x.sum().item() > 0:`" in result.stdout
    assert "keep the value in a tensor on the device" in result.stdout
