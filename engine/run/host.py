"""Host memory of the training and of its data process: it stays flat, and growth is told while there is still time."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

MIB = 2**20
# Told where a process has grown by a quarter and this much since it was told last.
SHARE, LEAST = 0.25, 256 * MIB


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is no file's: pages of mapped shards come and go. 0 for one that is gone."""
    try:
        # Not by Path, which interns its parts anew each time: the table of interned strings fills and grows.
        with open(f"/proc/{pid}/status") as status:
            return next((1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0


class HostMemory:
    """Args:
    processes: name and id.
    say: receives one line where one has grown.
    """

    def __init__(self, processes: Mapping[str, int], say: Callable[[str], None]):
        self.processes, self.say = processes, say
        self.first: dict[str, int] = {}
        self.told: dict[str, tuple[int, int]] = {}  # step and bytes that growth is counted from
        self.last: dict[str, int] = {}

    def look(self, step: int) -> None:
        """Read each process; the first time is what growth is counted from."""
        for name, pid in self.processes.items():
            size = self.last[name] = private_bytes(pid)
            self.first.setdefault(name, size)
            since, before = self.told.setdefault(name, (step, size))
            if size > before + max(LEAST, SHARE * before):
                self.told[name] = step, size
                self.say(
                    f"step {step}: host memory of {name} grew from {before / MIB:,.0f} to {size / MIB:,.0f} MiB since "
                    f"step {since}; if it goes on, stop the run by SIGTERM and go on with --resume"
                )

    @property
    def growth_bytes(self) -> int | None:
        """Growth of all processes since the first look; None where there was none."""
        return sum(self.last.values()) - sum(self.first.values()) if self.first else None


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what was made so far out of the garbage collector's sight.

    A full collection waits for as much garbage as a quarter of what it saw last, and stops everything while it looks at
    it all: of what steps leave alone, it comes often and is short.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is left: next to nothing
    try:
        yield
    finally:
        gc.unfreeze()


def training_and(data_process: int) -> dict[str, int]:
    return {"the training process": os.getpid(), "the data process": data_process}
