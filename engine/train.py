"""`draftgraph warmup` and `draftgraph train`: the run, top to bottom."""

import dataclasses
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from draftgraph.capture import tuning
from draftgraph.capture.errors import CaptureFailure, DeviceMemoryExhausted
from draftgraph.capture.watch import SteadyWatch
from draftgraph.engine.advice import advice
from draftgraph.engine.build import DTYPES, Engine, build, resolve_device
from draftgraph.engine.config import Profile
from draftgraph.engine.errors import CaptureError, DataError, Interrupted, RunError
from draftgraph.engine.evidence import devices_before
from draftgraph.engine.observers import Observers
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.predict.pace import Pace
from draftgraph.engine.progress import progress_bar, teller
from draftgraph.engine.roll_back import with_roll_backs
from draftgraph.engine.run import checkpoint, signals
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.run.equality import EqualityCheck
from draftgraph.engine.run.health import Health
from draftgraph.engine.run.host import HostMemory, training_and
from draftgraph.engine.run.hosts import Hosts, LostHost, joined
from draftgraph.engine.run.idle import p99_ms
from draftgraph.engine.run.metrics import LateFigures, Tally, mean
from draftgraph.engine.run.reduce import Across
from draftgraph.engine.run.rig import Rig, Source
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.run.streams import phase
from draftgraph.engine.run.writer import CheckpointWriter, NoWriter
from draftgraph.engine.run_folder import locked, open_run
from draftgraph.engine.warmup import warm_up
from draftgraph.profiles.measure import receipt, write_receipt
from draftgraph.profiles.ranges import nvtx_range


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
            raise CaptureError(
                f"a device ran out of memory: {first} Lower buckets.context_tokens, buckets.draft_tokens or "
                "drafter.chunk_slots, or place fewer roles on the device"
            ) from error
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
        with progress_bar(console) as progress:
            engine = build(plan, teller(console), progress, across)
            evidence = warm_up(engine, progress, before, tuned)
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
    with joined(profile) as hosts:
        plan = dataclasses.replace(make_plan(profile), host=hosts.rank, hosts=hosts.count)
        own, placement = hosts.folder(folder), profile.placement
        with locked(own), signals.usr1_ignored():
            start = open_run(folder, own, plan, resume, console)
            hosts.agree([zlib.crc32(json.dumps(plan.identity).encode())], "their profile or their data")
            found = checkpoint.step_of(start) if start else -1
            hosts.agree([found], "the checkpoint to go on from: they must share the file system of the run folder")
            plan.rows.verify()
            across = hosts if hosts.count > 1 else None
            devices = [resolve_device(name) for name in placement.targets + placement.drafters]
            watching = Observers(plan, devices, own, console, max(found, 0))
            with watching as observers, warm_engine(plan, own, console, resume, across) as (engine, evidence):
                tuning.save(own / "tuning.json")
                with signals.listen() as requests:

                    def go_on(start: Path | None, rate_share: float | None) -> dict[str, Any]:
                        return run(engine, evidence, folder, start, rate_share, requests, console, hosts, observers)

                    return with_roll_backs(go_on, start, folder / "checkpoints", engine.rig, teller(console))


