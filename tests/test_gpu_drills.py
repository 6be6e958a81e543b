"""Failure drills: each provokes a fault on a GPU and reads the message. Also what warm-up shows of a real graph."""

import json
import re
import threading
from pathlib import Path

import jsonschema
import pytest
import tomli_w
import torch
from rich.console import Console
from rich.progress import Progress
from test_gpu_capture import FAILS_TO_CAPTURE, GPU, in_a_process, make_model, training_step, verified_lane
from tiny import ordinary_rows, profile_values, tiny_profile, write_target

from draftgraph.capture.errors import CaptureFailure
from draftgraph.engine import steps
from draftgraph.engine.build import Engine, build
from draftgraph.engine.errors import CaptureError, RunError
from draftgraph.engine.evidence import check_ops, devices_before
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run.metrics import LateFigures
from draftgraph.engine.train import train
from draftgraph.engine.warmup import warm_up
from draftgraph.profiles.load import WARMUP_SCHEMA

pytestmark = pytest.mark.gpu

ON_GPU = {
    "target": {"dtype": "bfloat16"},
    "capture": {"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
    "placement": {"targets": ["cuda:0"], "drafters": ["cuda:0"]},
}


def warm(tmp_path: Path, **changes: dict) -> tuple[Engine, dict]:
    engine = build(make_plan(tiny_profile(tmp_path, **{**ON_GPU, **changes})))
    evidence = warm_up(engine, Progress(disable=True), devices_before([GPU], torch.bfloat16))
    return engine, evidence


def test_the_evidence_is_of_the_graphs_and_fits_its_schema(tmp_path):
    engine, evidence = warm(tmp_path)
    jsonschema.validate(json.loads(json.dumps(evidence)), json.loads(WARMUP_SCHEMA.read_text()))
    graphs = evidence["graphs"]
    assert len(graphs) == 7 and all(row["max_difference"] == 0.0 for row in graphs)
    for row in graphs:
        assert row["eager_launches"] == sum(row["families"].values()) + row["node_types"].get("memcpy", 0) + row[
            "node_types"
        ].get("memset", 0)
        assert row["replay_launches"] == 1 and row["guard_us"] < 20
    drafter = next(row for row in graphs if row["step"] == "drafter")
    assert drafter["families"]["attention"] == 2 * 4 and drafter["implementations"]["attention"] == ["anchor"]
    assert 0 < drafter["gemm_ceiling_share"] < 1
    (device,) = evidence["devices"]
    assert device["ceiling_tflops"] > 10 and device["graphs"] == 7
    assert device["free_bytes"] < device["free_before_bytes"] <= device["total_bytes"]
    assert all(row["pool_over_largest"] <= 1.1 for row in evidence["lanes"])
    engine.close()


def test_an_op_that_is_not_what_the_profile_demands_is_named_with_what_was_found(tmp_path):
    engine, evidence = warm(tmp_path)
    (found,) = evidence["graphs"][0]["implementations"]["attention"]
    check_ops({"attention": found}, evidence["graphs"], [])
    other = next(name for name in ("cudnn", "flash", "efficient") if name != found)
    with pytest.raises(CaptureError, match=rf"implement attention by {found}, the profile demands {other}"):
        check_ops({"attention": other}, evidence["graphs"], [])
    with pytest.raises(CaptureError, match=r"by no kernel that is known for it.*pip install flash-linear-attention"):
        check_ops({"gated_delta": "fla"}, evidence["graphs"], [])
    check_ops({"gated_delta": "fla"}, evidence["graphs"], ["fla"])
    engine.close()


def test_a_tap_installed_after_the_capture_is_refused(tmp_path):
    engine, _ = warm(tmp_path)
    bucket, target = engine.plan.buckets[0], engine.targets[0]
    engine.rig.targets[0].replay(bucket)
    hook = target.decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureFailure, match=r"captured with Taps.* would now run with Taps.*hooks=.*before warm-up"):
        engine.rig.targets[0].replay(bucket)
    hook.remove()
    target.target_layer_ids = (0, 3)
    with pytest.raises(CaptureFailure, match=r"would now run with Taps\(layers=\(0, 3\)"):
        engine.rig.targets[0].replay(bucket)
    engine.close()


def test_poison_in_a_pad_region_reaches_no_gradient(tmp_path):
    engine, _ = warm(tmp_path)
    drafter = engine.rig.drafters[0]
    for bucket in engine.plan.buckets:
        views, gradients = drafter.batch.views[bucket], []
        for poison in (0.0, float("nan")):
            drafter.clear()
            engine.data.fill(bucket, 1, views)
            torch.cuda.synchronize()
            engine.rig.targets[0].replay(bucket)
            torch.cuda.synchronize()
            for r, length in enumerate(views.lengths.tolist()):
                views.taps[r, length:] = poison
            torch.cuda.synchronize()
            drafter.replay(bucket)
            torch.cuda.synchronize()
            gradients.append(drafter.flat.grads.clone())
        assert gradients[0].isfinite().all() and gradients[0].abs().max() > 0
        assert torch.equal(*gradients)
    engine.close()


def test_a_sealed_table_is_not_captured_again_and_knows_no_other_shape(tmp_path):
    engine, _ = warm(tmp_path)
    lane = engine.rig.drafters[0].lane
    with pytest.raises(CaptureFailure, match=r"'drafter 0' is sealed: it cannot capture"):
        lane.capture()
    with pytest.raises(CaptureFailure, match=r"no step 'drafter' of bucket 'r9-s9-a9'; it holds step 'drafter' of "):
        lane.replay("drafter", "r9-s9-a9")
    engine.close()


