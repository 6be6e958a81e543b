"""The steps of a run: issued, looked at late, evaluated, checkpointed; and what they come to."""

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftgraph.capture.watch import SteadyWatch
from draftgraph.engine.build import Engine
from draftgraph.engine.config import Profile
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.errors import DataError, Interrupted, RunError
from draftgraph.engine.held_out import HeldOut
from draftgraph.engine.observers import Observers
from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.pace import Pace
from draftgraph.engine.progress import teller
from draftgraph.engine.report.page import AS_WARM
from draftgraph.engine.run import checkpoint, signals
from draftgraph.engine.run.equality import EqualityCheck
from draftgraph.engine.run.health import Health
from draftgraph.engine.run.host import HostMemory, frozen_heap, training_and
from draftgraph.engine.run.hosts import Hosts, LostHost
from draftgraph.engine.run.idle import p99_ms
from draftgraph.engine.run.metrics import LateFigures, Tally, mean
from draftgraph.engine.run.rig import Rig, Source
from draftgraph.engine.run.scheduler import Scheduler
from draftgraph.engine.run.streams import phase
from draftgraph.engine.run.writer import CheckpointWriter, NoWriter
from draftgraph.profiles.measure import receipt, write_receipt
from draftgraph.profiles.ranges import nvtx_range


