"""`draftgraph trace`: where the time of a few steady steps goes.

With nsys on the PATH the command runs itself under nsys and reads what that recorded; without, torch's built-in
profiler records. The steps are those of `train`: same schedule, figures published, nothing saved or
evaluated. Warm-up and the first steps are left out.
"""

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch.profiler import ProfilerActivity, profile, record_function

from draftgraph.capture.families import family
from draftgraph.engine.build import resolve_device
from draftgraph.engine.config import Profile, load_profile
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.show import cell, columns_table
from draftgraph.engine.steps import issue, schedule
from draftgraph.engine.train import warm_engine
from draftgraph.profiles.kineto import read_kineto
from draftgraph.profiles.nsys import export_command, profile_command, read_nsys, under_nsys
from draftgraph.profiles.ranges import mirrored
from draftgraph.profiles.timeline import CALL_KINDS, UNDIVIDED, Event, tables

STEPS_BEFORE = 3  # untraced: the look-ahead fills


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    profile: str
    assignments: Sequence[str]
    run: Path
    steps: int
    node: bool

    @property
    def arguments(self) -> list[str]:
        """The same request on a command line."""
        overrides = ["--set", *self.assignments] if self.assignments else []
        node = ["--node"] if self.node else []
        return ["trace", self.profile, "--run", str(self.run), *overrides, "--steps", str(self.steps), *node]


def trace(request: Request, console: Console) -> dict[str, Any]:
    """The summary of `draftgraph trace`; its tables go to the console and to trace.json.

    Raises:
        UsageError: the profile, or a device that is not here.
        RunError: the folder cannot be written; nsys failed; the trace does not hold the steps.
    """
    values = load_profile(request.profile, list(request.assignments))
    on_gpu = any(resolve_device(name).type == "cuda" for name in values.placement.targets + values.placement.drafters)
    folder = request.run / "trace"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write the run folder {request.run}: {error.strerror}; name another --run") from error
    report = folder / "steps"
    command = shlex.join(profile_command(report, request.node, ["draftgraph", *request.arguments]))
    if on_gpu and under_nsys():
        steady_steps(values, folder, request.steps, console, profiler_api())
        console.print("The steps are traced; nsys writes its report when this ends.")
        return {"source": "nsys", "steps": request.steps}
    if on_gpu and shutil.which("nsys"):
        source, file = "nsys", report.with_suffix(".nsys-rep")
        events = recorded_by_nsys(request, report)
    else:
        source, file = "torch.profiler", report.with_suffix(".json.gz")
        steady_steps(values, folder, request.steps, console, built_in_profiler(file, on_gpu))
        events = read_kineto(file)
    summary = {"source": source, "file": str(file), "nsys_command": command if on_gpu else None}
    summary |= checked(events, request.steps, on_gpu, file)
    (request.run / "trace.json").write_text(json.dumps(summary, indent=1) + "\n")
    show_trace(console, summary)
    return summary


def checked(events: Sequence[Event], steps: int, on_gpu: bool, file: Path) -> dict[str, Any]:
    """The tables of a trace that holds what was to be traced.

    Raises:
        RunError: it does not.
    """
    found = tables(events, family)
    if found["steps"] != steps:
        raise RunError(f"{file} holds {found['steps']} of {steps} steps: the tool did not record our NVTX ranges")
    if on_gpu and not found["devices"]:
        raise RunError(
            f"{file} holds no work of a GPU: the tool may not read its counters here (CUPTI's permissions), or another "
            "profiler holds it"
        )
    return found


def steady_steps(
    values: Profile, folder: Path, steps: int, console: Console, traced: AbstractContextManager[object]
) -> None:
    """Warm up, issue some steps, and then those that are `traced`; the devices are idle before and after these."""
    # None of these steps evaluates, so nothing that decodes is captured for them.
    plan = make_plan(dataclasses.replace(values, eval=dataclasses.replace(values.eval, every=0)))
    with warm_engine(plan, folder, console) as (engine, _), engine.loader(0) as (loader, rig):
        scheduler, late = schedule(plan, rig, loader, 0)

        def run(first: int, count: int) -> None:
            for step in range(first, first + count):
                issue(scheduler, late, step)
                late.finished()
            scheduler.drain()
            late.finished(wait=True)

        run(1, STEPS_BEFORE)
        with traced:
            run(STEPS_BEFORE + 1, steps)