def test_a_thread_that_uses_the_gpu_during_the_capture_disturbs_nothing():
    stopped, worked = threading.Event(), []

    def work() -> None:
        stream = torch.cuda.Stream(GPU)
        with torch.cuda.stream(stream):
            while not stopped.is_set():
                # Not the default generator: during a capture torch refuses it to every thread.
                x = torch.full((256, 256), 0.5, device=GPU)
                worked.append((x @ x).sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        lane = verified_lane(training_step(make_model(), "small", 64), training_step(make_model(1), "large", 512))
    finally:
        stopped.set()
        thread.join()
    assert all(row.max_difference == 0.0 for row in lane.evidence) and len(worked) > 10
    lane.close()


class Troubled(LateFigures):
    """Allocates 3 MiB and waits for the device at the fifth step: what a careless metric does."""

    def publish(self, step, published, stream):
        super().publish(step, published, stream)
        if step == 5:
            self.kept = torch.zeros(3 << 20, dtype=torch.uint8, device=GPU)
            self.kept.sum().item()


def test_a_strict_run_ends_where_its_steady_state_breaks_and_a_report_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LateFigures", Troubled)
    for watch in ("report", "strict"):
        profile = tiny_profile(
            tmp_path,
            **{**ON_GPU, "capture": {**ON_GPU["capture"], "watch": watch}},
            run={"steps": 12},
            checkpoint={"every": 6},
            log={"every": 2},
        )
        folder = tmp_path / watch
        if watch == "report":
            summary = train(profile, folder, False, Console(quiet=True))
            assert summary["steps"] == 12 and summary["host_syncs_per_step"] > 0
            text = summary["steady_state"]
        else:
            with pytest.raises(RunError, match=r"capture.watch = 'strict': stopped after step 6, checkpoint") as error:
                train(profile, folder, False, Console(quiet=True))
            assert (folder / "checkpoints" / "step-000006").is_dir()
            text = str(error.value)
        assert re.search(r"broken between step 4 and 6: \d+ allocations, \d+\.\d+ MiB, the first at ", text)
        assert "test_gpu_drills.py" in text and "self.kept = torch.zeros(3 << 20" in text
    assert "waits for the device, the first at test_gpu_drills.py" in summary["steady_state"]


RUNS_OUT = """
import sys, torch
from draftgraph.engine import train, warmup
from draftgraph.engine.cli import main

profile, run, phase = sys.argv[1:]

def leave_little(*_):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**20) / total)

def and_then(function):
    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        leave_little()
        return result
    return wrapped

if phase == "eager":
    train.build = and_then(train.build)
else:
    warmup.eager_references = and_then(warmup.eager_references)
sys.exit(main(["warmup", profile, "--run", run]))
"""


@pytest.mark.parametrize(("phase", "doing"), [("eager", "the eager run of step"), ("capture", "capturing step")])
def test_running_out_of_memory_names_the_graph_the_bytes_and_sizes_that_fit(tmp_path, phase, doing):
    values = profile_values(
        tmp_path,
        rows=ordinary_rows(400),
        **ON_GPU,
        buckets={"context_tokens": 8192, "draft_tokens": 8192, "count": 2},
        drafter={"chunk_slots": 8192},
    )
    values["target"]["model"] = write_target(tmp_path, hidden_size=512, intermediate_size=2048)
    profile = tmp_path / "large.toml"
    profile.write_text(tomli_w.dumps(values))
    result = in_a_process(tmp_path / "drill.py", RUNS_OUT, str(profile), str(tmp_path / "run"), phase)
    assert result.returncode == 4, result.stderr
    assert f"{doing} 'target' of bucket" in result.stderr and "ran out of memory on cuda:0" in result.stderr
    assert "Tried to allocate" in result.stderr and "GiB of tensors" in result.stderr
    assert "`plan` predicts" in result.stderr and "with --set buckets.draft_tokens=4096" in result.stderr
    assert "Traceback" not in result.stderr


TUNES_LATE = (
    """
import sys, torch, triton, triton.language as tl
from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["N"])
@triton.jit
def double_kernel(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, 2 * tl.load(x + offsets, mask=offsets < N), mask=offsets < N)

device = torch.device("cuda", 0)
x = torch.zeros(512, device=device)
def run():
    n = 512 if torch.cuda.is_current_stream_capturing() else 256
    double_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
"""
    + FAILS_TO_CAPTURE
)


def test_a_kernel_that_tunes_itself_inside_the_capture_is_named(tmp_path):
    result = in_a_process(tmp_path / "drill.py", TUNES_LATE)
    assert result.returncode == 4, result.stderr
    assert "step 'target' of bucket 'r2-s8'" in result.stdout
    assert "began to tune itself during the capture" in result.stdout


MISSING = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
from draftgraph.engine.cli import main
sys.exit(main(["warmup", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(
    ("package", "install", "forward"),
    [
        ("causal_conv1d", "causal-conv1d", "module"),
        ("fla", "flash-linear-attention", "module"),
        ("fla", "flash-linear-attention", "auto"),
    ],
)
def test_a_missing_fast_package_is_an_error_with_its_install_command(tmp_path, package, install, forward):
    profile = tmp_path / "hybrid.toml"
    changes = {**ON_GPU, "target": {"dtype": "bfloat16", "forward": forward}}
    profile.write_text(tomli_w.dumps(profile_values(tmp_path, "qwen3_5_text", **changes)))
    result = in_a_process(tmp_path / "drill.py", MISSING, package, str(profile), "--run", str(tmp_path / "run"))
    assert result.returncode == 4, result.stderr
    assert f"pip install {install}" in result.stderr and "qwen3_5" in result.stderr
    assert f'capture.allow_fallback = ["{package}"]' in result.stderr
