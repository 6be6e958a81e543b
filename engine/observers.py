"""Everything that looks at a run, in one hand: the panel, the sampler of devices, the loggers, the report.

Promises: none of it makes a CUDA call or waits for anything while steps are issued, and none of it can stop a run.
`metrics.jsonl` and the steady-state watch are the run's own.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from rich.live import Live

from draftgraph.capture import nvml
from draftgraph.engine.plan import Plan
from draftgraph.engine.progress import PlainLines
from draftgraph.engine.report.page import write_report
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.run.loggers import Loggers, wanted_sinks
from draftgraph.engine.run.metrics import RealAcceptance, StepFigures, Tally
from draftgraph.engine.run.panel import REFRESH_PER_SECOND, View
from draftgraph.engine.run.sampler import AFTER, STEADY, Sampler

BINS = 60
SAMPLED = ("used_bytes", "utilisation", "power_w", "sm_mhz", "temperature_c")  # what loggers get of a device
# What becomes an artefact of the run.
FILES = ("receipt.json", "report.html", "profile.toml", "warmup.json", "buckets.json")


class Observers:
    """The observers of one process of a run, from before its warm-up to after its receipt.

    Args:
        devices: those of the run.
        start_step: the step that it goes on from; what an older run left in the folder is dropped where that is 0.
    Raises:
        UsageError: the profile names a logger whose package is missing.
    """

    def __init__(self, plan: Plan, devices: Sequence[torch.device], folder: Path, console: Console, start_step: int):
        self.plan, self.folder, self.console, self.start_step = plan, folder, console, start_step
        section = plan.profile.log
        gpus = sorted({device.index for device in devices if device.type == "cuda"})
        # Figures are the same on all hosts.
        self.sinks = wanted_sinks(section.wandb, section.tensorboard) if plan.host == 0 else []
        uuids = dict(zip((f"cuda:{index}" for index in gpus), nvml.uuids(gpus), strict=True))
        self.sampler = Sampler(folder / "devices.jsonl", uuids, section.sample_seconds)
        self.view: View | None = None
        self.told = ""  # of the sampler's trouble
        self.begun = self.finished = False  # the steps; what comes after them

    def __enter__(self) -> Self:
        if not self.start_step:
            for name in ("devices.jsonl", "loggers.json", "receipt.json"):
                (self.folder / name).unlink(missing_ok=True)
        write_text(self.folder / "buckets.json", json.dumps(filling(self.plan)) + "\n")
        self.tell_trouble()
        self.loggers = Loggers(self.folder, self.sinks, self.start_step)
        self.sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.sampler.close()
        # A run that broke is looked at most of all.
        if isinstance(error, Exception) and self.begun and not self.finished:
            self.report()
        self.loggers.abandon()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def tell_trouble(self) -> None:
        """Say why samples are missing, also where that began during the run."""
        if self.sampler.trouble != self.told:
            self.told = self.sampler.trouble
            self.say(self.told)

    @contextmanager
    def steady(self, first_step: int) -> Iterator[None]:
        """The steps after `first_step`: a live panel in a terminal, a line now and then elsewhere and in CI."""
        self.begun = True
        self.sampler.enter(STEADY)
        self.lines = PlainLines(self.console)
        try:
            with self.panel(first_step):
                yield
        finally:
            self.sampler.enter(AFTER)

    def panel(self, first_step: int) -> AbstractContextManager[object]:
        """The live panel, nothing where nobody can look at it."""
        if not is_terminal(self.console):
            return nullcontext()
        self.view = View(
            title=self.folder.name,
            total=self.plan.profile.run.steps,
            first_step=first_step,
            step=first_step,
            padding=self.plan.padding_efficiency,
            devices=lambda: self.sampler.latest,
            sentences=self.sampler.flatness.sentences,
        )
        return Live(self.view, console=self.console, refresh_per_second=REFRESH_PER_SECOND)

    def look(self, rows: Sequence[StepFigures], real: Mapping[int, RealAcceptance]) -> None:
        """Take the figures of steps as they arrive; every `log.every`th goes to the loggers, and every evaluation.

        Args:
            real: step -> as measured by decoding.
        """
        if not self.loggers.sinks:
            return
        for row in rows:
            if row.step % self.plan.profile.log.every == 0 or row.step in real:
                self.loggers.log(row.step, figures_of(row, real.get(row.step)))
                # A message each: one of many devices would not fit into an atomic write.
                for name, sample in self.sampler.latest.copy().items():
                    self.loggers.log(row.step, {f"{name}/{key}": sample[key] for key in SAMPLED if key in sample})

    def tell(self, step: int, tally: Tally, real_tokens_per_s: float) -> None:
        """Show where the run is."""
        if self.view is not None:
            self.view.step, self.view.tokens_per_s = step, real_tokens_per_s
            last = tally.first_and_last()
            self.view.loss, self.view.acceptance = last["loss_last"], last["acceptance_after"]
            self.view.skipped, self.view.real_acceptance = tally.skipped, tally.real_figures()["real_acceptance"]
        else:
            headline = ", ".join(tally.headline(real_tokens_per_s).splitlines())
            self.lines.say(f"step {step} of {self.plan.profile.run.steps}: {headline}")

    def judged(self) -> dict[str, Any]:
        """For the summary, after the last sample: is the memory flat, how fast were the devices, what is not logged."""
        self.sampler.close()
        return {
            "device_memory": "; ".join(self.sampler.flatness.sentences()) or None,
            "device_clocks": "; ".join(self.sampler.clocks.sentences()) or None,
            "log_messages_dropped": self.loggers.dropped if self.loggers.sinks else None,
        }

    def finish(self) -> None:
        """Write the report, say what was found, end the loggers."""
        self.finished = True
        self.tell_trouble()
        for sentence in self.sampler.flatness.sentences():
            self.say(f"memory of {sentence}")
        self.report()
        if told := self.loggers.close([self.folder / name for name in FILES]):
            self.say(told)

    def report(self) -> None:
        """Write report.html; a run must not fail by a picture of it."""
        try:
            self.say(f"report: {write_report(self.folder)}")
        except Exception as error:
            self.say(f"no report ({error!r}); `draftgraph report {self.folder}` tries again")


def figures_of(row: StepFigures, real: RealAcceptance | None) -> dict[str, Any]:
    """Under the names of metrics.jsonl, each slot's apart."""
    figures = asdict(row) | ({f"real_{name}": value for name, value in asdict(real).items()} if real else {})
    del figures["step"]
    for name in ("accuracy", "real_acceptance"):
        slots = figures.pop(f"{name}_per_slot", [])
        figures |= {f"{name}/slot {index + 1}": value for index, value in enumerate(slots)}
    return figures


def is_terminal(console: Console) -> bool:
    """Whether a panel can be redrawn in place and somebody may be looking."""
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet and not os.environ.get("CI")


def filling(plan: Plan) -> dict[str, Any]:
    """buckets.json: the bucket table, how many rows and tokens each bucket holds, and how long the rows are."""
    width = max(1, -(-int(plan.lengths.max()) // BINS))
    num_buckets = len(plan.buckets)
    return {
        "buckets": [asdict(bucket) for bucket in plan.buckets],
        "rows_per_bucket": np.bincount(plan.assignment, minlength=num_buckets).tolist(),
        "tokens_per_bucket": np.bincount(plan.assignment, plan.lengths, num_buckets).astype(int).tolist(),
        "lengths": {
            "width": width,
            "counts": np.bincount(plan.lengths // width).tolist(),
            "rows": len(plan.lengths),
            "tokens": int(plan.lengths.sum()),
        },
    }
