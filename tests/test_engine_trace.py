"""`draftgraph trace`: what it says on a CPU, and what a GPU's steady steps consist of."""

import gzip
import io
import json
from types import SimpleNamespace

import pytest
import tomli_w
from rich.console import Console
from test_nsys import write_export
from tiny import profile_values

from draftgraph.engine.cli import main, parser
from draftgraph.engine.commands import run_folder
from draftgraph.engine.errors import RunError
from draftgraph.engine.trace import Request, checked, recorded_by_nsys, show_trace, trace


def write_profile(folder, **changes):
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(profile_values(folder, **changes)))
    return str(path)


def test_on_a_cpu_the_hosts_time_is_shown_and_that_there_is_no_gpu(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["trace", write_profile(tmp_path), "--run", str(run), "--steps", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert "There is no GPU to trace" in err
    assert json.loads((run / "trace.json").read_text()) == summary
    assert summary["source"] == "torch.profiler" and summary["nsys_command"] is None
    assert summary["devices"] == summary["families"] == summary["host_calls"] == []
    assert summary["graph_launches_per_step"] is None and summary["host_calls_per_micro_step_max"] is None
    counts = {}
    for row in summary["ranges"]:
        assert row["host_ms"] > 0 and row["device_ms"] is None
        counts[row["phase"]] = counts.get(row["phase"], 0) + row["count"]
    # Two steps of two micro-steps; nothing of warm-up, nothing of the steps before.
    micro_steps = dict.fromkeys(("wait", "h2d", "target replay", "hand-off", "drafter replay"), 4)
    assert counts == {"step": 2, **micro_steps, "optimizer": 2, "metrics": 2}
    with gzip.open(summary["file"]) as file:
        assert json.load(file)["traceEvents"]
    # A run in the same folder keeps its own evidence: what warm-up writes here goes beside the trace.
    assert not (run / "warmup.json").exists() and (run / "trace" / "warmup.json").exists()


def test_two_targets_and_two_drafters_name_every_phase_with_its_role(tmp_path):
    placement = {"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"], "look_ahead": 2}
    request = Request(write_profile(tmp_path, placement=placement), [], tmp_path / "run", 2, False)
    found = {(row["role"], row["phase"]) for row in trace(request, Console(quiet=True))["ranges"]}
    per_target = {(f"target {t}", phase) for t in range(2) for phase in ("h2d", "target replay", "hand-off")}
    per_drafter = {
        (f"drafter {d}", phase) for d in range(2) for phase in ("hand-off", "drafter replay", "reduce", "optimizer")
    }
    assert found == {("scheduler", "step"), ("scheduler", "wait"), ("drafter 0", "metrics"), *per_target, *per_drafter}


def test_a_trace_without_its_steps_or_without_a_gpus_work_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="holds 0 of 5 steps"):
        checked([], 5, True, tmp_path / "steps.sqlite")
    with pytest.raises(RunError, match="holds no work of a GPU"):
        checked([], 0, True, tmp_path / "steps.sqlite")


# Stands for nsys: notes what it is asked, and exports what it is given.
NSYS = """#!/bin/sh
echo "$@" >> "$NSYS_LOG"
case "$1 $NSYS_FAILS" in
    "profile profile") exit 3 ;;
    "export "*) cp "$NSYS_EXPORT" "${4#--output=}" ;;
esac
"""


def test_where_nsys_is_the_request_runs_under_it_and_its_export_is_shown(tmp_path, monkeypatch):
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("NSYS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("NSYS_EXPORT", str(write_export(tmp_path / "made.sqlite")))
    request, report = Request("smollm2-gpu", [], tmp_path / "run", 1, False), tmp_path / "steps"
    summary = {"source": "nsys", **checked(recorded_by_nsys(request, report), 1, True, report)}
    profiled, exported = (tmp_path / "log").read_text().splitlines()
    assert profiled.startswith("profile --capture-range=cudaProfilerApi --capture-range-end=stop")
    assert profiled.endswith(f"-m draftgraph.engine.cli trace smollm2-gpu --run {tmp_path / 'run'} --steps 1")
    assert exported.endswith(f"--output={report}.sqlite {report}.nsys-rep")
    console = Console(record=True, width=200, file=io.StringIO())
    show_trace(console, summary)
    shown = console.export_text()
    for text in ("drafter 0 | optimizer | - | cuda:0", "--node divides them", "outside ranges", "0.763", "4.5"):
        assert text in shown, text
    monkeypatch.setenv("NSYS_FAILS", "profile")
    with pytest.raises(RunError, match=r"status 3; .*It was: nsys profile"):
        recorded_by_nsys(request, report)


def test_the_same_request_reads_back_from_its_command_line(tmp_path):
    request = Request("smollm2-gpu", ["buckets.count=2", "run.seed=1"], tmp_path, 3, True)
    args = parser().parse_args(request.arguments)
    assert Request(args.profile, args.assignments, run_folder(args), args.steps, args.node) == request


@pytest.mark.gpu
@pytest.mark.parametrize("look_ahead", [0, 2])
def test_a_captured_step_is_a_few_host_calls_and_waits_for_nothing(tmp_path, monkeypatch, look_ahead):
    # The built-in profiler, also where nsys is.
    monkeypatch.setattr("draftgraph.engine.trace.shutil", SimpleNamespace(which=lambda _: None))
    profile = write_profile(
        tmp_path,
        target={"dtype": "bfloat16"},
        capture={"mode": "graph", "warmup_rounds": 3, "verify_rounds": 3},
        placement={"targets": ["cuda:0"], "drafters": ["cuda:0"], "look_ahead": look_ahead},
    )
    summary = trace(Request(profile, [], tmp_path / "run", 4, False), Console(quiet=True))
    (row,) = [row for row in summary["host_calls"] if row["device"]]
    assert row["device"] == "cuda:0" and row["micro_steps"] == 4 * 2
    assert summary["host_calls_per_micro_step_max"] == row["per_micro_step"] <= 24
    # Target and drafter in each of two micro-steps, and the optimizer.
    assert summary["graph_launches_per_step"] == 2 * 2 + 1 and summary["kernel_launches_per_step"] == 0
    assert row["copies"] == 4 * (2 * (1 + 4 * bool(look_ahead)) + 1) and row["memsets"] == 0
    waits = {"cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaStreamSynchronize", "cudaDeviceSynchronize"}
    assert not waits & set(summary["calls_by_name"])
    assert len(summary["host_calls"]) == 1, "every host call lies in a range that names its device"
    families = {(row["role"], row["family"]): row["per_step"] for row in summary["families"]}
    assert all(families[role, name] > 0 for role in ("target", "drafter") for name in ("gemm", "attention"))
    (device,) = summary["devices"]
    assert device["device"] == "cuda:0" and 0 < device["busy_share"] <= 1
    replays = [row for row in summary["ranges"] if row["phase"].endswith("replay")]
    assert replays and all(row["device_ms"] > 0 for row in replays)
    assert summary["nsys_command"].startswith("nsys profile --capture-range=cudaProfilerApi")
