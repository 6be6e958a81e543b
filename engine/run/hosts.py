"""Several hosts under torchrun: one process, one scheduler each; the same step everywhere; a lost host ends the job.

Promises: owners of a slice add up over hosts (NCCL on GPUs, gloo on CPUs), outside the graphs; what one host is asked
(to stop, to write) all do after the same step; a host that dies or is cut off is noticed within LOST_SECONDS, however
deep the others wait. What NCCL left half done cannot be trusted, so on GPUs nothing is written then: the last
checkpoint is what a resume goes on from. Started without torchrun, or with one process, there is one host and no
network.
"""

import dataclasses
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftgraph.engine.config import Profile
from draftgraph.engine.errors import Interrupted, RunError, UsageError
from draftgraph.engine.run.checkpoint import leaves
from draftgraph.engine.run.joining import PATIENCE, Meeting, Say, first_line, meet, read_meeting
from draftgraph.engine.run.signals import Requests

BEAT_SECONDS, LOST_SECONDS, GRACE_SECONDS = 2.0, 30.0, 10.0
# Sections that may differ between hosts: the rows themselves are compared, and logs are each host's own.
OWN_SECTIONS = ("data", "log")


class LostHost(RunError):
    """Another host is gone: the step under way cannot be finished."""


class Hosts:
    """Args:
    rank, count: this host, and how many.
    """

    def __init__(self, rank: int, count: int):
        self.rank, self.count = rank, count
        self.heard = Requests()  # what all hosts have agreed on
        self.last_written = -1  # the newest checkpoint that this host knows of
        self.on_gpu = False
        self.flags = torch.zeros(3, dtype=torch.int64)
        self.pending: dist.Work | None = None
        self.groups: list[dist.ProcessGroup] = []

    def open_groups(self, devices: Sequence[str]) -> None:
        """Of each owner of a slice one group, whose communicator lives on that owner's device.

        Args:
            devices: of the drafters, in order; every host has as many.
        """
        self.on_gpu = any(name != "cpu" for name in devices)
        backend = "nccl" if self.on_gpu else "gloo"
        self.groups = [dist.new_group(backend=backend, timeout=PATIENCE) for _ in devices]

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

    def exchange(self, requests: Requests, last_written: int) -> None:
        """Tell the others what this host was asked, and hear what all were asked a step ago.

        Args:
            last_written: the step of the newest checkpoint, where this host writes them.

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
                self.last_written = int(self.flags[2])
            self.flags = torch.tensor([requests.stop, requests.checkpoint, last_written], dtype=torch.int64)
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

    def same(self, values: Mapping[str, Any], advice: str) -> None:
        """Raises:
        RunError: hosts hold different values; the keys are named, with what the first such host and host 0 hold.
        """
        if self.count == 1:
            return
        texts: list[str] = [""] * self.count
        try:
            dist.all_gather_object(texts, json.dumps(values))
        except RuntimeError as error:
            raise self.lost(error) from error
        first, *others = [leaves(json.loads(text)) for text in texts]
        for rank, theirs in enumerate(others, 1):
            different = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
            if different:
                told = [f"{k} = {theirs.get(k)!r} on host {rank}, {first.get(k)!r} on host 0" for k in different]
                raise RunError(f"hosts differ: {'; '.join(told)}. {advice}")

    def lost(self, error: RuntimeError) -> LostHost:
        # Without the place in the library's source, and without its guesses.
        reason = re.sub(r"\[\S+:\d+\] ", "", first_line(error)).split(". ")[0]
        failure = LostHost(f"another host is gone ({reason})")
        if self.on_gpu:
            # NOTE: streams that wait for the lost host would keep every clean-up waiting.
            end_process(f"{failure}; {self.advice()}")
        return failure

    def advice(self) -> str:
        """What to do after a host was lost. It reads no disk, which may be what was cut off."""
        if self.last_written >= 0:
            return (
                "its own output says why. Go on from the last checkpoint with --resume, on the same hosts, on fewer, "
                "or with other targets and drafters"
            )
        unless = "" if self.rank == 0 else ", unless host 0 says that it wrote one"
        return f"its own output says why. There is no checkpoint to go on from{unless}: start again"


def end_process(message: str) -> None:
    os.write(2, f"error: {message}\n".encode())
    sys.stdout.flush()
    os._exit(RunError.exit_status)


class Heartbeat:
    """A thread that tells the others that this host is alive, and ends the process where another is not.

    It has a connection of its own, and waits GRACE_SECONDS before it acts: where the run finds out by itself, as with
    gloo, it can still write a checkpoint.
    """

    def __init__(self, meeting: Meeting, advice: Callable[[], str]):
        self.rank, self.count, self.advice = meeting.rank, meeting.count, advice
        self.store = meeting.connect()
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
                end_process(f"{silent}; {self.advice()}")

    def stop(self) -> None:
        """End, before the interpreter does: the store's calls abort where they return after it. One that hangs is not
        waited for."""
        if not self.over.is_set():
            self.over.set()
            self.thread.join(timeout=5.0)


def settings(profile: Profile) -> dict[str, Any]:
    """What every host must say alike: any of it may decide who waits for whom. Of devices, the kind counts."""
    values = {name: keys for name, keys in dataclasses.asdict(profile).items() if name not in OWN_SECTIONS}
    for role in ("targets", "drafters"):
        values["placement"][role] = [name.split(":")[0] for name in values["placement"][role]]
    return values


@contextmanager
def joined(profile: Profile, say: Say) -> Iterator[Hosts]:
    """This host among those that torchrun started; alone without torchrun.

    Raises:
        UsageError: the step cannot be dealt to so many hosts, the profile asks for what one host alone can do, or
            the environment does not say where hosts meet.
        RunError: a host did not come, has another profile, or is gone.
    """
    meeting = read_meeting(os.environ)
    if meeting is None:
        yield Hosts(0, 1)
        return
    count = meeting.count
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
    store, hosts = meet(meeting, say), Hosts(meeting.rank, count)
    heartbeat = Heartbeat(meeting, hosts.advice)
    try:
        dist.init_process_group("gloo", store=store, rank=hosts.rank, world_size=count, timeout=PATIENCE)
        hosts.same(settings(profile), "Start every host with the same profile")
        hosts.open_groups(profile.placement.drafters)
        # At the end the others may still be writing; without this host's heartbeat they would call it lost.
        try:
            yield hosts
        except Interrupted:  # as all are
            hosts.gathered([0.0])
            raise
        hosts.gathered([0.0])
        heartbeat.stop()
        dist.destroy_process_group()
    except LostHost as lost:
        raise RunError(f"{lost}; {hosts.advice()}") from lost
    finally:
        heartbeat.stop()
