"""`draftgraph warmup` and `draftgraph train`: the run, top to bottom."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftgraph.capture.memory import MemoryWatch
from draftgraph.capture.syncs import count_syncs
from draftgraph.engine.build import Engine, build
from draftgraph.engine.config import Profile, to_toml
from draftgraph.engine.errors import Interrupted, RunError
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.metrics import LateFigures, Tally
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.warmup import warm_up
from draftgraph.profiles.measure import receipt, write_receipt


def open_run(folder: Path, profile: Profile, resume: bool) -> None:
    """Make the run folder, or check that it may be continued.

    Raises:
        RunError: it holds a run and --resume was not given, or the other way round.
    """
    started = (folder / "metrics.jsonl").is_file()
    if started and not resume:
        raise RunError(f"{folder} already holds a run; add --resume to go on with it, or name another --run folder")
    if resume and not started:
        raise RunError(f"{folder} holds no run to resume; leave --resume out to start one")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.toml").write_text(to_toml(profile))


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


def prepare_engine(plan: Plan, folder: Path, console: Console) -> tuple[Engine, dict[str, Any]]:
    """Build and warm up; writes warmup.json."""
    engine = build(plan, lambda line: console.print(line))
    with progress_bar(console) as progress:
        evidence = warm_up(engine, progress)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "warmup.json").write_text(json.dumps(evidence, indent=1) + "\n")
    return engine, evidence


def train(profile: Profile, folder: Path, resume: bool, console: Console) -> dict[str, Any]:
    """Warm up, then the run; returns the summary of `draftgraph train`."""
    plan = make_plan(profile)
    open_run(folder, profile, resume)
    engine, evidence = prepare_engine(plan, folder, console)
    return run(engine, evidence, folder, resume, console)


def run(engine: Engine, evidence: dict[str, Any], folder: Path, resume: bool, console: Console) -> dict[str, Any]:
    """The steps of a warmed-up engine, whose weights are those of before step 1.

    Raises:
        RunError: a checkpoint cannot be read or written.
        Interrupted: a signal stopped the run; a checkpoint was written.
    """
    profile, plan = engine.plan.profile, engine.plan
    checkpoints = folder / "checkpoints"
    first_step = 0
    if resume:
        first_step = checkpoint.restore(checkpoint.newest(checkpoints), engine.rig.drafters, plan.identity)["step"]
        console.print(f"going on after step {first_step}")
    first_micro_step = first_step * profile.optim.accumulate
    tally = Tally(plan.shape.block_size, folder / "metrics.jsonl", first_step)
    watch = MemoryWatch(engine.devices)
    with engine.loader(first_micro_step // profile.drafter.reuse) as (loader, rig), interrupts() as interrupted:
        scheduler = Scheduler(
            rig, loader, plan.lengths, profile.drafter.reuse, profile.optim.accumulate, first_micro_step
        )
        lead = rig.drafters[0]
        late = LateFigures(lead.published.numel(), lead.device)
        syncs, step, started = 0, first_step, time.perf_counter()
        watch.mark()
        with progress_bar(console) as progress:
            task = progress.add_task("train", total=profile.run.steps, completed=first_step)
            while step < profile.run.steps and not interrupted:
                with count_syncs() as counted:
                    for step in range(step + 1, next_checkpoint(step, profile) + 1):  # noqa: B020
                        scheduler.step()
                        late.publish(step, lead.published, lead.lane.stream)
                        tally.add(late.finished())
                        if step % profile.log.every == 0:
                            watch.mark()
                            rate = scheduler.real_tokens / (time.perf_counter() - started)
                            progress.update(task, completed=step, description=tally.headline(rate))
                        if interrupted:
                            break
                syncs += counted.value or 0
                scheduler.drain()
                tally.add(late.finished(wait=True))
                checkpoint.save(
                    checkpoints, step, rig.drafters, scheduler.micro_step, plan.identity, profile.checkpoint.keep
                )
                progress.update(task, completed=step)
        seconds = time.perf_counter() - started
    tally.close()
    memory = watch.report()
    on_gpu = memory["alloc_bytes_per_step"] is not None
    summary = {
        "steps": step,
        **tally.first_and_last(),
        "real_tokens_per_s": scheduler.real_tokens / seconds,
        "padding_efficiency": plan.padding_efficiency,
        "graphs": len(evidence["graphs"]) if evidence["mode"] == "graph" else 0,
        "replays": sum(scheduler.replays.values()),
        "replays_per_graph": scheduler.replays,
        "alloc_bytes_per_step": memory["alloc_bytes_per_step"],
        "reserved_range_bytes": memory["reserved_range_bytes"],
        "device_used_range_bytes": memory["device_used_range_bytes"],
        "host_syncs_per_step": syncs / max(1, step - first_step) if on_gpu else None,
        "look_ahead_waits": scheduler.look_ahead_waits,
        "skipped_updates": tally.skipped,
        "seconds": seconds,
        "receipt": str(folder / "receipt.json"),
    }
    ours = {**summary, "warmup_seconds": evidence["seconds"], "verified": evidence["verified"]}
    write_receipt(folder / "receipt.json", receipt("train", dataclasses.asdict(profile), ours=ours))
    if step < profile.run.steps:
        raise Interrupted(f"stopped after step {step} of {profile.run.steps}, checkpoint written; go on with --resume")
    return summary


def next_checkpoint(step: int, profile: Profile) -> int:
    """The step after which the next checkpoint is written."""
    every = profile.checkpoint.every or profile.run.steps
    return min((step // every + 1) * every, profile.run.steps)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step can finish; a second one ends the process at once."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
