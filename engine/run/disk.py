"""Files that are on the disk whole or not at all, whatever ends the process or the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step.

    Raises:
        OSError: naming the file, which is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        flush(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
