"""Other places that a run's figures go to: wandb, TensorBoard. metrics.jsonl is always written, by the run itself.

They live in a process of their own, which reads JSON lines from a pipe that never blocks the writer. Promises: a slow
network, a full disk, a login that fails or a package that crashes costs the run nothing but what could not be sent,
which is counted; a message takes some tens of microseconds and waits for nobody. Keys stay in the environment.
"""

import contextlib
import fcntl
import importlib.util
import json
import netrc
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from draftgraph.engine.errors import UsageError

PIPE_BYTES = 2**20  # the queue: some thousand steps
ATOMIC_BYTES = 4096  # a longer write to a pipe could be torn (PIPE_BUF)
PATIENCE_SECONDS = 30.0  # at the end of a run
LOG, STATE = "loggers.log", "loggers.json"  # in the run folder: what the process says, and its run's id


def wandb_mode(wanted: str) -> str:
    """off, offline or online. "auto" is online where a key or a login is found, and offline elsewhere.

    Raises:
        UsageError: wandb is wanted by name and missing.
    """
    told = os.environ.get("WANDB_MODE", "")
    if wanted == "auto" and told in ("offline", "online", "disabled", "dryrun"):
        wanted = {"dryrun": "offline", "disabled": "off"}.get(told, told)
    if wanted == "off":
        return "off"
    if importlib.util.find_spec("wandb") is None:
        if wanted == "auto":
            return "off"
        raise UsageError(f'log.wandb = "{wanted}" needs the package: pip install wandb, or write log.wandb = "off"')
    return ("online" if has_key() else "offline") if wanted == "auto" else wanted


def has_key() -> bool:
    """Whether wandb would find a key, in the environment or where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):  # RuntimeError: nobody's home folder
        return False


def wanted_sinks(wandb: str, tensorboard: bool) -> list[str]:
    """What the process is to write to, as it takes it: "wandb=offline", "tensorboard".

    Raises:
        UsageError: a package that the profile names is missing.
    """
    mode = wandb_mode(wandb)
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("log.tensorboard = true needs the package: pip install 'draftgraph[tensorboard]'")
    return [f"wandb={mode}"] * (mode != "off") + ["tensorboard"] * tensorboard


class Loggers:
    """The process, and the writing end of its pipe.

    Args:
        sinks: of `wanted_sinks`; none: nothing is started.
        first_step: of this process of the run.
    """

    def __init__(self, folder: Path, sinks: Sequence[str], first_step: int = 0) -> None:
        self.folder, self.sinks = folder, list(sinks)
        self.sent = self.dropped = 0
        self.process: subprocess.Popen | None = None
        self.trouble = ""
        if self.sinks:
            try:
                self._start(first_step)
            except OSError as error:
                self.trouble = f"no {', '.join(self.sinks)}: {error}"

    def _start(self, first_step: int) -> None:
        # -P: whatever lies in the working folder is not imported.
        command = [sys.executable, "-P", "-m", "draftgraph.engine.run.log_process", str(self.folder), str(first_step)]
        with (self.folder / LOG).open("ab") as log:
            # NOTE: a session of its own: Ctrl-C in the terminal is for the run, which then ends this process in order.
            self.process = subprocess.Popen(
                [*command, *self.sinks],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                bufsize=0,
            )
        assert self.process.stdin is not None
        self.pipe = self.process.stdin.fileno()
        os.set_blocking(self.pipe, False)
        # Where a system does not know it, or an administrator not allow it, the size stays as it is.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Send the figures of a step, or drop them where the process is behind or gone."""
        if self.process is not None:
            self._send({"step": step, "figures": {name: value for name, value in figures.items() if value is not None}})

    def _send(self, message: Mapping[str, Any]) -> bool:
        line = json.dumps(message).encode() + b"\n"
        try:
            # A pipe takes a line of this size whole or refuses it.
            fits = len(line) <= ATOMIC_BYTES and os.write(self.pipe, line) == len(line)
        except OSError:
            fits = False
        self.sent += fits
        self.dropped += not fits
        return fits

    def close(self, files: Sequence[Path], patience: float = PATIENCE_SECONDS) -> str:
        """End the process with the run's files; a line for people, empty where none was started.

        Args:
            files: what becomes an artefact, files or folders; the figures of a receipt.json become the summary.
        """
        if self.process is None:
            return self.trouble
        deadline, dropped = time.monotonic() + patience, self.dropped
        last = {"files": [str(path.absolute()) for path in files if path.exists()]}
        while not self._send(last) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.dropped = dropped
        ended = self._wait(deadline)
        lost = f", {dropped:,} of {dropped + self.sent:,} messages were dropped" if dropped else ""
        if not ended:
            return f"{', '.join(self.sinks)}: still writing; it goes on alone for ten minutes at most{lost}"
        return f"{'; '.join(self.told()) or 'no logger started: see ' + str(self.folder / LOG)}{lost}"

    def abandon(self) -> None:
        """End after an error of the run: the process sees that nobody writes any more, and is not waited for."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def _wait(self, deadline: float) -> bool:
        assert self.process is not None
        self.abandon()
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def told(self) -> list[str]:
        """What the process wrote down about where its figures are."""
        try:
            return [str(line) for line in json.loads((self.folder / STATE).read_text())["told"].values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []


def log_export(folder: Path, exported: Path) -> str:
    """Add an export to the wandb run of a run folder, where there is one; a line for people."""
    try:
        state = json.loads((folder / STATE).read_text())
        mode = state["wandb_mode"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return Loggers(folder, [f"wandb={mode}"]).close([exported])
