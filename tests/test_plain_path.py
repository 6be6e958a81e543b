"""The comparison of the fast path's loss with the plain one's: what it counts, what its patch reaches."""

import importlib.util
import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.config import load_profile
from draftgraph.engine.models import drafter, loss
from draftgraph.engine.models.forward import refuse_fp8
from draftgraph.engine.run import optimizer
from draftgraph.engine.train import train
from draftgraph.kernels import reference
from draftgraph.profiles.load import PEERS


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("plain_path", PEERS / "plain_path.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_windows_are_compared_with_the_fast_path_and_another_seed_is_the_measure(script):
    fast = [5.0 - 0.01 * i for i in range(50)]
    runs = {"fast": fast, "plain": [x + 0.001 for x in fast], "another seed": [x - 0.02 for x in fast]}
    found = script.compare(runs)
    assert found["loss"]["fast"] == pytest.approx([4.905, 4.705]) and found["agrees"]
    assert found["difference"]["plain"] == pytest.approx({"mean": 0.001, "largest": 0.001})
    assert found["difference"]["another seed"]["mean"] == pytest.approx(0.02)
    lines = script.table(found).splitlines()
    assert lines[1].split() == ["1-20", "4.9050", "4.9060", "4.8850"] and len(lines) == 5
    assert not script.compare({**runs, "plain": [x + 0.03 for x in fast]})["agrees"]


def test_every_variant_of_the_shipped_profile_may_be_trained(script):
    found = script.variants("smollm2-gpu", ["run.seed=7"], 50, fp8=True)
    profiles = {name: load_profile("smollm2-gpu", assignments) for name, assignments in found.items()}
    for profile in profiles.values():
        refuse_fp8(profile)
        assert profile.run.steps == 50 and not profile.eval.every
    assert profiles["another seed"].run.seed == 8 and profiles["fp8 target"].target.precision == "fp8"
    assert profiles["plain"].target.forward == "module"


def test_the_losses_are_those_of_a_run_in_order(script, tmp_path):
    train(tiny_profile(tmp_path), tmp_path / "run", False, Console(quiet=True))
    values = script.losses(tmp_path / "run")
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert len(values) == 6 and values[0] == json.loads(first)["loss"]


def test_the_twins_take_the_place_of_every_kernel_of_the_drafter(script, monkeypatch):
    for module, name in ((drafter, "fused"), (loss, "cross_entropy_kernels"), (optimizer, "fused")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    script.use_twins()
    assert drafter.fused is loss.cross_entropy_kernels is optimizer.fused is reference
    # What of the engine imports a kernel is one of these, a forward of the target, a bench, or decodes.
    root = Path(drafter.__file__).parents[1]
    users = {p.stem for p in root.rglob("*.py") if "from draftgraph.kernels" in p.read_text()}
    decoding = {"cached_delta"}
    assert users <= {"drafter", "loss", "optimizer", "fused", "fused_qwen3_5", "build", "kernels"} | decoding