class Run:
    """The steps of a warmed-up engine, whose weights are those of before step 1, to the end or to the next roll-back.

    Args:
        evidence: of the warm-up.
        folder: the run folder.
        start: the checkpoint to go on from.
        rate_share: of the profile's rate, after a roll-back; None: the checkpoint's.
    """

    def __init__(
        self,
        engine: Engine,
        evidence: dict[str, Any],
        folder: Path,
        start: Path | None,
        rate_share: float | None,
        requests: signals.Requests,
        console: Console,
        hosts: Hosts,
        observers: Observers,
    ):
        self.engine, self.evidence, self.plan, self.profile = engine, evidence, engine.plan, engine.plan.profile
        self.requests, self.console, self.hosts, self.observers = requests, console, hosts, observers
        self.own, self.say = hosts.folder(folder), teller(console)
        self.first_step = skipped = 0
        if start is not None:
            scalars = checkpoint.restore(start, engine.rig.drafters, rate_share)
            self.first_step, skipped = scalars["step"], scalars["skipped"]
            self.say(f"going on after step {self.first_step}")
        self.step = self.first_step
        log = self.own / "metrics.jsonl"
        self.tally = Tally(self.plan.shape.block_size, log, self.first_step)
        # An eager run allocates at every step, as the profile says.
        self.watch = SteadyWatch(engine.devices if self.profile.capture.mode == "graph" else [])
        self.writer = writer = (CheckpointWriter if hosts.rank == 0 else NoWriter)(
            folder / "checkpoints",
            log,
            engine.rig.drafters,
            self.plan.identity,
            self.profile.checkpoint.keep,
            self.first_step if start else -1,
        )
        writer.is_good = self.is_good
        optim = self.profile.optim
        self.health = Health(optim.max_skipped, optim.on_not_finite, skipped, engine.rows_of, writer.written, self.say)
        self.equality, self.pace = EqualityCheck(engine.rig.drafters), Pace()
        self.pauses: list[float] = []  # ms
        self.evaluation_seconds = 0.0
        self.cpu_seconds = 0.0  # of this thread, issuing steps

    def go(self) -> dict[str, Any]:
        """Train; returns the summary.

        Raises:
            Diverged: the run is to be rolled back.
            LostHost: another host is gone; where it can, this one has written a checkpoint.
            RunError: a checkpoint cannot be read or written; the steady state broke and capture.watch is strict.
            Interrupted: a signal stopped the run; a checkpoint was written.
        """
        try:
            seconds = self.go_through()
        finally:
            self.hosts.last_written = max(self.hosts.last_written, self.writer.last_written)
        return self.finish(self.summary(seconds))

    def go_through(self) -> float:
        """All steps and what they write; returns its seconds."""
        first_micro_step = self.first_step * self.plan.accumulate
        loading = self.engine.loader(first_micro_step // self.profile.drafter.reuse)
        with closing(self.tally), loading as (loader, rig), self.writer, frozen_heap():
            self.begin(loader, rig, first_micro_step)
            with self.observers.steady(self.first_step):
                try:
                    self.all_steps()
                except (DataError, LostHost):
                    # A row that cannot be read, or a host that is gone, ends the run, not what was trained: the step
                    # that it was for is left out.
                    self.save(last=True)
                    if not self.requests.stop or self.hosts.count > 1:
                        raise
                finally:
                    self.watch.close()
            return time.perf_counter() - self.started

    def begin(self, loader: Loader, rig: Rig, first_micro_step: int) -> None:
        loader.give_up = lambda: self.requests.stop
        self.scheduler, self.late = schedule(self.plan, rig, loader, first_micro_step)
        self.host_memory = HostMemory(training_and(loader.pid), self.say)
        self.started = time.perf_counter()
        self.watch.open(self.step)
        self.hosts.exchange(self.requests, self.writer.last_written)

    def all_steps(self) -> None:
        """Stretches of steps, each ended by a checkpoint."""
        heard, last_step = self.hosts.heard, self.profile.run.steps
        ended = heard.stop
        while not ended:
            with self.watch.steady():
                stretch_end, since = next_checkpoint(self.step, self.profile), time.thread_time()
                while self.step < stretch_end and not heard:
                    self.next_step()
                self.cpu_seconds += time.thread_time() - since
                self.mark()
            asked, heard.checkpoint = heard.checkpoint, False
            ended = heard.stop or self.step == last_step
            self.checkpoint(last=ended)
            if asked:
                self.say(f"a checkpoint of step {self.step}, between the regular ones")
            self.tell()
        if self.broken and self.step < last_step:
            raise RunError(
                f"{'; '.join(self.watch.findings)}. The profile says capture.watch = 'strict': stopped after step "
                f"{self.step}, checkpoint written. Mend the cause, or go on with --resume --set capture.watch=report"
            )

    def next_step(self) -> None:
        """Issue a step, and look at what has arrived of those before it."""
        tokens = self.scheduler.real_tokens
        issue(self.scheduler, self.late, self.step + 1)
        self.step += 1
        self.tally.issued[self.step] = self.scheduler.real_tokens - tokens
        self.equality.after(self.step)
        self.hosts.exchange(self.requests, self.writer.last_written)
        if self.engine.held_out and self.engine.held_out.due(self.step):
            self.evaluate(self.engine.held_out)
        self.tally.extra |= self.scheduler.meter.newest()
        self.look()
        self.pace.look(self.tally.last, self.evaluation_seconds)
        self.writer.poll()
        if self.step % self.profile.log.every == 0:
            self.mark()
            self.host_memory.look(self.step)
            self.tell()

    def evaluate(self, held_out: HeldOut) -> None:
        held_out.await_steps()
        since = time.perf_counter()
        best = self.tally.measured(self.step, held_out.measure(self.step))
        # Hosts may round differently, and remember other evaluations: the first one decides.
        (first,), *_ = self.hosts.gathered([float(best)])
        if first and self.profile.checkpoint.keep_best:
            self.hosts.heard.checkpoint = True
        self.evaluation_seconds += time.perf_counter() - since

    def look(self, wait: bool = False) -> None:
        """Log and judge the figures that have arrived."""
        rows = self.tally.add(self.late.finished(wait))
        self.health.look(rows)
        self.observers.look(rows, self.tally.real)

    def mark(self) -> None:
        """Tell what broke the steady state."""
        for line in self.watch.mark(self.step):
            self.console.print(Text(line, style="bold red"))
        # As a signal does: all hosts stop after the same step.
        self.requests.stop |= self.broken

    @property
    def broken(self) -> bool:
        """Whether what the watch found ends the run."""
        return self.watch.broken and self.profile.capture.watch == "strict"

    def tell(self) -> None:
        """Show where the run is, by the real tokens of all hosts per second, so far."""
        tokens = self.hosts.count * self.scheduler.real_tokens
        self.observers.tell(self.step, self.tally, tokens / (time.perf_counter() - self.started))

    def checkpoint(self, last: bool) -> None:
        """Begin a checkpoint of parameters that all drafters hold alike; the last one is waited for."""
        since = time.perf_counter()
        self.equality.after(self.step, now=True)
        if self.hosts.count > 1:
            self.equality.look(wait=True)
            self.hosts.agree(self.equality.values(), f"their parameters after step {self.step}")
        self.save(last)
        if not last:
            self.pauses.append(1e3 * (time.perf_counter() - since))

    def save(self, last: bool) -> None:
        if last:
            self.scheduler.drain()
            self.look(wait=True)
        self.plan.rows.check_unchanged()
        best_step = self.tally.best_step if self.profile.checkpoint.keep_best else 0
        micro_step = self.step * self.profile.optim.accumulate  # of all hosts
        self.scheduler.copied = self.writer.save(self.step, micro_step, last, best_step)

    def is_good(self, step: int) -> bool:
        """Whether the checkpoint of `step`, which has left the devices, is worth its place on the disk."""
        self.equality.look(wait=False)  # it left the devices before the checkpoint's copies did
        self.look()
        return self.health.worth_keeping(step)

    def summary(self, seconds: float) -> dict[str, Any]:
        """Of the steps since `start`."""
        watch, scheduler, captured = self.watch, self.scheduler, self.evidence["mode"] == "graph"
        num_steps = self.step - self.first_step
        memory = watch.memory.report(num_steps)
        return {
            "steps": self.step,
            "first_step": self.first_step,
            **self.tally.first_and_last(),
            **self.tally.real_figures(),
            "evaluation_seconds": self.evaluation_seconds if self.engine.held_out else None,
            "real_tokens_per_s": sum(n for (n,) in self.hosts.gathered([scheduler.real_tokens])) / seconds,
            "padding_efficiency": self.plan.padding_efficiency,
            "row_efficiency": self.plan.schedule.row_efficiency,
            "graphs": len(self.evidence["graphs"]) if captured else 0,
            "replays": sum(scheduler.replays.values()),
            "replays_per_graph": scheduler.replays,
            "alloc_bytes_per_step": memory["alloc_bytes_per_step"],
            "reserved_range_bytes": memory["reserved_range_bytes"],
            "device_used_range_bytes": memory["device_used_range_bytes"],
            "host_syncs_per_step": None if watch.host_syncs is None else watch.host_syncs / max(1, num_steps),
            "late_compilations": watch.late_compilations,
            "late_captures": watch.late_captures,
            "steady_state": "; ".join(watch.findings) or AS_WARM,
            "checkpoint_pause_ms_max": max(self.pauses, default=None),
            "checkpoint_pause_ms_mean": mean(self.pauses),
            "checkpoint_held_ms_max": self.writer.held_ms_max,
            "host_memory_growth_bytes": self.host_memory.growth_bytes,
            "look_ahead_waits": scheduler.look_ahead_waits,
            "skipped_updates": self.tally.skipped,
            "rate_share": float(self.engine.rig.drafters[0].optimizer.rate_share),
            **self.pace.figures(self.plan, self.evidence),
            "lane_time": scheduler.meter.shares(),
            "scheduler_busy": self.cpu_seconds / seconds if captured else None,  # an eager one computes
            "data_wait_ms_p99": p99_ms(scheduler.data_waits),
            **self.observers.judged(),
            "seconds": seconds,
            "receipt": str(self.own / "receipt.json"),
        }

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The receipt, the report, and what a user must know."""
        warm_up = {"warmup_seconds": self.evidence["seconds"], "verified": self.evidence["verified"]}
        made = receipt("train", dataclasses.asdict(self.profile), ours={**summary, **warm_up})
        write_receipt(self.own / "receipt.json", made)
        self.observers.finish()
        if self.tally.skipped:
            self.console.print(
                f"[bold red]{self.tally.skipped} updates were skipped[/]: a gradient was not finite, or no token "
                "counted. Lower optim.lr, or look at the rows of the steps that are named above"
            )
        if self.step < self.profile.run.steps:
            raise Interrupted(
                f"stopped after step {self.step} of {self.profile.run.steps}, checkpoint written; go on with --resume"
            )
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


def next_checkpoint(step: int, profile: Profile) -> int:
    """The step after which the next checkpoint is written."""
    every = profile.checkpoint.every or profile.run.steps
    return min((step // every + 1) * every, profile.run.steps)
