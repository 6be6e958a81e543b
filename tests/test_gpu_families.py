"""Families on a real device: captured taps are eager taps are the module's own; what cannot be captured is refused."""

import pytest
import torch
from tiny import MIXTURES, SHAPES, VOCAB, write_target
from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.errors import CaptureError
from draftgraph.engine.models.target import Target, load_model

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
TAPS = (1, 4)
BUCKETS = {"r3-s24": [24, 9, 5], "r2-s64": [64, 33]}  # rows, padded to the first; most windows are 16
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def tiny_target(tmp_path, family: str, dtype: torch.dtype) -> Target:
    return Target(load_model(write_target(tmp_path, family), dtype, GPU), TAPS, 64)


def rows_of(bucket: str, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(VOCAB, (1, length), generator=generator) for length in BUCKETS[bucket]]


def target_step(target: Target, bucket: str) -> Step:
    shape = (len(BUCKETS[bucket]), BUCKETS[bucket][0])
    ids = torch.zeros(shape, dtype=torch.long, device=GPU)
    taps = torch.empty(*shape, len(TAPS) * target.config.hidden_size, dtype=target.dtype, device=GPU)

    def fill(number: int) -> None:
        ids.fill_(number % VOCAB)
        for r, row in enumerate(rows_of(bucket, number)):
            ids[r, : row.shape[1]].copy_(row[0])
        taps.fill_(float("nan"))

    return Step("target", bucket, lambda: target.extract(ids, taps), {"ids": ids}, {"taps": taps}, fill, ids.numel())


@torch.no_grad()
def modules_own(target: Target, ids: Tensor) -> Tensor:
    states = target.decoder(input_ids=ids.to(GPU), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in TAPS], -1).float()


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(SHAPES))
def test_captured_taps_are_eager_taps_are_the_modules_own_and_pads_change_nothing(tmp_path, family, dtype):
    if family in MIXTURES and (dtype == torch.float32 or torch.cuda.get_device_capability(GPU)[0] not in (9, 10)):
        pytest.skip("refused: see the test below")
    target = tiny_target(tmp_path, family, dtype)
    target.check_against_module()
    lane = Lane("target 0", GPU, "graph")
    for bucket in BUCKETS:
        lane.add(target_step(target, bucket))
    lane.warm_up()
    references = eager_references([lane])
    lane.capture()
    compare([lane], references)  # bit for bit, buckets interleaved
    assert [row.max_difference for row in lane.evidence] == [0.0, 0.0]

    for step in lane.steps:
        lane.fill(step, 7)
        lane.replay("target", step.bucket)
        lane.synchronize()
        ids, taps = step.inputs["ids"], step.outputs["taps"].clone()
        assert difference(taps, modules_own(target, ids)) <= ALLOWED[dtype]
        for r, row in enumerate(rows_of(step.bucket, 7)):
            assert difference(taps[r, : row.shape[1]], modules_own(target, row)[0]) <= ALLOWED[dtype]
    lane.close()


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_float32_are_refused_with_what_to_change(tmp_path, family):
    refusal = rf"target family '{family}' is not supported: its layers wait for the device \d+ times.*bfloat16"
    with pytest.raises(CaptureError, match=refusal):
        tiny_target(tmp_path, family, torch.float32).check_against_module()


def test_a_layer_that_waits_for_the_device_is_refused_by_name(tmp_path):
    target = tiny_target(tmp_path, "llama", torch.bfloat16)

    def wait(layer, args):
        args[0].sum().item()

    target.decoder.layers[2].register_forward_pre_hook(wait)
    with pytest.raises(CaptureError, match="'llama' is not supported: its layers wait for the device 1 times"):
        target.check_against_module()


def test_a_family_that_is_no_loop_over_its_layers_is_refused_by_name(tmp_path):
    with pytest.raises(CaptureError, match="target family 'opt' is not supported: its decoder has no rotary_emb"):
        tiny_target(tmp_path, "opt", torch.bfloat16)
