"""What watching costs: the same steps with every observer and with none, in turn, on one warmed-up engine.

Observers are the steady-state watch, metrics.jsonl, the health of figures, NVML samples, the live panel (drawn to
nowhere) and wandb offline where it is installed. Each block of steps trains on the same rows; its first step, which
waits for the data process, is left out.
"""

import dataclasses
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from draftgraph.capture.watch import SteadyWatch
from draftgraph.engine.bench.protocol import Bench, Clock, Result
from draftgraph.engine.bench.workloads import PROFILE_08B, load
from draftgraph.engine.build import Engine
from draftgraph.engine.config import to_toml
from draftgraph.engine.observers import Observers
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.run.health import Health
from draftgraph.engine.run.metrics import LateFigures, Tally
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.steps import issue, schedule
from draftgraph.engine.train import warm_engine

NONE, ALL = "off", "on"


def observers(bench: Bench) -> Result:
    """Every observer against none, at the launch-bound shapes and an update in every micro-step."""
    profile = load(bench, PROFILE_08B, ("optim.accumulate=1",))
    wandb = "offline" if importlib.util.find_spec("wandb") else "off"
    profile = dataclasses.replace(profile, log=dataclasses.replace(profile.log, wandb=wandb))
    rounds, steps = (3 if bench.quick else 6, 41) if bench.on_gpu else (1, 5)
    blocks: dict[str, list[dict[str, Any]]] = {NONE: [], ALL: []}
    plan = make_plan(profile)
    with tempfile.TemporaryDirectory() as folder, warm_engine(plan, Path(folder), bench.console) as (engine, _):
        (Path(folder) / "profile.toml").write_text(to_toml(profile))
        for number in range(rounds):
            for kind in (NONE, ALL) if number % 2 == 0 else (ALL, NONE):
                bench.say(f"observers {kind}: {steps} steps, round {number + 1} of {rounds}")
                blocks[kind].append(block(engine, plan, Path(folder), steps, kind == ALL))
    # Step by step: the rows of a step are the same in every block.
    typical = {
        kind: [median(times) for times in zip(*(found["seconds"] for found in blocks[kind]), strict=True)]
        for kind in blocks
    }
    ratio = sum(typical[NONE]) / sum(typical[ALL])
    ours = {
        "step_ms_on": 1e3 * sum(typical[ALL]) / len(typical[ALL]),
        "step_ms_off": 1e3 * sum(typical[NONE]) / len(typical[NONE]),
        "added_percent": 100 * (1 / ratio - 1),
        **{
            f"thread_ms_per_step_{kind}": median(1e3 * found["thread_seconds"] / steps for found in blocks[kind])
            for kind in blocks
        },
        "host_syncs": max((found["host_syncs"] or 0 for found in blocks[ALL]), default=0) if bench.on_gpu else None,
        "findings": [line for found in blocks[ALL] for line in found["findings"]],
        "device_memory": blocks[ALL][-1]["device_memory"],
        "log_messages_dropped": blocks[ALL][-1]["log_messages_dropped"],
        "wandb": wandb,
        "steps": steps,
        "rounds": rounds,
    }
    return Result(
        profile=dataclasses.asdict(profile),
        ours=ours,
        peer=None,
        ratio=ratio,
        ours_text=f"{ours['step_ms_on']:.2f} ms",
        peer_text=f"{ours['step_ms_off']:.2f} ms (none)",
        share_text="-",
        figures={"added_percent": ours["added_percent"], "host_syncs": ours["host_syncs"]},
    )


def block(engine: Engine, plan: Plan, folder: Path, steps: int, watched: bool) -> dict[str, Any]:
    """Some steps on the first rows of the schedule; seconds of each but the first, and of the thread."""
    with engine.loader(0) as (loader, rig):
        drafter = rig.drafters[0]
        clock = Clock(drafter.device, drafter.lane.stream, steps + 1)
        scheduler, late = schedule(plan, rig, loader, 0)
        if not watched:
            clock.mark()
            since = time.thread_time()
            for _ in range(steps):
                scheduler.step()
                clock.mark()
            spent = time.thread_time() - since
            scheduler.drain()
            return {"seconds": clock.seconds()[1:], "thread_seconds": spent}
        with open(os.devnull, "w") as nowhere:
            console = Console(file=nowhere, force_terminal=True, width=100)
            found = watched_steps(engine, plan, folder, steps, scheduler, late, clock, console)
        scheduler.drain()
        return {"seconds": clock.seconds()[1:], **found}


def watched_steps(
    engine: Engine,
    plan: Plan,
    folder: Path,
    steps: int,
    scheduler: Scheduler,
    late: LateFigures,
    clock: Clock,
    console: Console,
) -> dict[str, Any]:
    """The loop of a run, with all that looks at it."""
    profile = plan.profile
    tally = Tally(plan.shape.block_size, folder / "metrics.jsonl", 0)
    watch = SteadyWatch(engine.devices if profile.capture.mode == "graph" else [])
    health = Health(0, "keep", 0, engine.rows_of, lambda: [], lambda line: None)
    with Observers(plan, engine.devices, folder, console, 0) as seen, seen.steady(0):
        watch.open(0)
        started, since = time.perf_counter(), time.thread_time()
        clock.mark()
        with watch.steady():
            for step in range(1, steps + 1):
                issue(scheduler, late, step)
                rows = tally.add(late.finished())
                health.look(rows)
                seen.look(rows, tally.real)
                if step % profile.log.every == 0:
                    watch.mark(step)
                    seen.tell(step, tally, scheduler.real_tokens / (time.perf_counter() - started))
                clock.mark()
        spent = time.thread_time() - since
        watch.close()
        tally.close()
        judged = seen.judged()
        seen.loggers.close([])
        return {"thread_seconds": spent, "host_syncs": watch.host_syncs, "findings": watch.findings, **judged}
