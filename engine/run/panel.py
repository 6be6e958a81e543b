"""The live panel of a run in a terminal, drawn once a second from what is known on the host; it asks no device.

The training thread sets fields; a thread of rich draws them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftgraph.engine.run.flatness import HOST

REFRESH_PER_SECOND = 1.0  # each drawing holds the interpreter for some milliseconds


@dataclass
class View:
    """What the panel shows. Rates are of this process of the run."""

    title: str
    total: int
    first_step: int
    padding: float
    devices: Callable[[], Mapping[str, Mapping[str, Any]]]  # the last sample of each
    sentences: Callable[[], list[str]]  # whether their memory is flat
    step: int = 0
    loss: float | None = None
    acceptance: float | None = None
    real_acceptance: float | None = None  # where the run evaluates itself by decoding
    tokens_per_s: float | None = None
    skipped: int = 0
    started: float = field(default_factory=time.monotonic)

    def __rich__(self) -> RenderableType:
        return Panel(
            Group(self.head(), self.figures(), self.device_lines()),
            title=Text(f"draftgraph train: {self.title}"),
            title_align="left",
            padding=(0, 1),
        )

    def head(self) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            f"step {self.step:,} of {self.total:,}", ProgressBar(total=self.total, completed=self.step), self.eta()
        )
        return row

    def eta(self) -> str:
        done, took = self.step - self.first_step, time.monotonic() - self.started
        if done <= 0:
            return "ETA -"
        return f"ETA {clock(took / done * (self.total - self.step))}, {clock(took)} so far"

    def figures(self) -> Text:
        real = "" if self.real_acceptance is None else f", real {self.real_acceptance:.3f}"
        shown = [
            f"loss {plain(self.loss)}",
            f"simulated acceptance {plain(self.acceptance)}{real} (bonus counted)",
            f"{self.tokens_per_s:,.0f} real tokens/s" if self.tokens_per_s is not None else "- real tokens/s",
            f"padding {100 * (1 - self.padding):.0f} %",
        ]
        text = Text(", ".join(shown))
        if self.skipped:
            text.append(f", {self.skipped} updates skipped", style="bold red")
        return text

    def device_lines(self) -> RenderableType:
        """One line of busy share and one of memory per device; the process's memory where there is no device."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(width=16)
        table.add_column(overflow="fold")
        samples = dict(self.devices())
        flat = {line.partition(": ")[0]: line.partition(": ")[2] for line in self.sentences()}
        for name, sample in sorted(samples.items()):
            used, total = sample.get("used_bytes"), sample.get("total_bytes")
            if name == HOST:
                if len(samples) == 1 and used is not None:
                    table.add_row("memory", "", f"{used / 2**30:.2f} GiB of this process")
                continue
            busy = sample.get("utilisation")
            units = {"power_w": "W", "sm_mhz": "MHz", "temperature_c": "\N{DEGREE SIGN}C"}
            facts = [f"{sample[key]:.0f} {unit}" for key, unit in units.items() if sample.get(key) is not None]
            facts += sample.get("throttled") or []
            table.add_row(name, bar(busy, 100), ", ".join(["-" if busy is None else f"{busy} % busy", *facts]))
            if used is not None:
                of = f" of {total / 2**30:.0f}" if total else ""
                table.add_row("", bar(used, total), f"{used / 2**30:.1f} GiB{of}, {flat.get(name, 'warm-up')}")
        return table


def bar(value: float | None, total: float | None) -> RenderableType:
    return ProgressBar(total=total, completed=value, width=16) if value is not None and total else ""


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
