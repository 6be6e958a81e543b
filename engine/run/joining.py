"""Where hosts meet, before there is a process group: what torchrun put into the environment, and a store of theirs.

Promises: whoever waits says for whom, for JOIN_SECONDS at most, and signals come through; what is wrong with the
environment is one sentence.
"""

import datetime
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from draftgraph.engine.errors import RunError, UsageError

JOIN_SECONDS, SAY_SECONDS, LOOK_SECONDS = 600.0, 60.0, 0.2
# Heartbeats find a host that is gone; one that writes a checkpoint may take its time.
PATIENCE = datetime.timedelta(days=1)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Meeting:
    """The place that torchrun, or a script in its stead, names to every host."""

    rank: int
    count: int
    address: str
    port: int
    serves: bool  # this host holds the store; under torchrun its agent does
    attempt: str  # torchrun may start all hosts again, over the same store

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"

    def connect(self) -> dist.Store:
        """One more connection to the store that is there."""
        return dist.PrefixStore(self.attempt, dist.TCPStore(self.address, self.port, None, False, PATIENCE, False))


def read_meeting(environment: Mapping[str, str]) -> Meeting | None:
    """None where there is one host.

    Raises:
        UsageError: naming the variable.
    """
    count = number(environment, "WORLD_SIZE", 1, None) if "WORLD_SIZE" in environment else 1
    if count == 1:
        return None
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise UsageError(f"MASTER_ADDR is not set beside WORLD_SIZE={count}; it is the address of host 0")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank = number(environment, "RANK", 0, count - 1)
    port = number(environment, "MASTER_PORT", 1, 65535)
    attempt = f"draftgraph-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Meeting(rank, count, address, port, rank == 0 and not agent, attempt)


def number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    found = environment.get(name)
    value = int(found) if found is not None and found.isascii() and found.isdigit() else -1
    if value < least or (most is not None and value > most):
        wanted = f"from {least} to {most}" if most is not None else f"from {least} on"
        raise UsageError(
            f"{name} {'is not set' if found is None else f'= {found!r}'}; it takes a whole number {wanted}: torchrun "
            "sets it, or a script that starts one process per host; without WORLD_SIZE there is one host"
        )
    return value


def meet(meeting: Meeting, say: Say) -> dist.Store:
    """Open the store and wait until every host is there.

    Raises:
        UsageError: the store cannot be opened here, or hosts disagree in WORLD_SIZE or RANK.
        RunError: somebody did not come.
    """
    if meeting.serves:
        try:
            socket.getaddrinfo(meeting.address, meeting.port)
            served = dist.TCPStore("localhost", meeting.port, None, True, PATIENCE, False)
        except (OSError, RuntimeError) as error:
            why = "the port is in use" if "EADDRINUSE" in str(error) else first_line(error)
            raise UsageError(
                f"host 0 cannot listen at {meeting.where}: {why}; set MASTER_ADDR to this host and MASTER_PORT to a "
                "free port, alike on all hosts"
            ) from error
        store: dist.Store = dist.PrefixStore(meeting.attempt, served)
    else:
        store = reached(meeting, say)
    try:
        if store.add(f"taken-{meeting.rank}", 1) > 1:
            raise UsageError(f"two hosts have RANK={meeting.rank} at {meeting.where}; each takes its own")
        store.set(f"here-{meeting.rank}", str(meeting.count))
        wait(meeting, lambda: absent(store, meeting), say)
        counts = [int(store.get(f"here-{rank}")) for rank in range(meeting.count)]
    except RuntimeError as error:
        raise RunError(f"host 0 left {meeting.where} before all had come; its own output says why") from error
    for rank, theirs in enumerate(counts):
        if theirs != meeting.count:
            raise UsageError(f"WORLD_SIZE is {meeting.count} here and {theirs} on host {rank}; give all the same")
    return store


def absent(store: dist.Store, meeting: Meeting) -> str:
    missing = [str(rank) for rank in range(meeting.count) if not store.check([f"here-{rank}"])]
    return f"{len(missing)} of {meeting.count} hosts (RANK {', '.join(missing)})" if missing else ""


def reached(meeting: Meeting, say: Say) -> dist.Store:
    """The store that another process serves, as soon as it does."""
    stores: list[dist.Store] = []
    # Whatever else listens there may never answer, which no signal could interrupt: a thread can be left.
    thread = threading.Thread(target=lambda: stores.append(meeting.connect()), daemon=True)

    def lacking() -> str:
        if stores:
            return ""
        if thread.ident is not None:
            return "an answer of host 0"
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=5.0).close()
        except OSError as error:
            return f"host 0 ({error.strerror or error})"
        thread.start()
        thread.join(1.0)
        return "" if stores else "an answer of host 0"

    wait(meeting, lacking, say)
    return stores[0]


def wait(meeting: Meeting, lacking: Callable[[], str], say: Say) -> None:
    """Look until nothing is lacking; signals come through between two looks."""
    since, told = time.monotonic(), 0.0
    while what := lacking():
        waited = time.monotonic() - since
        if waited > JOIN_SECONDS:
            raise RunError(
                f"host {meeting.rank} waited {JOIN_SECONDS:.0f} s at {meeting.where} for {what}; their own output says "
                "why. All hosts take the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and each a RANK of its own"
            )
        if waited >= told:
            say(f"host {meeting.rank} is waiting for {what} at {meeting.where}, {JOIN_SECONDS:.0f} s at most")
            told += SAY_SECONDS
        time.sleep(LOOK_SECONDS)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