@contextmanager
def profiler_api() -> Iterator[None]:
    """The stretch that nsys collects."""
    torch.cuda.cudart().cudaProfilerStart()
    try:
        yield
    finally:
        torch.cuda.cudart().cudaProfilerStop()


class Annotations:
    """Ranges as the built-in profiler knows them."""

    def __init__(self) -> None:
        self.open: list[record_function] = []

    def push(self, name: str) -> None:
        self.open.append(record_function(name))
        self.open[-1].__enter__()

    def pop(self) -> None:
        self.open.pop().__exit__(None, None, None)


@contextmanager
def built_in_profiler(file: Path, on_gpu: bool) -> Iterator[None]:
    """Record with torch's profiler, and export when the block ends."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler, mirrored(Annotations()):
        yield
    profiler.export_chrome_trace(str(file))


def recorded_by_nsys(request: Request, report: Path) -> list[Event]:
    """Run the request again, under nsys, and read what it exports.

    Raises:
        RunError: nsys, or the command under it, failed.
    """
    program = [sys.executable, "-m", "draftgraph.engine.cli", *request.arguments]
    for command in (profile_command(report, request.node, program), export_command(report)):
        # What nsys and the traced command print goes to the log.
        status = subprocess.run(command, stdout=sys.stderr).returncode
        if status:
            raise RunError(f"nsys ended with status {status}; its messages are above. It was: {shlex.join(command)}")
    return read_nsys(report.with_suffix(".sqlite"))


def show_trace(console: Console, summary: dict[str, Any]) -> None:
    steps, on_gpu = summary["steps"], bool(summary["devices"])
    ranges = [
        {
            "range": " | ".join(row[field] or "-" for field in ("role", "phase", "bucket", "device")),
            "count": str(row["count"]),
            "host ms": cell("", row["host_ms"]),
            "device ms": cell("", row["device_ms"]),
        }
        for row in summary["ranges"]
    ]
    console.print(columns_table(f"Time per range over {steps} steps ({summary['source']})", ranges))
    if not on_gpu:
        console.print(
            "There is no GPU to trace: the profile runs on the CPU. What is shown is the host's time, which the "
            "profiler itself lengthens."
        )
        return
    families = [
        {
            "role": row["role"] or "-",
            "family": row["family"].replace("_", " "),
            "per step": cell("", row["per_step"]),
            "ms per step": cell("", row["ms_per_step"]),
            "share": f"{row['share']:.3f}",
        }
        for row in summary["families"]
    ]
    console.print(columns_table("Device time per role and kernel family", families))
    if any(row["family"] == UNDIVIDED for row in summary["families"]):
        console.print("nsys recorded every graph as a whole; --node divides them into kernels, and slows them down.")
    console.print(columns_table("Devices; gaps of 10 us and more", [device_cells(row) for row in summary["devices"]]))
    calls = [
        {"device": row["device"] or "outside ranges"}
        | {kind.removeprefix("event_").removesuffix("_launches"): str(row[kind]) for kind in CALL_KINDS}
        | {"per micro-step": cell("", row["per_micro_step"])}
        for row in summary["host_calls"]
    ]
    console.print(columns_table(f"Host calls over {steps} steps; graph and kernel are launches", calls))
    if summary["source"] != "nsys":
        console.print(
            "Recorded by torch's built-in profiler, kernel by kernel, which lengthens host times and gaps. With nsys:"
        )
        console.print(Text(summary["nsys_command"], overflow="fold"), soft_wrap=True)


def device_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "device": row["device"],
        "from first to last work, ms": cell("", row["window_ms"]),
        "busy share": f"{row['busy_share']:.3f}",
        "gaps": str(row["gaps"]),
        "gaps ms": cell("", row["gaps_ms"]),
        "largest ms": cell("", row["largest_gap_ms"]),
    }
