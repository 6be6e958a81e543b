"""Samples devices in the background: used memory, busy share, power, clocks, temperature, what holds the clock back.

Lines of devices.jsonl: {"event": "start"} where a process of the run begins, {"event": "phase"} where it goes from
warm-up to steady, to what comes after the steps, and to its end; and samples of "cuda:N" and of the process itself
("host"); each has `time` and `phase`.
Promises: one thread that makes no CUDA call, so that it may run beside a capture, and that never stops a run: without
NVML, a permission or disk space it says so once and leaves out what it cannot have. A file grows with the logarithm of
the run's time, but a change of a device's used memory is always written.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from draftgraph.capture import nvml
from draftgraph.engine.run.clocks import Clocks
from draftgraph.engine.run.flatness import HOST, Flatness

DENSE_SECONDS = 600.0  # so long every sample is written
WARM_UP, STEADY, AFTER, END = "warm-up", "steady", "after", "end"


class Sampler:
    """Samples from `start` to `close`, in the phase "warm-up" until told otherwise.

    Args:
        uuids: name of a CUDA device -> its UUID (`nvml.uuids`); empty on a machine without.
        seconds: between samples; 0: none, only the phases are written.
        library: stands for pynvml.
    Owns: the thread, which alone writes the file; the caller only puts orders.
    """

    def __init__(self, path: Path, uuids: dict[str, str], seconds: float, library: Any = None) -> None:
        self.path, self.names, self.seconds, self.library = path, list(uuids), seconds, library
        self.phase = WARM_UP
        self.latest: dict[str, dict[str, Any]] = {}  # device -> its last sample
        self.flatness, self.clocks = Flatness(), Clocks()
        self.trouble = ""  # why figures are missing
        self._handles: Sequence[Any] = ()
        if uuids and seconds:
            try:
                self._handles = nvml.open_handles(list(uuids.values()), library)
            except nvml.Unavailable as error:
                self.trouble = f"no samples of {', '.join(uuids)}: NVML says {str(error)!r}"
        self._file: FileIO | None = None
        self._written: dict[str, tuple[float, Any]] = {}
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Go to another phase; its first sample is taken at once, by the thread."""
        self._orders.put(phase)

    def close(self) -> None:
        """End. A driver that hangs is not waited for."""
        if self._thread.is_alive():
            self._orders.put(END)
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        self._began = time.time()
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            self._lost(error)
        self._write({"event": "start", "note": self.trouble or None})
        self._sample(due=True)
        while self.phase != END:
            try:
                order = self._orders.get(timeout=self.seconds or None)
            except Empty:
                self._sample()
                continue
            self.phase = order
            self._write({"event": "phase"})
            if order != END:
                self._sample(due=True)
        if self._file is not None:
            self._file.close()

    def _sample(self, due: bool = False) -> None:
        """Read every device; write what is due, or has moved."""
        if not self.seconds:
            return
        readings = {
            name: asdict(nvml.read(handle, self.library))
            for name, handle in zip(self.names, self._handles, strict=False)
        }
        for name, reading in {**readings, HOST: {"used_bytes": resident_bytes()}}.items():
            now = time.time()
            line = {"time": round(now, 3), "phase": self.phase, "device": name, **reading}
            self.latest[name] = line
            before, used = self._written.get(name, (0.0, None))
            # Ever more seldom: as many lines for the next tenfold of time as for the last.
            rare = now - before >= (now - self._began) / DENSE_SECONDS * self.seconds
            moved = name != HOST and used != reading["used_bytes"]
            if due or rare or moved:
                self._written[name] = (now, reading["used_bytes"])
                self._write(line)
            else:
                self._judge(line)

    def _write(self, line: dict[str, Any]) -> None:
        stamped = {"time": round(time.time(), 3), "phase": self.phase, **line}
        self._judge(stamped)
        if self._file is not None:
            try:
                self._file.write(json.dumps({k: v for k, v in stamped.items() if v is not None}).encode() + b"\n")
            except OSError as error:
                self._lost(error)

    def _judge(self, line: dict[str, Any]) -> None:
        self.flatness.add(line)
        self.clocks.add(line)

    def _lost(self, error: OSError) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self.trouble = f"{self.path.name} is not written: {error.strerror}"


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not tell it."""
    try:
        with open("/proc/self/statm") as sizes:  # not by Path: see host.private_bytes
            return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
