"""Many logical devices on one GPU: what idles why, the drafters' check, and the prediction beside the run."""

import pytest
import torch
from rich.console import Console
from tiny import ordinary_rows, tiny_profile

from draftgraph.engine.errors import RunError
from draftgraph.engine.run.reduce import Reduction
from draftgraph.engine.train import train

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def profile_of(folder, targets, drafters, **changes):
    placement = {"targets": [GPU] * targets, "drafters": [GPU] * drafters, "look_ahead": 2}
    return tiny_profile(
        folder,
        target={"dtype": "bfloat16"},
        capture={"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
        placement=placement,
        optim={"accumulate": 4},
        rows=ordinary_rows(64),
        **changes,
    )


def test_lanes_are_measured_without_a_wait_and_their_checks_cost_no_allocation(tmp_path):
    profile = profile_of(tmp_path, 2, 2, run={"steps": 80}, checkpoint={"every": 0})
    summary = train(profile, tmp_path / "run", False, Console(quiet=True))
    assert set(summary["lane_time"]) == {"target 0", "target 1", "drafter 0", "drafter 1"}
    for shares in summary["lane_time"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and 0 < shares["work"] <= 1
    assert summary["host_syncs_per_step"] == 0 and summary["alloc_bytes_per_step"] == 0
    assert summary["step_ms"] > 0 and summary["predicted_step_ms"] > 0


def test_a_drafter_that_differs_by_a_bit_is_found_on_a_gpu(tmp_path, monkeypatch):
    real, calls = Reduction.spread, []

    def spread(self, index, drafter):
        real(self, index, drafter)
        calls.append(index)
        if len(calls) > len(self.drafters) and index == 1:
            drafter.flat.values[:1].view(torch.int16).bitwise_xor_(1)

    monkeypatch.setattr(Reduction, "spread", spread)
    with pytest.raises(RunError, match=r"drafter 1 .* does not hold the parameters of drafter 0"):
        train(profile_of(tmp_path, 1, 2), tmp_path / "run", False, Console(quiet=True))
