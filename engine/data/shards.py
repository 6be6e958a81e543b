"""Token shards: prepared rows on disk, memory-mapped; and random rows with the same reading interface.

A shard folder holds `shards.json` (version, counts, vocabulary, fingerprint, the doctor's summary), `offsets.npy`
int64 [rows + 1] over all rows laid end to end, and per shard `tokens-NNNNN.npy` int32 and `mask-NNNNN.npy` uint8; a
picture `lengths.svg` may lie beside them. A row never straddles two shards.
Promises: damage is a DataError.
Does not: write them, which is `writer`.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.engine.data.anchors import count_valid_anchors
from draftgraph.engine.data.intact import Stamps, check_stamps, checksum, stamps_of
from draftgraph.engine.errors import DataError

PICTURE = "lengths.svg"
FORMAT = "draftgraph-shards"
VERSION = 1
_CHUNK_TOKENS = 2**24
FIELDS: dict[str, np.dtype] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1")}


class ShardReader:
    """Reads a shard folder; rows are numbered over all its shards. Another process opens it by path."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stamps = stamps_of(self.folder)
        self.facts = _read_facts(self.folder)
        self.vocab_size: int = self.facts["vocab_size"]
        self.fingerprint: str = self.facts["fingerprint"]
        self.digest = f"{self.fingerprint} {self.facts['checksum']:08x}"
        self._offsets = np.array(self._open("offsets.npy", np.dtype("<i8"), self.facts["rows"] + 1))
        self.lengths = np.diff(self._offsets)
        self._first_rows = np.cumsum([0] + [shard["rows"] for shard in self.facts["shards"]])
        self._starts: list[int] = self._first_rows.tolist()
        last_offsets = np.cumsum([0] + [shard["tokens"] for shard in self.facts["shards"]])
        if self.lengths.min() < 1 or not np.array_equal(self._offsets[self._first_rows], last_offsets):
            raise DataError(f"{self.folder / 'offsets.npy'}: damaged: offsets and shards disagree; run prepare again")
        self._shards = [
            {name: self._open(f"{name}-{index:05d}.npy", dtype, shard["tokens"]) for name, dtype in FIELDS.items()}
            for index, shard in enumerate(self.facts["shards"])
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids [n] int32 and loss_mask [n] bool of one row."""
        shard = bisect_right(self._starts, row) - 1
        base = self._offsets[self._starts[shard]]
        part = slice(self._offsets[row] - base, self._offsets[row + 1] - base)
        ids = self._shards[shard]["tokens"][part]
        if ids.view(np.uint32).max() >= self.vocab_size:  # an id below 0 is among the largest then
            raise DataError(
                f"{self.folder}: damaged: row {row} holds token ids {ids.min()} to {ids.max()}, "
                f"expected 0 to {self.vocab_size - 1}"
            )
        return ids, self._shards[shard]["mask"][part] != 0

    def __reduce__(self) -> tuple[Callable, tuple[Path, Stamps]]:
        return _reopened, (self.folder, self._stamps)

    def check_unchanged(self) -> None:
        """Refuse to go on where a file changed since it was opened; it reads no content."""
        check_stamps(self.folder, self._stamps)

    def verify(self) -> None:
        """Compare every byte with the checksum that the writer took.

        Raises:
            DataError: it differs.
        """
        arrays = [(shard["tokens"], shard["mask"]) for shard in self._shards]
        if checksum(arrays, self._offsets, self._first_rows) != self.facts["checksum"]:
            raise DataError(f"{self.folder}: damaged: its content is not what was written; run prepare again")

    def valid_anchors(self, rule: str, block_size: int) -> np.ndarray:
        """How many valid anchors each row has, [rows] int64; streams over the masks."""
        counts = np.empty(len(self), dtype=np.int64)
        for shard, first, stop in zip(self._shards, self._first_rows[:-1], self._first_rows[1:], strict=True):
            base = self._offsets[first]
            while first < stop:
                last = int(np.searchsorted(self._offsets, self._offsets[first] + _CHUNK_TOKENS, side="right")) - 1
                last = min(max(last, first + 1), stop)
                offsets = self._offsets[first : last + 1]
                mask = shard["mask"][offsets[0] - base : offsets[-1] - base] != 0
                counts[first:last] = count_valid_anchors(mask, offsets - offsets[0], rule, block_size)
                first = last
        return counts

    def _open(self, name: str, dtype: np.dtype, length: int) -> np.ndarray:
        try:
            array = np.load(self.folder / name, mmap_mode="r")
        except Exception as error:  # numpy parses the header as Python text: a damaged one raises whatever that raises
            raise DataError(f"{self.folder / name}: damaged or missing: {error}; run prepare again") from error
        if array.dtype != dtype or array.shape != (length,):
            raise DataError(
                f"{self.folder / name}: damaged: expected {dtype} [{length}], found {array.dtype} {list(array.shape)}; "
                "run prepare again"
            )
        return array.view(np.ndarray)  # slicing a memmap takes ten times as long


def _reopened(folder: Path, stamps: Stamps) -> ShardReader:
    reader = ShardReader(folder)
    reader._stamps = stamps
    reader.check_unchanged()
    return reader


@dataclass(frozen=True)
class RandomRows:
    """Random tokens in rows of given lengths, the last three quarters supervised; for runs with random weights."""

    lengths: np.ndarray  # [rows] int64
    vocab_size: int
    seed: int

    @property
    def digest(self) -> str:
        return f"random {self.seed}"

    @property
    def fingerprint(self) -> str:
        return "random"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids [n] int32, below V - 8 to leave room for a mask token, and loss_mask [n] bool of one row."""
        length = int(self.lengths[row])
        ids = np.random.default_rng([self.seed, row]).integers(0, self.vocab_size - 8, length, dtype=np.int32)
        return ids, np.arange(length) >= length // 4

    def valid_anchors(self, rule: str, block_size: int) -> np.ndarray:
        """How many valid anchors each row has, [rows] int64."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], self.lengths)
        return count_valid_anchors(place >= np.repeat(self.lengths // 4, self.lengths), offsets, rule, block_size)


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "shards.json"
    try:
        facts = json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{folder}: no token shards here ({path.name}: {error.strerror}); write them with `draftgraph prepare`"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}; run prepare again") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DataError(f"{path}: not written by `draftgraph prepare`")
    if facts.get("version") != VERSION:
        raise DataError(f"{path}: version {facts.get('version')}, expected {VERSION}; run prepare again")
    if not _is_complete(facts):
        raise DataError(f"{path}: damaged: keys are missing or hold something else; run prepare again")
    return facts


def _is_complete(facts: dict[str, Any]) -> bool:
    try:
        shards = [(shard["rows"], shard["tokens"]) for shard in facts["shards"]]
        counts = [facts[key] for key in ("rows", "tokens", "checksum", "vocab_size", "max_context")]
        texts = [facts[key] for key in ("fingerprint", "target")]
    except (KeyError, TypeError):
        return False
    if not shards or any(type(count) is not int or count < 0 for count in (*counts, *sum(shards, ()))):
        return False
    totals = (facts["rows"], facts["tokens"])
    return totals == tuple(map(sum, zip(*shards, strict=True))) and all(isinstance(text, str) for text in texts)


class Selected:
    """Some rows of a source, renumbered from 0."""

    def __init__(self, source: "ShardReader | RandomRows | Selected", row_ids: np.ndarray) -> None:
        self._source, self.row_ids = source, row_ids
        self.lengths: np.ndarray = source.lengths[row_ids]
        self.vocab_size: int = source.vocab_size
        self.fingerprint: str = source.fingerprint
        self.digest: str = hashlib.sha256(self.lengths.tobytes() + source.digest.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids [n] int32 and loss_mask [n] bool of one row."""
        return self._source[int(self.row_ids[row])]

    def check_unchanged(self) -> None:
        """Refuse to go on where a shard changed on disk; see ShardReader."""
        if isinstance(self._source, ShardReader):
            self._source.check_unchanged()

    def verify(self) -> None:
        """Refuse damaged shards; see ShardReader. It reads all of them."""
        if isinstance(self._source, ShardReader):
            self._source.verify()

    def valid_anchors(self, rule: str, block_size: int) -> np.ndarray:
        """How many valid anchors each row has, [rows] int64."""
        return self._source.valid_anchors(rule, block_size)[self.row_ids]
