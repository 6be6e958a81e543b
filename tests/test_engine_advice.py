"""What to change where a device runs out of memory: sizes that `plan` itself predicts to be smaller."""

import pytest
import torch
from tiny import ordinary_rows, tiny_profile

from draftgraph.capture.errors import DeviceMemoryExhausted
from draftgraph.engine.advice import advice, predicted_bytes, smaller
from draftgraph.engine.errors import CaptureError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.show import bytes_text
from draftgraph.engine.train import readable_errors

CPU = torch.device("cpu")
LARGE = {"context_tokens": 4096, "draft_tokens": 4096, "count": 2}


def large_plan(tmp_path):
    return make_plan(tiny_profile(tmp_path, rows=ordinary_rows(200), buckets=LARGE, drafter={"chunk_slots": 4096}))


def test_the_advised_sizes_are_predicted_to_need_what_is_said(tmp_path):
    plan = large_plan(tmp_path)
    text = advice(plan, CPU)
    now, then = predicted_bytes(plan, CPU), predicted_bytes(make_plan(smaller(plan.profile, 2)), CPU)
    assert f"predicts {bytes_text(now)} for cpu, " in text and then < 0.75 * now
    assert f" with --set drafter.recompute=true; {bytes_text(then)} with --set buckets" in text
    assert "--set buckets.draft_tokens=2048 buckets.context_tokens=2048 drafter.chunk_slots=2048" in text


def test_a_run_that_cannot_shrink_is_told_so(tmp_path):
    plan = make_plan(
        tiny_profile(tmp_path, buckets={"context_tokens": 64, "draft_tokens": 32}, drafter={"chunk_slots": 4})
    )
    assert "place fewer roles on the device" in advice(plan, CPU)


def test_a_drafter_that_is_too_large_is_not_blamed_on_its_buckets(tmp_path):
    few = {"context_tokens": 64, "draft_tokens": 32}
    plan = make_plan(tiny_profile(tmp_path, buckets=few, drafter={"intermediate_size": 2**20}))
    text = advice(plan, CPU)
    assert "of which models take" in text and "drafter.intermediate_size" in text and "--set buckets" not in text


def test_running_out_of_memory_reaches_the_user_with_the_advice(tmp_path):
    with pytest.raises(CaptureError) as raised, readable_errors(large_plan(tmp_path)):
        raise DeviceMemoryExhausted("capturing step 'drafter' of bucket 'r4-s48-a8' ran out of memory", CPU)
    assert str(raised.value).startswith(
        "capturing step 'drafter' of bucket 'r4-s48-a8' ran out of memory. `plan` predicts"
    )
    assert "--set buckets.draft_tokens=2048" in str(raised.value)
