"""A run folder: locked by one process, opened for a new run or for one that goes on."""

import fcntl
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w
from rich.console import Console

from draftgraph.engine.config import load_profile, to_toml
from draftgraph.engine.errors import RunError, UsageError
from draftgraph.engine.plan import Plan
from draftgraph.engine.progress import teller
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.disk import write_text

# What every version writes; one that knew fewer keys left them, and later sections, out.
SECTIONS = {"run", "target", "drafter", "data", "buckets", "placement", "optim", "capture", "checkpoint", "log"}


def open_run(folder: Path, own: Path, plan: Plan, resume: bool, console: Console) -> Path | None:
    """Check that a run may start or go on in a locked folder; its profile is written only then.

    Args:
        own: where this host writes; the run folder itself for the first, which alone writes checkpoints.
    Returns:
        The checkpoint to go on from.
    Raises:
        RunError: it holds a run and --resume was not given, or the other way round, or the run is another one.
    """
    checkpoints = folder / "checkpoints"
    started = bool(checkpoint.found(checkpoints))
    profile_file = own / "profile.toml"
    if profile_file.exists() and not is_resolved(profile_file):
        raise RunError(f"{profile_file} is not a run's and would be overwritten; name another --run folder")
    if started and not resume:
        raise RunError(f"{folder} already holds a run; add --resume to go on with it, or name another --run folder")
    newest = None
    if resume:
        say = teller(console)
        newest = checkpoint.newest(checkpoints, say)
        changes: list[str] = []
        checkpoint.check_identity(newest, plan.identity, changes.append)
        if checkpoint.step_of(newest) >= plan.profile.run.steps:
            raise RunError(
                f"the run in {folder} is complete ({newest.name}); evaluate or export it, or go on with --resume --set "
                "run.steps=MORE"
            )
        for change in changes:
            say(change)
    try:
        write_text(profile_file, to_toml(plan.profile))
    except OSError as error:
        raise RunError(f"cannot write the run folder {folder}: {error.strerror}; name another --run") from error
    return newest


def is_resolved(path: Path) -> bool:
    """Whether a profile is as a run of this or of an older version writes it, every default of its time written out."""
    try:
        load_profile(str(path))
        text = path.read_text()
    except (UsageError, OSError, UnicodeDecodeError):
        return False
    values = tomllib.loads(text)
    return tomli_w.dumps(values) == text and values.keys() >= SECTIONS


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process, so that a second run cannot mix its checkpoints in.

    Raises:
        RunError: another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunError(f"cannot write the run folder {folder}: {error.strerror}; name another --run") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunError(f"another process is training in {folder}; wait for it, or name another --run") from error
    finally:
        os.close(descriptor)
