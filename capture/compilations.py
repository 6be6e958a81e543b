"""Counts the Triton kernels that this process compiles or loads: what of warm-up they take, and whether one comes late.

It listens where Triton lets one listen (`triton.knobs.compilation.listener`), and costs nothing while nothing compiles.
A kernel that comes from Triton's disk cache counts as well: loading it stalls the step that first needs it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Compilations:
    """What was compiled or loaded inside the block; grows while it runs."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.loaded = 0  # of them, from Triton's disk cache
        self.seconds = 0.0  # compiling and loading

    def report(self) -> dict[str, float]:
        """As warmup.json tells it."""
        kernels = len(self.names)
        return {"kernels": kernels, "from_disk_cache": self.loaded, "seconds": round(self.seconds, 3)}


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count inside the block; another listener is told as before."""
    found = Compilations()
    if "triton" not in sys.modules:
        yield found
        return
    from triton import knobs

    previous = knobs.compilation.listener

    def listen(**event: Any) -> None:
        found.names.append(str(getattr(event["src"], "name", "a kernel")))
        found.loaded += event["cache_hit"]
        found.seconds += event["times"].total / 1e6
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = previous
