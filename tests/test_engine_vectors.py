"""The engine's step against vectors of one DFlash step that nobody here wrote (SpecForge 0.2.0, float32, CPU)."""

import pytest
import torch
import torch.nn.functional as F
from vectors_step import NAMES, differences, drafter_lane, read_vector, relative

from draftgraph.engine.models.drafter import block_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_equal_the_peers_step_on_padded_buckets(name):
    vector = read_vector(name)
    lane, bucket = drafter_lane(vector, CPU)
    lane.forward_backward(lane.batch.views[bucket])
    found = differences(vector, lane, bucket)
    assert len(found) == len([k for k in vector.tensors if k.startswith("expected.")]) - 1  # all but hidden
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("name", NAMES)
def test_hidden_output_equals_the_peers_and_is_finite_in_invalid_blocks(name):
    vector = read_vector(name)
    lane, bucket = drafter_lane(vector, CPU)
    views = lane.batch.views[bucket]
    positions, valid = views.anchor_positions[0], views.anchor_valid[0]
    tokens = block_tokens(views.input_ids, positions, vector.shape.block_size)[0]
    tokens[..., 1:] = vector.shape.mask_token_id
    hidden = lane.drafter(views.taps.nan_to_num(), F.embedding(tokens, lane.parts.embedding), positions, valid)
    rows, anchors = vector.tensors["anchor_valid"].shape
    expected = vector.tensors["expected.hidden"]
    for r in range(rows):
        of_row = vector.tensors["anchor_valid"][r]
        assert relative(hidden[r][: int(of_row.sum())], expected[r][of_row]) <= 1e-5
    assert hidden[~valid].isfinite().all()
    assert anchors < hidden.shape[1] and rows < hidden.shape[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_float32_step_equals_the_peers_on_a_gpu(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    vector = read_vector(name)
    lane, bucket = drafter_lane(vector, torch.device("cuda", 0), "graph")
    weights = lane.flat.values.clone()
    lane.lane.warm_up(3)
    lane.lane.capture()
    with lane.lane.on_stream():
        next(iter(lane.lane.steps)).fill(0)
        lane.flat.values.copy_(weights)
        views = lane.batch.views[bucket]
        views.taps[: vector.tensors["input_ids"].shape[0], : vector.tensors["input_ids"].shape[1]] = vector.tensors[
            "target_hidden"
        ].cuda()
        lane.clear()
    lane.replay(bucket)
    torch.cuda.synchronize()
    found = differences(vector, lane, bucket)
    lane.lane.close()
    assert max(found.values()) <= 1e-4, found
