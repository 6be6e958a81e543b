"""The data process: collates micro-batches ahead of the training thread, into slots of shared memory.

Promises: micro-batches come in the schedule's order; only bytes cross, the main process knows from its own schedule
what is in them. A process that dies, raises or hangs is a DataError at the next `next`. It imports numpy and no
torch, is started afresh (exec, never a fork of the training process), ignores SIGINT, SIGTERM and SIGUSR1, and ends
when its parent does.

How: one anonymous shared memory mapping holds the ring of slots; slot = micro-batch mod slots. Two pipes are its
semaphores: the main process sends a byte for each free slot and the data process one for each full slot, so that the
end of either closes the other's pipe.
"""

import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.collate import Rows, SlotLayout, collate
from draftgraph.engine.data.schedule import MicroBatch, Schedule
from draftgraph.engine.errors import DataError, DraftgraphError
from draftgraph.profiles.ranges import nvtx_range

_FREE, _READY, _FAILED = b"f", b"r", b"e"
# Collating a micro-batch takes milliseconds; a shared disk may stall for a minute.
_HANG_SECONDS = 300
_PROGRAM = "from draftgraph.engine.data.loader import serve; serve()"


@dataclass(frozen=True)
class _Work:
    """What the data process is told at its start."""

    rows: Rows
    schedule: Schedule
    layouts: tuple[SlotLayout, ...]
    draw: AnchorDraw
    first: int
    num_slots: int
    slot_bytes: int
    memory: int  # file descriptor


class Loader:
    """Owns the data process and the ring of slots.

    Args:
        rows: token rows; pickled to the data process (shards go by path).
        schedule: the stream of micro-batches.
        layouts: one per bucket of the schedule.
        draw: how anchors are drawn.
        num_slots: slots of the ring; a slot may be rewritten once released.
        first: the micro-batch to start at.
    NOTE: `buffers` are views of the mapping, page-aligned; a main process that pins them unpins them before `close`.
    """

    def __init__(
        self,
        rows: Rows,
        schedule: Schedule,
        layouts: Sequence[SlotLayout],
        draw: AnchorDraw,
        *,
        num_slots: int,
        first: int = 0,
    ) -> None:
        assert tuple(layout.bucket for layout in layouts) == schedule.buckets
        largest = max(layout.num_bytes for layout in layouts)
        slot_bytes = -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.memfd_create("draftgraph-slots")
        try:
            os.ftruncate(memory, num_slots * slot_bytes)
            ring = np.frombuffer(mmap.mmap(memory, num_slots * slot_bytes), dtype=np.uint8).reshape(
                num_slots, slot_bytes
            )
            self.buffers: list[np.ndarray] = list(ring)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[memory],
                # numpy would start a thread per core, and this process multiplies nothing.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            work = _Work(rows, schedule, tuple(layouts), draw, first, num_slots, slot_bytes, memory)
            self._send(pickle.dumps(work) + _FREE * num_slots)
        finally:
            os.close(memory)
        assert self._process.stdout is not None
        self._arrival = select.poll()
        self._arrival.register(self._process.stdout, select.POLLIN)
        self._batches = schedule.at(first)
        self._taken = 0
        self._released = 0
        # Asked while `next` waits for data that is late: is the run to end?
        self.give_up: Callable[[], bool] = lambda: False

    @property
    def pid(self) -> int:
        """The data process."""
        return self._process.pid

    def next(self) -> tuple[int, MicroBatch]:
        """Wait for the next micro-batch: the slot it lies in, and what it is."""
        assert self._taken - self._released < len(self.buffers), "every slot is taken: release one first"
        assert self._process.stdout is not None
        for waited in range(1, _HANG_SECONDS + 1):
            if self._arrival.poll(1000):
                break
            if self.give_up() or waited == _HANG_SECONDS:
                self._process.kill()
                raise DataError(
                    f"the data process has given nothing for {waited} s and was ended; is the disk of the shards still "
                    "there? Go on with --resume"
                )
        if self._process.stdout.read(1) != _READY:
            raise DataError(self._reason())
        slot = self._taken % len(self.buffers)
        self._taken += 1
        return slot, next(self._batches)

    def release(self) -> None:
        """Free the oldest slot that `next` gave out: its bytes are copied."""
        assert self._released < self._taken
        self._released += 1
        self._send(_FREE)

    def close(self) -> None:
        """End the data process and let go of the slots."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.buffers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(message)
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
        except BrokenPipeError:
            # The process is gone; `next` says why.
            pass

    def _reason(self) -> str:
        assert self._process.stdout is not None
        message = self._process.stdout.read().decode(errors="replace")
        status = self._process.wait()
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}; its error is above"
        return message or f"the data process {ended}"


def serve() -> None:
    """The data process: collate micro-batches into free slots until the parent closes the pipe."""
    # A signal to the whole process group is the training process's to answer; this one ends when its pipe closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as free, os.fdopen(os.dup(1), "wb", buffering=0) as ready:
        # What anything prints goes to the log, not into the pipe.
        os.dup2(2, 1)
        try:
            _collate_all(pickle.load(free), free, ready)
        except BrokenPipeError:
            pass
        except DraftgraphError as error:
            ready.write(_FAILED + str(error).encode())
        except Exception as error:
            ready.write(_FAILED + f"the data process failed: {type(error).__name__}: {error}".encode())


def _collate_all(work: _Work, free: BinaryIO, ready: BinaryIO) -> None:
    memory = mmap.mmap(work.memory, work.num_slots * work.slot_bytes)
    ring = np.frombuffer(memory, dtype=np.uint8).reshape(work.num_slots, work.slot_bytes)
    views = [[layout.numpy_views(slot) for layout in work.layouts] for slot in ring]
    for number, batch in enumerate(work.schedule.at(work.first)):
        if free.read(1) != _FREE:
            return
        with nvtx_range("data", "collate", work.layouts[batch.bucket_index].bucket.name):
            collate(batch, work.rows, views[number % work.num_slots][batch.bucket_index], work.draw)
        ready.write(_READY)
