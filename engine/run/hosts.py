"""Several hosts under torchrun: one process, one scheduler each; the same step everywhere; a lost host ends the job.

Promises: owners of a slice add up over hosts (NCCL on GPUs, gloo on CPUs), outside the graphs; what one host is asked
(to stop, to write) all do after the same step; a host that dies or is cut off is noticed within LOST_SECONDS, however
deep the others wait. What NCCL left half done cannot be trusted, so on GPUs nothing is written then: the last
checkpoint is what a resume goes on from. Started without torchrun, or with one process, there is one host and no
network.
"""

import datetime
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from draftgraph.engine.config import Profile
from draftgraph.engine.errors import Interrupted, RunError, UsageError
from draftgraph.engine.run.signals import Requests

BEAT_SECONDS, LOST_SECONDS, GRACE_SECONDS = 2.0, 30.0, 10.0
# Heartbeats find a host that is gone; one that writes a checkpoint may take its time.
PATIENCE = datetime.timedelta(days=1)


class LostHost(RunError):
    """Another host is gone: the step under way cannot be finished."""


class Hosts:
    """Args:
    rank, count: this host, and how many.
    devices: of the drafters, in order; every host has as many.
    """

    def __init__(self, rank: int, count: int, devices: Sequence[torch.device] = ()):
        self.rank, self.count = rank, count
        self.heard = Requests()  # what all hosts have agreed on
        self.on_gpu = any(device.type == "cuda" for device in devices)
        self.flags = torch.zeros(2, dtype=torch.int64)
        self.pending: dist.Work | None = None
        # Of each owner one group, whose communicator lives on that owner's device.
        backend = "nccl" if self.on_gpu else "gloo"
        self.groups = [dist.new_group(backend=backend, timeout=PATIENCE) for _ in devices] if count > 1 else []

    def folder(self, run: Path) -> Path:
        """Where this host writes what is its own: the run folder, or one inside it."""
        return run if self.rank == 0 else run / f"host-{self.rank}"

    def sum(self, owner: int, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of owner `owner` in place, over the hosts, on the current stream.

        Raises:
            LostHost: another host is gone.
        """
        for tensor in tensors:
            try:
                dist.all_reduce(tensor, group=self.groups[owner])
            except RuntimeError as error:
                raise self.lost(error) from error

    def exchange(self, requests: Requests) -> None:
        """Tell the others what this host was asked, and hear what all were asked a step ago.

        Raises:
            LostHost: another host is gone.
        """
        if self.count == 1:
            self.heard = requests
            return
        try:
            if self.pending is not None:
                self.pending.wait()
                self.heard.stop |= bool(self.flags[0])
                self.heard.checkpoint |= bool(self.flags[1])
            self.flags = torch.tensor([requests.stop, requests.checkpoint], dtype=torch.int64)
            requests.checkpoint = False
            self.pending = dist.all_reduce(self.flags, dist.ReduceOp.MAX, async_op=True)
        except RuntimeError as error:
            raise self.lost(error) from error

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """The same few numbers of every host; all have to ask, and wait for each other."""
        if self.count == 1:
            return [list(values)]
        ours = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(ours) for _ in range(self.count)]
        try:
            dist.all_gather(rows, ours)
        except RuntimeError as error:
            raise self.lost(error) from error
        return [row.tolist() for row in rows]

    def agree(self, values: Sequence[int], what: str) -> None:
        """Raises:
        RunError: hosts hold different values.
        """
        # Halves of 64 bits, which float64 holds exactly.
        halves = [half for value in values for half in (value & 0xFFFFFFFF, value >> 32)]
        rows = self.gathered([float(half) for half in halves])
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise RunError(f"host {rank} and host 0 differ in {what}")

    def lost(self, error: RuntimeError) -> LostHost:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        failure = LostHost(f"another host is gone ({reason}); {ADVICE}")
        if self.on_gpu:
            end_process(str(failure))  # NOTE: streams that wait for the lost host would keep every clean-up waiting
        return failure


ADVICE = (
    "its own output says why. Go on from the last checkpoint with --resume, on the same hosts, on fewer, or with other "
    "targets and drafters"
)


def end_process(message: str) -> None:
    os.write(2, f"error: {message}\n".encode())
    sys.stdout.flush()
    os._exit(RunError.exit_status)


class Heartbeat:
    """A thread that tells the others that this host is alive, and ends the process where another is not.

    It has a connection of its own, and waits GRACE_SECONDS before it acts: where the run finds out by itself, as with
    gloo, it can still write a checkpoint.
    """

    def __init__(self, rank: int, count: int):
        self.rank, self.count = rank, count
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.thread.start()

    def run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        while not self.over.wait(BEAT_SECONDS):
            silent = None
            try:
                self.store.set(f"draftgraph-beat-{self.rank}", str(time.time()))
                for rank in (r for r in range(self.count) if r != self.rank):
                    key = f"draftgraph-beat-{rank}"
                    beat = self.store.get(key) if self.store.check([key]) else b""
                    if rank not in seen or seen[rank][0] != beat:
                        seen[rank] = beat, time.monotonic()
                    elif time.monotonic() - seen[rank][1] > LOST_SECONDS:
                        silent = f"host {rank} has not been heard of for {LOST_SECONDS:.0f} s"
            except RuntimeError:
                silent = "the host where torchrun meets is gone"
            if silent and not self.over.wait(GRACE_SECONDS):
                end_process(f"{silent}; {ADVICE}")

    def stop(self) -> None:
        self.over.set()


@contextmanager
def joined(profile: Profile) -> Iterator[Hosts]:
    """This host among those that torchrun started; alone without torchrun.

    Raises:
        UsageError: the step cannot be dealt to so many hosts, or the profile asks for what one host alone can do.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Hosts(0, 1)
        return
    if profile.optim.accumulate % count:
        raise UsageError(
            f"profile: optim.accumulate ({profile.optim.accumulate} micro-steps of all hosts) cannot be dealt evenly "
            f"to {count} hosts; write a multiple of {count}"
        )
    if profile.optim.on_not_finite == "roll-back":
        raise UsageError(
            "profile: optim.on_not_finite = 'roll-back' works on one host; on several write 'stop' or 'keep'"
        )
    # NCCL's own watch would end the process without a word; the heartbeat ends it with one.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    heartbeat = Heartbeat(rank, count)
    try:
        hosts = Hosts(rank, count, [torch.device(name) for name in profile.placement.drafters])
        # At the end the others may still be writing; without this host's heartbeat they would call it lost.
        try:
            yield hosts
        except Interrupted:  # as all are
            hosts.gathered([0.0])
            raise
        hosts.gathered([0.0])
        heartbeat.stop()
        dist.destroy_process_group()
    finally:
        heartbeat.stop()
