"""The process behind `loggers`: reads JSON lines from its standard input, and writes them to wandb and TensorBoard.

One small interface, `Sink`. A sink that fails is told in loggers.log and left out; the others go on. The end of the
input without a last message means that the run broke.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import tomllib
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

LAST_SECONDS = 600  # an upload that takes longer is given up
STATE = "loggers.json"


class Sink(Protocol):
    told: str  # where the figures are, for people

    def log(self, step: int, figures: dict[str, Any]) -> None: ...

    def finish(self, summary: dict[str, Any] | None, files: list[Path]) -> None:
        """Args:
        summary: None where the run broke.
        """


class Wandb:
    """One wandb run per run folder, the same after a resume; an online one that cannot log in is written offline."""

    def __init__(self, folder: Path, mode: str, first_step: int) -> None:
        import wandb

        self.wandb, self.folder = wandb, folder
        state = read_state(folder)
        identity = state.setdefault("wandb_id", secrets.token_hex(4))
        state["wandb_mode"] = mode
        write_state(folder, state)
        try:
            self.run = self._init(mode, identity)
        except Exception as error:
            if mode != "online":
                raise
            print(f"wandb: cannot go online, writing offline: {error}", flush=True)
            wandb.teardown()
            mode = "offline"
            self.run = self._init(mode, identity)
        # After a resume from an earlier checkpoint, steps come again: they are an axis, not wandb's own count.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        offline = f"offline, run {identity}; to upload it: wandb sync {Path(self.run.dir).parent}"
        self.told = f"wandb: {offline if mode == 'offline' else self.run.url}"

    def _init(self, mode: Any, identity: str) -> Any:
        return self.wandb.init(
            id=identity,
            resume="allow",
            mode=mode,
            dir=self.folder,
            project=os.environ.get("WANDB_PROJECT", "draftgraph"),
            name=self.folder.name,
            config=profile_of(self.folder),
            settings=self.wandb.Settings(console="off", silent=True, init_timeout=60, disable_code=True),
        )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self.run.log({"step": step, **figures})

    def finish(self, summary: dict[str, Any] | None, files: list[Path]) -> None:
        for path in files:
            if path.suffix == ".html":
                self.run.log({"report": self.wandb.Html(path.read_text(), inject=False)})
        if summary:
            self.run.summary.update({f"final/{name}": value for name, value in summary.items()})
        if files:
            folders = [path for path in files if path.is_dir()]
            name, kind = ("export", "model") if folders else ("run", "run")
            artefact = self.wandb.Artifact(f"{name}-{self.run.id}", kind)
            for path in files:
                if path.is_dir():
                    artefact.add_dir(str(path))
                else:
                    artefact.add_file(str(path))
            self.run.log_artifact(artefact)
        self.run.finish(exit_code=1 if summary is None else 0)


class TensorBoard:
    """Event files in RUN/tensorboard; after a resume, figures of later steps are hidden."""

    def __init__(self, folder: Path, _: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)
        self.writer.add_text("profile", f"```\n{json.dumps(profile_of(folder), indent=1)}\n```")
        self.told = f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}"

    def log(self, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def finish(self, summary: dict[str, Any] | None, files: list[Path]) -> None:
        if summary:
            self.writer.add_text("summary", f"```\n{json.dumps(summary, indent=1)}\n```")
        self.writer.close()


KINDS: dict[str, Any] = {"wandb": Wandb, "tensorboard": TensorBoard}


def profile_of(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
        return tomllib.loads((folder / "profile.toml").read_text())
    return {}


def read_state(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((folder / STATE).read_text())
        if isinstance(state, dict):
            return state
    return {}


def write_state(folder: Path, state: dict[str, Any]) -> None:
    partial = folder / f".{STATE}.partial"
    partial.write_text(json.dumps(state, indent=1) + "\n")
    partial.replace(folder / STATE)


class Process:
    """The sinks that still work."""

    def __init__(self, folder: Path, first_step: int, names: list[str]) -> None:
        self.folder = folder
        self.sinks: dict[str, Sink] = {}
        for name in names:
            kind, _, mode = name.partition("=")
            self.guarded(kind, lambda k=kind, m=mode: self.sinks.update({k: KINDS[k](folder, m, first_step)}))
        told = {kind: sink.told for kind, sink in self.sinks.items()}
        self.guarded("", lambda: write_state(folder, {**read_state(folder), "told": told}))

    def guarded(self, kind: str, work: Any) -> None:
        """A sink that fails is told and left out."""
        try:
            work()
        except Exception:
            print(f"{kind or STATE} failed and is left out:", flush=True)
            traceback.print_exc()
            self.sinks.pop(kind, None)

    def read(self, lines: Iterable[str]) -> None:
        """Log every line; finish with the last one, or where the lines end without it."""
        files: list[Path] | None = None
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:  # the pipe took half of it
                continue
            if "files" in message:
                files = [Path(name) for name in message["files"]]
                break
            for kind, sink in list(self.sinks.items()):
                self.guarded(kind, lambda s=sink, m=message: s.log(m["step"], m["figures"]))
        signal.alarm(LAST_SECONDS)
        for kind, sink in list(self.sinks.items()):
            self.guarded(kind, lambda s=sink: s.finish(None if files is None else summary_of(files), files or []))


def summary_of(files: list[Path]) -> dict[str, Any]:
    """The figures of the receipt among the files, without nested ones."""
    for path in files:
        if path.name == "receipt.json":
            ours = json.loads(path.read_text())["ours"]
            return {name: value for name, value in ours.items() if not isinstance(value, list | dict)}
    return {}


def main(arguments: list[str]) -> None:
    folder, first_step, *names = arguments
    os.nice(10)  # the run comes first
    # A scheduler of jobs sends it to every process; the run says when it is over.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.access(Path.home(), os.W_OK):
        # wandb keeps caches and settings at home.
        for name in ("CACHE", "CONFIG", "DATA"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(Path(folder).absolute() / "wandb" / name.lower()))
    Process(Path(folder), int(first_step), names).read(sys.stdin)


if __name__ == "__main__":
    main(sys.argv[1:])
