"""Several targets and drafters on logical devices: the weights of one of each, the same bits, and their check."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import deal_as_for, tiny_profile

from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint, equality
from draftgraph.engine.run.equality import EqualityCheck
from draftgraph.engine.run.reduce import Reduction
from draftgraph.engine.run.streams import Event
from draftgraph.engine.train import train

QUIET = Console(quiet=True)


def many(folder, targets, drafters, **changes):
    placement = {"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "look_ahead": 2}
    return tiny_profile(folder, placement=placement, optim={"accumulate": 6}, **changes)


def masters(folder, step=6):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "state.safetensors")


@pytest.mark.parametrize(("targets", "drafters"), [(2, 2), (5, 3)])
def test_many_devices_train_the_weights_of_one_of_each(tmp_path, monkeypatch, targets, drafters):
    deal_as_for(drafters, monkeypatch)
    train(tiny_profile(tmp_path, optim={"accumulate": 6}), tmp_path / "one", False, QUIET)
    train(many(tmp_path, targets, drafters), tmp_path / "many", False, QUIET)
    left, right = masters(tmp_path / "one"), masters(tmp_path / "many")
    for name in (name for name in left if name.startswith("master")):
        assert torch.linalg.vector_norm(left[name] - right[name]) < 1e-4 * torch.linalg.vector_norm(left[name]), name


def test_five_targets_and_three_drafters_give_the_same_bits_twice(tmp_path):
    profile = many(tmp_path, 5, 3)
    for name in ("a", "b"):
        train(profile, tmp_path / name, False, QUIET)
    left, right = masters(tmp_path / "a"), masters(tmp_path / "b")
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("every", [1, equality.EVERY])
def test_a_drafter_whose_bits_differ_ends_the_run_before_they_are_written(tmp_path, monkeypatch, every):
    monkeypatch.setattr(equality, "EVERY", every)
    real, calls = Reduction.spread, []

    def spread(self, index, drafter):
        real(self, index, drafter)
        calls.append(index)
        if len(calls) >= 5 * len(self.drafters) and index == len(self.drafters) - 1:
            # A bit of what drafter 1 sends to the last one, from the fourth step on; the first call is warm-up's.
            low = self.drafters[1].optimizer.low
            drafter.flat.values[low : low + 1].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(Reduction, "spread", spread)
    with pytest.raises(RunError, match=r"drafter 2 \(cpu\) does not hold the parameters of .*: slice 1"):
        train(many(tmp_path, 1, 3), tmp_path / "run", False, QUIET)
    assert [path.name for path in checkpoint.found(tmp_path / "run" / "checkpoints")] == ["step-000003"]


def test_a_check_that_is_late_skips_the_next_and_gives_way_to_that_of_a_checkpoint():
    class Late(Event):
        over = False

        def happened(self):
            return self.over

    cpu = torch.device("cpu")
    lane = SimpleNamespace(name="drafter 0", device=cpu, stream=None, replay=lambda step: None)
    check = EqualityCheck([SimpleNamespace(checksums=torch.tensor([1, i]), device=cpu, lane=lane) for i in (2, 3)])
    check.arrived = [Late(cpu), Late(cpu)]
    begun = []
    for step, now in ((20, False), (40, False), (43, True), (60, False)):
        check.after(step, now)
        begun.append(check.step)
    assert begun == [20, 20, 43, 43]
    Late.over = True
    with pytest.raises(RunError, match=r"after step 43 drafter 1 \(cpu\) does not hold the parameters .*: slice 1"):
        check.look(wait=False)
