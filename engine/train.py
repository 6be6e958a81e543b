"""`draftgraph warmup` and `draftgraph train`: from a profile to an engine that is warmed up, and through its steps."""

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftgraph.capture import tuning
from draftgraph.capture.compilations import count_compilations
from draftgraph.capture.errors import CaptureFailure, DeviceMemoryExhausted
from draftgraph.engine.advice import advice
from draftgraph.engine.build import DTYPES, Engine, build, resolve_device
from draftgraph.engine.config import Profile
from draftgraph.engine.errors import CaptureError, RunError
from draftgraph.engine.evidence import devices_before
from draftgraph.engine.observers import Observers
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.progress import progress_bar, teller
from draftgraph.engine.roll_back import with_roll_backs
from draftgraph.engine.run import checkpoint, signals
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.run.hosts import joined
from draftgraph.engine.run.reduce import Across
from draftgraph.engine.run_folder import locked, open_run
from draftgraph.engine.steps import Run
from draftgraph.engine.warmup import warm_up


@contextmanager
def readable_errors(plan: Plan) -> Iterator[None]:
    """What the devices refuse, as errors with an exit status and advice."""
    try:
        yield
    except DeviceMemoryExhausted as failure:
        raise CaptureError(f"{failure}. {advice(plan, failure.device)}") from failure
    except CaptureFailure as failure:
        raise CaptureError(str(failure)) from failure
    except (RuntimeError, MemoryError) as error:
        first = (str(error).splitlines() or ["MemoryError"])[0]
        # The CPU's allocator raises a plain RuntimeError, and so does the driver.
        refused = "can't allocate memory" in first or "CUDA error: out of memory" in first
        if refused or isinstance(error, torch.OutOfMemoryError | MemoryError):
            named = re.search(r"GPU (\d+) has a total", str(error))
            device = resolve_device(f"cuda:{named[1]}" if named else plan.profile.placement.targets[0])
            raise CaptureError(f"{device} ran out of memory: {first.rstrip('.')}. {advice(plan, device)}") from error
        if isinstance(error, torch.AcceleratorError):
            raise RunError(
                f"a device failed: {first}. What is in checkpoints/ is untouched; go on where the devices work, with "
                "--resume if it holds one"
            ) from error
        raise


@contextmanager
def warm_engine(
    plan: Plan, folder: Path, console: Console, resume: bool = False, across: Across | None = None
) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """An engine, warmed up and verified, and its evidence, which is written to warmup.json.

    Args:
        resume: take what kernels tuned themselves to from the folder's tuning.json, where there is one.
    """
    placement, choices = plan.profile.placement, folder / "tuning.json"
    with readable_errors(plan):
        tuned = tuning.restore(choices) if resume and choices.is_file() else None
        names = placement.targets + placement.drafters
        fp8 = [resolve_device(n) for n in placement.targets] if plan.profile.target.precision == "fp8" else []
        before = devices_before([resolve_device(n) for n in names], DTYPES[plan.profile.target.dtype], fp8)
        with progress_bar(console) as progress, count_compilations() as compilations:
            engine = build(plan, teller(console), progress, across)
            evidence = warm_up(engine, progress, before, tuned) | {"compilations": compilations.report()}
        write_text(folder / "warmup.json", json.dumps(evidence, indent=1) + "\n")
        yield engine, evidence
        # NOTE: not after an error: a device that failed a capture refuses to be waited for, which would hide the cause.
        engine.close()


def warmup(profile: Profile, folder: Path, console: Console) -> dict[str, Any]:
    """The summary of `draftgraph warmup`."""
    plan = make_plan(profile)
    with locked(folder), warm_engine(plan, folder, console) as (_, evidence):
        return evidence


def train(profile: Profile, folder: Path, resume: bool, console: Console) -> dict[str, Any]:
    """Warm up, then the run; returns the summary of `draftgraph train`."""
    with joined(profile, teller(console)) as hosts:
        plan = dataclasses.replace(make_plan(profile), host=hosts.rank, hosts=hosts.count)
        own, placement = hosts.folder(folder), profile.placement
        with locked(own), signals.usr1_ignored():
            start = open_run(folder, own, plan, resume, console)
            hosts.same(plan.identity, "Start every host with the same profile, rows and version of Draftgraph")
            found = checkpoint.step_of(start) if start else -1
            hosts.agree([found], "the checkpoint to go on from: they must share the file system of the run folder")
            hosts.last_written = found
            plan.rows.verify()
            across = hosts if hosts.count > 1 else None
            devices = [resolve_device(name) for name in placement.targets + placement.drafters]
            watching = Observers(plan, devices, own, console, max(found, 0))
            with watching as observers, warm_engine(plan, own, console, resume, across) as (engine, evidence):
                tuning.save(own / "tuning.json")
                with signals.listen() as requests:

                    def go_on(start: Path | None, rate_share: float | None) -> dict[str, Any]:
                        made_of = (engine, evidence, folder, start, rate_share, requests, console, hosts, observers)
                        return Run(*made_of).go()

                    return with_roll_backs(go_on, start, folder / "checkpoints", engine.rig, teller(console))
