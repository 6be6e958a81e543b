"""What an interrupted `prepare` had done: one line of JSON per chunk of rows, beside the unfinished shards.

Promises: only one process writes at a time. A journal is read only by the command that wrote it, over the same inputs;
a last line that was cut is as if it had never been. Entries are in the order in which they were written.
"""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftgraph.engine.errors import DataError


class Unfinished(DataError):
    """Stopped by something that is not in the data: the same command goes on from there."""


class Journal:
    """The journal of one command.

    Args:
        path: the file, made if it is not there.
        command: all that the shards depend on, as JSON values.
    Attributes:
        changed: the keys of `command` in which an interrupted one before differs; its journal is dropped.
    """

    def __init__(self, path: Path, command: dict[str, Any]) -> None:
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{path.parent}: another `prepare` writes these shards; wait for it, or end it") from None
        self._command = json.loads(json.dumps(command))
        self._file.seek(0)
        found = _entry(self._file.readline())
        self.changed = [] if found is None else [key for key in command if found.get(key) != self._command[key]]
        if found is None or self.changed:
            self.restart()

    def entries(self) -> Iterator[dict[str, Any]]:
        """What was done so far; once it is read, what is appended comes behind the last whole entry."""
        self._file.seek(0)
        self._file.readline()
        while (entry := _entry(line := self._file.readline())) is not None:
            yield entry
        self._file.truncate(self._file.tell() - len(line))

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry: what it says is done is with the operating system by now, and a kill cannot take it back."""
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def restart(self) -> None:
        """Forget all entries."""
        self._file.truncate(0)
        self.append(self._command)

    def close(self) -> None:
        self._file.close()


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
