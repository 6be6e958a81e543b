"""Are the shards on disk still what was written? Their content, and, while they are in use, their files."""

import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from draftgraph.engine.errors import DataError

Stamps = dict[str, tuple[int, int, int]]


def stamps_of(folder: Path) -> Stamps:
    """Size, time and inode of the files that are read: another file under the same name has others."""
    try:
        entries = [entry for entry in folder.iterdir() if entry.suffix == ".npy" or entry.name == "shards.json"]
        stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return {}  # what is missing is told where it is read
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats}


def check_stamps(folder: Path, stamps: Stamps) -> None:
    """Compare the files of a folder with what they were.

    Raises:
        DataError: those that changed are named.
    """
    found = stamps_of(folder)
    changed = sorted(name for name in stamps if found.get(name) != stamps[name])
    if changed:
        raise DataError(
            f"{folder}: changed on disk while it was in use ({', '.join(changed[:3])}); what was trained since the "
            "last checkpoint is dropped: put the shards back and go on with --resume, or start a new run"
        )


def checksum(shards: Iterable[tuple[np.ndarray, np.ndarray]], offsets: np.ndarray, first_rows: np.ndarray) -> int:
    """CRC-32 over all rows, the tokens of each before its mask, as the writer took it.

    Args:
        shards: tokens [n] and mask [n] of each shard.
        offsets: [rows + 1] over all rows laid end to end.
        first_rows: [shards + 1], the row at which each shard begins.
    """
    total, ends = 0, offsets[1:].tolist()
    start = row = 0
    for (tokens, mask), stop in zip(shards, first_rows[1:].tolist(), strict=True):
        base = start
        # NOTE: slicing a memmap takes ten times as long.
        views = tokens.data, mask.data
        for end in ends[row:stop]:
            for view in views:
                total = zlib.crc32(view[start - base : end - base], total)
            start = end
        row = stop
    return total
