"""The progress of every long piece of work: what, how far, how long still; on stderr."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console | None = None, disable: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        expand=True,
        disable=disable,
    )


def teller(console: Console) -> Callable[[str], None]:
    """Prints lines as they are."""
    return lambda line: console.print(line, markup=False)


class PlainLines:
    """Where nothing can be redrawn in place (a log file, CI): a line now and then."""

    EVERY_SECONDS = 30.0

    def __init__(self, console: Console) -> None:
        self.console, self.told = console, time.monotonic()

    def say(self, line: str) -> None:
        now = time.monotonic()
        if now - self.told >= self.EVERY_SECONDS:
            self.told = now
            self.console.print(line, markup=False)
