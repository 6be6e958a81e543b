"""A training in a process of its own, to be stopped, starved and killed. A fork server has imported torch for it."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from draftgraph.engine.run import checkpoint

SERVER = multiprocessing.get_context("forkserver")
# What a run imports late takes seconds as well.
LATE = ["transformers.models.llama.modeling_llama", "transformers.generation.utils", "torch._dynamo"]
SERVER.set_forkserver_preload(["victim", "draftgraph.engine.cli", "draftgraph.engine.train", *LATE])


def start(profile: Path, run: Path, *options: str, **faults: object):
    """A process that trains; it goes on where there is a usable checkpoint. Its messages are in RUN.err."""
    process = SERVER.Process(target=main, args=(str(profile), str(run), options, faults), daemon=False)
    process.start()
    return process


def finish(process, within: float = 60) -> int:
    """Its exit status; one that is late is ended and fails."""
    process.join(within)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    assert not late, "the run hangs"
    return process.exitcode


def errors(run: Path) -> str:
    return " ".join(Path(f"{run}.err").read_text(errors="replace").split())


def resumable(run: Path) -> bool:
    try:
        checkpoint.newest(run / "checkpoints")
    except Exception:
        return False
    return True


def main(profile: str, run: str, options: tuple[str, ...], faults: dict) -> None:
    """In the child.

    Args:
        faults: slow_step, slow_disk: seconds that a step or a flush takes longer; die_at: (name, n), the nth call of
            that function of the checkpoint module kills the process; largest_file: bytes; unprivileged: modes of
            files hold for root as well.
    """
    from draftgraph.engine import cli
    from draftgraph.engine.run.scheduler import Scheduler

    err = os.open(f"{run}.err", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(err, 1)
    os.dup2(err, 2)
    os.environ["COLUMNS"] = "1000"  # no message is folded
    if pause := faults.get("slow_step"):
        slow(Scheduler, "step", pause)
    if pause := faults.get("slow_disk"):
        slow(checkpoint, "flush", pause)
    if fatal := faults.get("die_at"):
        deadly(*fatal)
    if faults.get("unprivileged"):
        drop_capabilities()
    if (size := faults.get("largest_file")) is not None:
        # What is printed goes through another process: it would be refused as well.
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=err)
        assert cat.stdin is not None
        os.dup2(cat.stdin.fileno(), 1)
        os.dup2(cat.stdin.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resume = ["--resume"] if resumable(Path(run)) else []
    os._exit(cli.main(["train", profile, "--run", run, *resume, *options]))


def drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def slow(owner: object, name: str, seconds: float) -> None:
    real = getattr(owner, name)

    def slower(*arguments):
        time.sleep(seconds)
        return real(*arguments)

    setattr(owner, name, slower)


def deadly(name: str, number: int) -> None:
    real, calls = getattr(checkpoint, name), []

    def fatal(*arguments):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(checkpoint, name, fatal)


def wait_for(condition, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def logged(run: Path) -> int:
    """Steps in metrics.jsonl."""
    with contextlib.suppress(OSError):
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0
