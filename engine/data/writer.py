"""Writes token shards, and takes up what an interrupted writer left.

Promises: a folder appears whole or not at all; a folder that is no shard folder is never overwritten. Unfinished files
lie in a hidden folder beside it, with the journal that tells how far they are good.
"""

import io
import json
import shutil
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from draftgraph.engine.data.intact import checksum
from draftgraph.engine.data.journal import Journal, Unfinished
from draftgraph.engine.data.shards import FIELDS, FORMAT, PICTURE, VERSION
from draftgraph.engine.errors import DataError

JOURNAL = "journal.jsonl"
SHARD_TOKENS = 2**28
# What numpy pads the header of a one-dimensional array to.
_HEADER_BYTES = 128


class ShardWriter:
    """Writes rows one by one; `finish` puts the folder in place.

    A `with` block left without it leaves nothing, but where the process or its disk was stopped: then the next writer
    of the same `command` finds `journal` as it was, and may `restore` the rows that it tells of.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocab_size: int,
        fingerprint: str,
        max_context: int,
        target: str = "",
        shard_tokens: int = SHARD_TOKENS,
        command: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        _check_replaceable(self.folder)
        self._facts = {
            "vocab_size": vocab_size,
            "max_context": max_context,
            "fingerprint": fingerprint,
            "target": target,
        }
        self.checksum = 0
        self._shard_tokens = shard_tokens
        self._lengths = array("l")
        self._shards: list[dict[str, int]] = []
        self._files: dict[str, BinaryIO] = {}
        # Where the files lie until `finish`; a picture may be put beside them.
        self.partial = self.folder.with_name(f".{self.folder.name}.partial")
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self.journal = Journal(self.partial / JOURNAL, command or {})
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be written: {error.strerror}") from error
        if command is None:
            self.restore([], 0)

    def restore(self, lengths: Sequence[int], checksum: int) -> bool:
        """Take up the rows of an interrupted writer; where the files do not hold them, start with none: False."""
        for length in lengths:
            self._place(length)
        names = [f"{name}-{index:05d}.npy" for index in range(len(self._shards)) for name in FIELDS]
        for entry in self.partial.iterdir():
            if entry.name not in (*names, JOURNAL):
                entry.unlink()
        if lengths and self._checksum_on_disk() != checksum:
            self._lengths, self._shards = array("l"), []
            self.journal.restart()
            self.restore([], 0)
            return False
        self.checksum = checksum
        for index, shard in enumerate(self._shards):
            self._close_shard()
            for name, dtype in FIELDS.items():
                self._files[name] = (self.partial / f"{name}-{index:05d}.npy").open("r+b")
                _write_header(self._files[name], dtype, shard["tokens"])
                self._files[name].seek(shard["tokens"] * dtype.itemsize, io.SEEK_CUR)
                self._files[name].truncate()
        return True

    def append(self, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Add one row of at least one token."""
        assert len(input_ids) == len(loss_mask) > 0
        if self._place(len(input_ids)):
            self._close_shard()
            for name, dtype in FIELDS.items():
                self._files[name] = (self.partial / f"{name}-{len(self._shards) - 1:05d}.npy").open("w+b")
                _write_header(self._files[name], dtype, 0)
        for (name, dtype), values in zip(FIELDS.items(), (input_ids, loss_mask), strict=True):
            content = np.asarray(values).astype(dtype).tobytes()
            self.checksum = zlib.crc32(content, self.checksum)
            self._files[name].write(content)

    def flush(self) -> None:
        """Hand all rows to the operating system; a kill of this process does not lose them then."""
        for file in self._files.values():
            file.flush()

    def finish(self, doctor: dict[str, Any]) -> int:
        """Close the files, put the folder in place of an older one, and say how many shards it has."""
        if not self._lengths:
            raise DataError(f"{self.folder}: no row was left to write; nothing to train on")
        self._close_shard()
        np.save(self.partial / "offsets.npy", np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]))
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "rows": len(self._lengths),
            "tokens": sum(self._lengths),
            "checksum": self.checksum,
            **self._facts,
        }
        text = json.dumps({**facts, "shards": self._shards, "doctor": doctor}, indent=1)
        (self.partial / "shards.json").write_text(text + "\n")
        _check_replaceable(self.folder)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)
        (self.folder / JOURNAL).unlink()
        return len(self._shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        is_stop = kind is not None and (issubclass(kind, (Unfinished, OSError)) or not issubclass(kind, Exception))
        if not is_stop:
            shutil.rmtree(self.partial, ignore_errors=True)
        self.journal.close()

    def _place(self, length: int) -> bool:
        """Count a row; True where it begins a shard."""
        begins = not self._shards or self._shards[-1]["tokens"] + length > self._shard_tokens
        if begins:
            self._shards.append({"rows": 0, "tokens": 0})
        self._shards[-1]["rows"] += 1
        self._shards[-1]["tokens"] += length
        self._lengths.append(length)
        return begins

    def _close_shard(self) -> None:
        for name, file in self._files.items():
            # The header says how many tokens there are, which the end of the file tells.
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            _write_header(file, FIELDS[name], (size - _HEADER_BYTES) // FIELDS[name].itemsize)
            file.close()
        self._files = {}

    def _checksum_on_disk(self) -> int:
        """Of the rows that the journal tells of; -1 where files are too short."""
        try:
            arrays = [
                (self._mapped("tokens", index, shard["tokens"]), self._mapped("mask", index, shard["tokens"]))
                for index, shard in enumerate(self._shards)
            ]
        except (OSError, ValueError):
            return -1
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        first_rows = np.cumsum([0] + [shard["rows"] for shard in self._shards])
        return checksum(arrays, offsets, first_rows)

    def _mapped(self, name: str, index: int, length: int) -> np.ndarray:
        return np.memmap(self.partial / f"{name}-{index:05d}.npy", FIELDS[name], "r", _HEADER_BYTES, (length,))


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    # NOTE: numpy pads the header so that the first axis may grow: written again in place, it has the same size.
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    foreign = (
        [folder.name] if not folder.is_dir() else [entry.name for entry in folder.iterdir() if not _is_ours(entry.name)]
    )
    if foreign:
        raise DataError(
            f"{folder}: not a folder of token shards (it has {min(foreign)}), so it is not overwritten; "
            "choose another --out"
        )


def _is_ours(name: str) -> bool:
    is_array = name.endswith(".npy") and name.split("-")[0] in FIELDS
    return is_array or name in ("shards.json", "offsets.npy", PICTURE, JOURNAL)
