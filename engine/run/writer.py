"""Checkpoints in the background: copied from the devices between two updates, hashed and written by one thread.

Promises: host memory is taken once; the training thread waits for no device, and for the checkpoint before only where
the disk is slower than the interval; the next update waits on its device for the copies; the thread touches no device
(it starts after capture, and reads host memory that has arrived), and starts once the figures of the checkpoint's
steps are in the log; what goes wrong in it is raised at the next checkpoint or at the end, which waits for it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.disk import flush
from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.streams import Event, Stream, on


class Copied(Event):
    """The end of a checkpoint's copies from one drafter, which measures for how long it holds updates.

    Owns: two events, which every checkpoint records anew.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.before, self.after = (Event(device, timed=True) for _ in range(2))
        self.unread = False
        self.held_ms_max: float | None = None

    def hold(self, stream: Stream) -> None:
        self.read()
        self.before.record(stream)
        super().hold(stream)
        self.after.record(stream)
        self.unread = self.event is not None

    def read(self) -> None:
        """Take in how long the last hold was, once it is over: before the next checkpoint's copies have arrived."""
        if self.unread and self.after.happened():
            self.held_ms_max = max(self.held_ms_max or 0.0, self.before.elapsed_ms(self.after))
            self.unread = False


class CheckpointWriter:
    """Owns: a host copy of masters and moments (pinned for a GPU), a copy stream per drafter, at most one thread.

    Args:
        folder: where step-NNNNNN appear.
        log: a file of figures that reaches the disk before a checkpoint does.
        identity: goes into every checkpoint.
        keep: how many stay.
        last_step: of the checkpoint that the run went on from; -1 at a start.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        drafters: Sequence[DrafterLane],
        identity: Mapping[str, Any],
        keep: int,
        last_step: int = -1,
    ):
        self.folder, self.log, self.drafters = folder, log, drafters
        self.identity, self.keep = identity, keep
        self.last_step = self.last_written = last_step
        self.best_step = 0
        flat, pinned = drafters[0].flat, drafters[0].device.type == "cuda"
        self.host = {kind: torch.zeros(flat.size, pin_memory=pinned) for kind in ("master", *checkpoint.MOMENTS)}
        self.counts = torch.zeros(3, pin_memory=pinned)  # updates, skipped, share of the rate
        self.tensors = {f"{kind}.{name}": t for kind, h in self.host.items() for name, t in flat.named(h).items()}
        self.streams = [torch.cuda.Stream(d.device) if d.lane.stream is not None else None for d in drafters]
        self.stepped, self.copied = [Event(d.device) for d in drafters], [Copied(d.device) for d in drafters]
        self.arriving: dict[str, int] | None = None  # step and micro-step of the copies under way
        self.last = False
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        # Asked before a checkpoint of a step is written; brings what has arrived from the devices into the log.
        self.is_good: Callable[[int], bool] = lambda step: True
        checkpoint.sweep(folder)

    @torch.no_grad()
    def save(self, step: int, micro_step: int, last: bool, best_step: int = 0) -> Sequence[Event]:
        """Begin a checkpoint of `step`, which was issued in full; one that is written already is not written again.

        Args:
            last: the run does not go on: it is written, whatever `is_good` says.
            best_step: whose checkpoint stays beside the newest ones; 0: none.
        Returns:
            Events, one per drafter, that its next update must wait for: it overwrites what is being copied.
        Raises:
            RunError: the checkpoint before could not be written.
        """
        self.wait()
        self.best_step = best_step  # once no thread reads it
        if step == self.last_step:
            return []
        for drafter, stream, stepped, copied in zip(
            self.drafters, self.streams, self.stepped, self.copied, strict=True
        ):
            optimizer = drafter.optimizer
            stepped.record(drafter.lane.stream)
            stepped.hold(stream)
            with on(stream):
                for kind, host in self.host.items():
                    source = optimizer.master if kind == "master" else optimizer.state[kind]
                    host[optimizer.low : optimizer.high].copy_(source, non_blocking=True)
                if drafter is self.drafters[0]:
                    self.counts[0].copy_(optimizer.state["step"], non_blocking=True)
                    self.counts[1].copy_(optimizer.skipped, non_blocking=True)
                    self.counts[2].copy_(optimizer.rate_share, non_blocking=True)
            copied.record(stream)
        self.arriving, self.last, self.last_step = {"step": step, "micro_step": micro_step}, last, step
        self.poll()
        return self.copied

    def poll(self) -> None:
        """Start to write once the copies have arrived; never waits."""
        if self.arriving is not None and all(event.happened() for event in self.copied):
            position, self.arriving = self.arriving, None
            # The figures of its steps left the devices before the copies did.
            if not self.is_good(position["step"]) and not self.last:
                self.last_step = self.last_written
                return
            self.thread = threading.Thread(target=self.write, args=(position,), name="checkpoint", daemon=True)
            self.thread.start()

    def wait(self) -> None:
        """Wait until what was begun is on the disk.

        Raises:
            RunError: it could not be written.
        """
        if self.arriving is not None:
            for event in self.copied:
                event.wait()
            self.poll()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def written(self) -> list[int]:
        """The steps of all checkpoints, oldest first, with the one that the thread is writing."""
        if self.thread is not None:
            self.thread.join()
        return [checkpoint.step_of(path) for path in checkpoint.found(self.folder)]

    def write(self, position: Mapping[str, int]) -> None:
        """The thread."""
        try:
            updates, skipped, rate_share = self.counts.tolist()
            counts = {"updates": int(updates), "skipped": int(skipped), "rate_share": rate_share}
            scalars = {**position, **counts, **self.identity}
            flush(self.log)
            checkpoint.write(self.folder, position["step"], self.tensors, scalars, self.keep, self.best_step)
            self.last_written = position["step"]
        except OSError as error:
            self.error = RunError(
                f"cannot write the checkpoint of step {position['step']}: {error}. The last good one is untouched; "
                "mend the cause, then go on with --resume"
            )
            self.error.__cause__ = error
        except BaseException as error:
            self.error = error

    @property
    def held_ms_max(self) -> float | None:
        """For how long a checkpoint's copies held the next update at most, once all is done; None without a GPU."""
        for copied in self.copied:
            copied.read()
        return max((c.held_ms_max for c in self.copied if c.held_ms_max is not None), default=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            # What ended the run first is what its user is told.
            if error is None:
                raise


class NoWriter(CheckpointWriter):
    """On hosts that write no checkpoints: they go on at once. Owns nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.folder, self.last_written, self.thread = arguments[0], arguments[-1], None

    def save(self, step: int, micro_step: int, last: bool, best_step: int = 0) -> Sequence[Event]:
        return []

    def poll(self) -> None:
        pass

    def wait(self) -> None:
        pass

    @property
    def held_ms_max(self) -> float | None:
        return None
