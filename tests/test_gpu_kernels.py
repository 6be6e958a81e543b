"""The compiled anchor-attention kernels on a GPU: error, repeatability, capture, full size."""

import pytest
import torch
from attention_cases import TOLERANCE, assert_close, draw_inputs, empty_is_nan, poison_pads, run
from torch import Tensor

from draftgraph.kernels import reference
from draftgraph.kernels.anchor_attention import anchor_attention

pytestmark = pytest.mark.gpu

WINDOWS = pytest.mark.parametrize("window", [None, 100])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])


@WINDOWS
@HEAD_DIMS
def test_float32_equals_the_twin(head_dim: int, window: int | None) -> None:
    inputs = draw_inputs((2, 333, 37, 10, 6, 2, head_dim), (37, 20), device="cuda")
    dout = torch.randn_like(inputs[0])
    with empty_is_nan():
        found = run(anchor_attention, inputs, window, dout)
    assert_close(found, run(reference.anchor_attention, inputs, window, dout), "float32 kernel, twin")


@pytest.mark.parametrize("rule", ["speculators", "bidirectional"])
@pytest.mark.parametrize("window", [7, 100])
def test_other_sliding_rules_equal_the_twin(window: int, rule: str) -> None:
    inputs = draw_inputs((2, 333, 37, 10, 6, 2, 64), (37, 20), device="cuda")
    dout = torch.randn_like(inputs[0])
    with empty_is_nan():
        found = run(anchor_attention, inputs, window, dout, rule)
    assert_close(found, run(reference.anchor_attention, inputs, window, dout, rule), "float32 kernel, twin")


@WINDOWS
@HEAD_DIMS
@pytest.mark.parametrize("block_size", [4, 10, 16])
def test_bfloat16_is_near_the_float32_truth(block_size: int, head_dim: int, window: int | None) -> None:
    inputs = draw_inputs((2, 333, 37, block_size, 8, 2, head_dim), (37, 20), torch.bfloat16, "cuda")
    dout = torch.randn_like(inputs[0])
    truth = run(reference.anchor_attention, [*(t.float() for t in inputs[:5]), *inputs[5:]], window, dout.float())
    with empty_is_nan():
        found = run(anchor_attention, poison_pads(inputs), window, dout)
    assert_close(found, truth, "bfloat16 kernel, float32 twin")


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_need_no_mask_are_near_the_float32_truth(head_dim: int, window: int | None) -> None:
    inputs = draw_inputs((2, 1500, 70, 16, 8, 2, head_dim), (70, 50), torch.bfloat16, "cuda")
    dout = torch.randn_like(inputs[0])
    truth = run(reference.anchor_attention, [*(t.float() for t in inputs[:5]), *inputs[5:]], window, dout.float())
    with empty_is_nan():
        found = run(anchor_attention, poison_pads(inputs), window, dout)
    assert_close(found, truth, "bfloat16 kernel, float32 twin")


@WINDOWS
def test_two_runs_give_equal_bits(window: int | None) -> None:
    inputs = draw_inputs((4, 1000, 128, 16, 8, 2, 128), (128, 100, 1, 0), torch.bfloat16, "cuda")
    dout = torch.randn_like(inputs[0])
    first = run(anchor_attention, inputs, window, dout)
    for _ in range(3):
        for a, b in zip(first, run(anchor_attention, inputs, window, dout), strict=True):
            assert torch.equal(a, b)


@WINDOWS
def test_replay_equals_eager_on_changing_inputs(window: int | None) -> None:
    sizes = (2, 500, 64, 16, 8, 2, 128)
    rounds = [((64, 40), 1), ((3, 0), 2), ((64, 64), 3)]

    def inputs_of(num_valid: tuple[int, ...], seed: int) -> list[Tensor]:
        return draw_inputs(sizes, num_valid, torch.bfloat16, "cuda", seed)

    static = inputs_of((10, 10), 0)
    dout = torch.randn_like(static[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(anchor_attention, static, window, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(anchor_attention, static, window, dout)
    for num_valid, seed in rounds:
        fresh = inputs_of(num_valid, seed)
        for buffer, tensor in zip(static, fresh, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        for a, b in zip(captured, run(anchor_attention, fresh, window, dout), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 2048])
def test_full_size_rows_equal_the_twin_of_a_few_blocks(window: int | None) -> None:
    inputs = draw_inputs((2, 4096, 512, 16, 32, 8, 128), (512, 500), torch.bfloat16, "cuda")
    found = run(anchor_attention, inputs, window, torch.randn_like(inputs[0]))
    assert all(tensor.isfinite().all() for tensor in found)
    few = torch.arange(0, 512, 37, device="cuda")
    q, context_k, context_v, block_k, block_v, positions, valid = inputs
    drafts = [tensor[:, few].float() for tensor in (q, block_k, block_v)]
    truth = reference.anchor_attention(
        drafts[0],
        context_k.float(),
        context_v.float(),
        *drafts[1:],
        positions[:, few],
        valid[:, few],
        window,
        128**-0.5,
    )
    difference = (found[0][:, few].float() - truth).abs().max()
    assert difference <= TOLERANCE["bfloat16 kernel, float32 twin"] * truth.abs().max()