def run(
    engine: Engine,
    evidence: dict[str, Any],
    folder: Path,
    start: Path | None,
    rate_share: float | None,
    requests: signals.Requests,
    console: Console,
    hosts: Hosts,
    observers: Observers,
) -> dict[str, Any]:
    """The steps of a warmed-up engine, whose weights are those of before step 1.

    Args:
        start: the checkpoint to go on from.
        rate_share: of the profile's rate, after a roll-back.
    Raises:
        Diverged: the run is to be rolled back.
        LostHost: another host is gone; where it can, this one has written a checkpoint.
        RunError: a checkpoint cannot be read or written; the steady state broke and capture.watch is strict.
        Interrupted: a signal stopped the run; a checkpoint was written.
    """
    profile, plan = engine.plan.profile, engine.plan
    first_step = skipped = 0
    if start is not None:
        scalars = checkpoint.restore(start, engine.rig.drafters, rate_share)
        first_step, skipped = scalars["step"], scalars["skipped"]
        console.print(f"going on after step {first_step}")
    first_micro_step = first_step * plan.accumulate
    log = hosts.folder(folder) / "metrics.jsonl"
    tally = Tally(plan.shape.block_size, log, first_step)
    # An eager run allocates at every step, as the profile says.
    watch = SteadyWatch(engine.devices if profile.capture.mode == "graph" else [])
    writer = (CheckpointWriter if hosts.rank == 0 else NoWriter)(
        folder / "checkpoints",
        log,
        engine.rig.drafters,
        plan.identity,
        profile.checkpoint.keep,
        first_step if start else -1,
    )
    say, optim = teller(console), profile.optim
    health = Health(optim.max_skipped, optim.on_not_finite, skipped, engine.rows_of, lambda: writer.last_written, say)
    pauses: list[float] = []  # ms
    loading = engine.loader(first_micro_step // profile.drafter.reuse)
    with closing(tally), loading as (loader, rig), writer:
        loader.give_up = lambda: requests.stop
        scheduler, late = schedule(plan, rig, loader, first_micro_step)
        equality = EqualityCheck(engine.rig.drafters)
        pace, step, started, started_cpu = Pace(), first_step, time.perf_counter(), time.thread_time()
        watch.open(step)
        hosts.exchange(requests)

        def mark() -> None:
            for line in watch.mark(step):
                console.print(Text(line, style="bold red"))

        def rate() -> float:
            """Real tokens of all hosts per second, so far."""
            return hosts.count * scheduler.real_tokens / (time.perf_counter() - started)

        def look(wait: bool = False) -> None:
            rows = tally.add(late.finished(wait))
            health.look(rows)
            observers.look(rows)

        def is_good(step: int) -> bool:
            equality.look(wait=False)  # it left the devices before the checkpoint's copies did
            look()
            return health.worth_keeping(step)

        writer.is_good = is_good
        host = HostMemory(training_and(loader.pid), say)

        def save(goes_on: bool) -> None:
            if not goes_on:
                scheduler.drain()
                look(wait=True)
            plan.rows.check_unchanged()
            writer.best_step = tally.best_step if profile.checkpoint.keep_best else 0
            scheduler.copied = writer.save(step, step * profile.optim.accumulate, last=not goes_on)

        with observers.steady():
            try:
                ended = hosts.heard.stop
                while not ended:
                    segment_end = next_checkpoint(step, profile)
                    with watch.steady():
                        while step < segment_end and not hosts.heard and not broken(watch, profile):
                            tokens = scheduler.real_tokens
                            issue(scheduler, late, step + 1)
                            step += 1
                            tally.issued[step] = scheduler.real_tokens - tokens
                            equality.after(step)
                            hosts.exchange(requests)
                            if engine.held_out and engine.held_out.due(step):
                                found = engine.held_out.measure(step)
                                # Hosts that round differently must agree on checkpoints: the first one's figure holds.
                                (first,), *_ = hosts.gathered([found.acceptance or 0.0])
                                found = dataclasses.replace(found, acceptance=first or None)
                                if tally.measured(step, found) and profile.checkpoint.keep_best:
                                    hosts.heard.checkpoint = True
                            tally.extra |= scheduler.meter.newest()
                            look()
                            pace.look(tally.last, engine.held_out.seconds if engine.held_out else 0.0)
                            writer.poll()
                            if step % profile.log.every == 0:
                                mark()
                                host.look(step)
                                observers.tell(step, tally, rate())
                        mark()
                    hosts.heard.checkpoint = False
                    ended = hosts.heard.stop or step == profile.run.steps or broken(watch, profile)
                    since = time.perf_counter()
                    equality.after(step, now=True)
                    if hosts.count > 1:
                        equality.look(wait=True)
                        hosts.agree(equality.values(), f"their parameters after step {step}")
                    save(goes_on=not ended)
                    if not ended:
                        pauses.append(1e3 * (time.perf_counter() - since))
                    observers.tell(step, tally, rate())
                    if broken(watch, profile) and step < profile.run.steps:
                        raise RunError(
                            f"{'; '.join(watch.findings)}. The profile says capture.watch = 'strict': stopped after "
                            f"step {step}, checkpoint written. Mend the cause, or go on with --resume --set "
                            "capture.watch=report"
                        )
            except (DataError, LostHost):
                # A row that cannot be read, or a host that is gone, ends the run, not what was trained: the step that
                # it was for is left out.
                save(goes_on=False)
                if not requests.stop or hosts.count > 1:
                    raise
            finally:
                watch.close()
        seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - started_cpu
    memory, num_steps = watch.memory.report(step - first_step), max(1, step - first_step)
    summary = {
        "steps": step,
        "first_step": first_step,
        **tally.first_and_last(),
        **tally.real_figures(),
        "evaluation_seconds": engine.held_out.seconds if engine.held_out else None,
        "real_tokens_per_s": sum(n for (n,) in hosts.gathered([scheduler.real_tokens])) / seconds,
        "padding_efficiency": plan.padding_efficiency,
        "row_efficiency": plan.schedule.row_efficiency,
        "graphs": len(evidence["graphs"]) if evidence["mode"] == "graph" else 0,
        "replays": sum(scheduler.replays.values()),
        "replays_per_graph": scheduler.replays,
        "alloc_bytes_per_step": memory["alloc_bytes_per_step"],
        "reserved_range_bytes": memory["reserved_range_bytes"],
        "device_used_range_bytes": memory["device_used_range_bytes"],
        "host_syncs_per_step": None if watch.host_syncs is None else watch.host_syncs / num_steps,
        "late_compilations": watch.late_compilations,
        "late_captures": watch.late_captures,
        "steady_state": "; ".join(watch.findings) or "as warm-up left it",
        "checkpoint_pause_ms_max": max(pauses, default=None),
        "checkpoint_pause_ms_mean": mean(pauses),
        "checkpoint_held_ms_max": max(writer.held_ms() or [], default=None),
        "host_memory_growth_bytes": host.growth_bytes,
        "look_ahead_waits": scheduler.look_ahead_waits,
        "skipped_updates": tally.skipped,
        "rate_share": float(engine.rig.drafters[0].optimizer.rate_share),
        **pace.figures(plan, evidence),
        "lane_time": scheduler.meter.shares(),
        "scheduler_busy": cpu_seconds / seconds if evidence["mode"] == "graph" else None,  # an eager one computes
        "data_wait_ms_p99": p99_ms(scheduler.data_waits),
        **observers.judged(),
        "seconds": seconds,
        "receipt": str(hosts.folder(folder) / "receipt.json"),
    }
    ours = {**summary, "warmup_seconds": evidence["seconds"], "verified": evidence["verified"]}
    write_receipt(hosts.folder(folder) / "receipt.json", receipt("train", dataclasses.asdict(profile), ours=ours))
    observers.finish()
    if tally.skipped:
        console.print(
            f"[bold red]{tally.skipped} updates were skipped[/]: a gradient was not finite, or no token counted. "
            "Lower optim.lr, or look at the rows of the steps that are named above"
        )
    if step < profile.run.steps:
        raise Interrupted(f"stopped after step {step} of {profile.run.steps}, checkpoint written; go on with --resume")
    return summary


def schedule(plan: Plan, rig: Rig, source: Source, first_micro_step: int) -> tuple[Scheduler, LateFigures]:
    """What issues the steps of a warmed-up rig, and what brings their figures back."""
    reuse = plan.profile.drafter.reuse
    lead = rig.drafters[0]
    # Deep enough for every step that the look-ahead lets be in flight: reading one never waits.
    depth = rig.max_in_flight * reuse // plan.accumulate + 2
    late = LateFigures(lead.published.numel(), lead.device, depth)
    return Scheduler(rig, source, plan.lengths, reuse, plan.accumulate, first_micro_step), late


def issue(scheduler: Scheduler, late: LateFigures, step: int) -> None:
    """Issue one step, and send its figures on their way."""
    lead = scheduler.rig.drafters[0]
    with nvtx_range("scheduler", "step"):
        scheduler.step()
        with phase(lead.lane, "metrics"):
            late.publish(step, lead.published, lead.lane.stream)


def broken(watch: SteadyWatch, profile: Profile) -> bool:
    """Whether what the watch found ends the run."""
    return watch.broken and profile.capture.watch == "strict"


def next_checkpoint(step: int, profile: Profile) -> int:
    """The step after which the next checkpoint is written."""
    every = profile.checkpoint.every or profile.run.steps
    return min((step // every + 1) * every, profile.run.steps)
