"""What autotuners chose, saved and restored. The kernel is Triton's own autotuner over a function that is never run."""

import sys
import types

import pytest
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from draftgraph.capture import tuning
from draftgraph.capture.errors import CaptureFailure


@triton.jit
def copy_kernel(x, out, N, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < N), mask=offsets < N)


CANDIDATES = [triton.Config({"BLOCK": 64}, num_warps=2, num_stages=2), triton.Config({"BLOCK": 128}, num_warps=4)]


@pytest.fixture
def tuner(monkeypatch):
    """An autotuned kernel in a module of a package named fla, wrapped as fla wraps its kernels."""
    tuned = triton.autotune(CANDIDATES, key=["N"])(copy_kernel)
    module = types.ModuleType("fla.a_test")
    module.copy_kernel = triton.heuristics({"N": lambda args: args["N"]})(tuned)
    monkeypatch.setitem(sys.modules, "fla.a_test", module)
    assert isinstance(tuned, Autotuner)
    return tuned


def test_restored_choices_are_those_that_were_saved(tuner, tmp_path):
    tuner.cache[(64, "torch.bfloat16", True)] = CANDIDATES[0]
    tuner.cache[(4096, "torch.bfloat16", None)] = CANDIDATES[1]
    tuning.save(tmp_path / "tuning.json")
    tuner.cache.clear()
    saved = tuning.restore(tmp_path / "tuning.json")
    assert {key: str(config) for key, config in tuner.cache.items()} == {
        (64, "torch.bfloat16", True): str(CANDIDATES[0]),
        (4096, "torch.bfloat16", None): str(CANDIDATES[1]),
    }
    tuning.refuse_new(saved)


def test_a_choice_that_was_not_saved_is_refused_by_name(tuner, tmp_path):
    tuner.cache[(64,)] = CANDIDATES[0]
    tuning.save(tmp_path / "tuning.json")
    saved = tuning.restore(tmp_path / "tuning.json")
    tuner.cache[(128,)] = CANDIDATES[0]
    with pytest.raises(CaptureFailure, match=r"test_capture_tuning\.copy_kernel was tuned anew for \[128\]"):
        tuning.refuse_new(saved)


def test_another_choice_than_the_saved_one_and_a_damaged_file_are_refused(tuner, tmp_path):
    path = tmp_path / "tuning.json"
    tuner.cache[(64,)] = CANDIDATES[0]
    tuning.save(path)
    saved = tuning.restore(path)
    tuner.cache[(64,)] = CANDIDATES[1]
    with pytest.raises(CaptureFailure, match=r"tuned anew for \[64\]"):
        tuning.refuse_new(saved)
    for damage in (path.read_text()[:-9], '{"test_capture_tuning.copy_kernel": {"[64]": {"warps": 1}}}', "[]"):
        path.write_text(damage)
        with pytest.raises(CaptureFailure, match=r"cannot read what kernels tuned themselves to.*Remove the file"):
            tuning.restore(path)


def test_nothing_is_written_where_nothing_was_tuned(tuner, tmp_path):
    tuning.save(tmp_path / "tuning.json")
    assert not (tmp_path / "tuning.json").exists()
