"""Finds files of conversations and reads their rows: JSON and JSON lines, plain, gzip or zstd; Parquet and Arrow.

Promises: every row of every file comes out once, in order. Rows are streamed: memory stays within a few times
ROW_BYTES, whatever a file's size. A file that breaks in the middle gives the rows before that place and one Trouble;
only a file without any readable row raises.
Does not: know forms (`formats`) or columns (`tables`).
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from draftgraph.engine.data.formats import BAD_JSON, DAMAGED, NOT_UTF8, TOO_LONG, Row, Trouble, parse, read_row
from draftgraph.engine.data.tables import Damage, read_table, saved_files
from draftgraph.engine.errors import DataError

JSON_SUFFIXES = (".json", ".jsonl")
PACKED_SUFFIXES = (".gz", ".zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (*JSON_SUFFIXES, *(f"{kind}{pack}" for kind in JSON_SUFFIXES for pack in PACKED_SUFFIXES), *TABLE_SUFFIXES)

# The longest row that is parsed, some 700,000 tokens of text: a tokenizer takes 150 times a row's bytes (measured on
# SmolLM2's), and one row should stay below half a gigabyte.
ROW_BYTES = 3 * 2**20
_CHUNK = 2**20
# NOTE: a zstd block may grow 30,000-fold; small pieces bound what one of them becomes.
_PACKED_CHUNK = 2**11

# Where a row is, the share of its file that is read then, and its JSON value, or the bytes of a line not parsed yet.
Found = tuple[str, float, Any] | Trouble


def conversation_files(path: str | Path) -> list[Path]:
    """The files of a path: itself, or all below it in sorted order; of a saved `datasets` folder, its data files."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
        saved = {file.parent for file in files if file.name == "state.json" and _is_saved(file.parent)}
        chosen = [file for file in files if file.parent not in saved and file.name != "dataset_dict.json"]
        chosen.extend(file for folder in saved for file in saved_files(folder))
        if not chosen:
            raise DataError(f"{path}: no conversations: the folder holds no {', '.join(SUFFIXES)} file")
        return sorted(chosen)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder of conversations")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: expected a file of conversations ({', '.join(SUFFIXES)}), found '{path.name}'")
    return [path]


def read_conversations(path: str | Path, form: str | None = None) -> Iterator[Row | Trouble]:
    """Yield the rows of a file, or of all files of a folder; `form` names their form, else each row's keys tell."""
    for found in read_values(path):
        yield found if isinstance(found, Trouble) else read_row(*found, form)


def read_values(path: str | Path) -> Iterator[Found]:
    """Yield what stands in each row of a file, or of all files of a folder: where, the share read, the parsed value."""
    for file in conversation_files(path):
        for found in find_rows(file):
            yield parsed(found)


def find_rows(file: Path) -> Iterator[Found]:
    """Yield the rows of one file as they stand there; what else they take, `understand` does, in any process."""
    rows = 0
    try:
        with file.open("rb") as raw:
            for found in _rows(file, raw):
                rows += 1
                yield found
    except (Damage, EOFError, zlib.error, gzip.BadGzipFile) as damage:
        if not rows:
            raise DataError(f"{file}: cannot be read: {damage}") from damage
        yield Trouble(str(file), 1.0, DAMAGED, f"breaks behind {rows} rows: {damage}")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def understand(found: Found, form: str | None = None) -> Row | Trouble:
    """Parse a row that was found, and read it in the form that is named or that its keys tell."""
    value = parsed(found)
    return value if isinstance(value, Trouble) else read_row(*value, form)


def parsed(found: Found) -> Found:
    """A row that was found, its line as the JSON value that it is."""
    if isinstance(found, Trouble) or not isinstance(found[2], bytes):
        return found
    where, done, line = found
    try:
        values = parse(line.decode())
    except UnicodeDecodeError as error:
        return Trouble(where, done, NOT_UTF8, f"byte {line[error.start]:#04x} at {error.start}")
    return (where, done, values[0]) if values else Trouble(where, done, BAD_JSON, "the line is not one JSON value")


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").is_file()


def _rows(file: Path, raw: BinaryIO) -> Iterator[Found]:
    if file.suffix in TABLE_SUFFIXES:
        return read_table(file)
    size = max(1, file.stat().st_size)

    def done() -> float:
        return min(1.0, raw.tell() / size)

    content = _unpacked(raw, file.suffix)
    kind = ".jsonl" if ".jsonl" in file.suffixes[-2:] else _kind(content)
    raw.seek(0)
    content = _unpacked(raw, file.suffix)
    if kind == ".jsonl":
        return _read_lines(file, content, done)
    return _read_list(file, content, done) if kind == "list" else _read_whole(file, content)


def _kind(content: io.BufferedIOBase) -> str:
    """Many a .json file holds JSON lines: its first line is an object by itself, and more follows."""
    first = b""
    while not first.removeprefix(codecs.BOM_UTF8).strip():
        if not (first := content.readline(ROW_BYTES + 1)):
            return "whole"
    if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return "list"
    value = parse(first)
    lines = value and isinstance(value[0], dict) and any(iter(lambda: content.read(_CHUNK).strip(), b""))
    return ".jsonl" if lines or len(first) > ROW_BYTES else "whole"


def _read_lines(file: Path, content: io.BufferedIOBase, done: Callable[[], float]) -> Iterator[Found]:
    number, bad, is_json = 0, 0, False
    while line := content.readline(ROW_BYTES + 1):
        number, length = number + 1, len(line)
        where, share = f"{file}:{number}", done()
        if length > ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = content.readline(_CHUNK)
                length += len(line)
            yield Trouble(where, share, TOO_LONG, f"{length:,} bytes")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if not is_json:
            is_json = _is_json(line)
            bad += not is_json
        yield where, share, line
    if bad and not is_json:
        raise DataError(
            f"{file}: no line of it is JSON; expected one row a line (a .json file may hold one list of rows)"
        )


def _is_json(line: bytes) -> bool:
    try:
        return bool(parse(line.decode()))
    except UnicodeDecodeError:
        return False


def _read_list(file: Path, content: io.BufferedIOBase, done: Callable[[], float]) -> Iterator[Found]:
    # NOTE: bytes that are no UTF-8 become lone surrogates here, so that the row that holds them can be named.
    text = io.TextIOWrapper(cast(BinaryIO, content), "utf-8-sig", errors="surrogateescape", newline="")
    try:
        for index, (value, source) in enumerate(_items(text)):
            where = f"{file}[{index}]"
            try:
                source.encode()
                yield where, done(), value
            except UnicodeEncodeError as error:
                byte = f"byte {ord(source[error.start]) & 0xFF:#04x} at {error.start}"
                yield Trouble(where, done(), NOT_UTF8, byte)
    finally:
        text.detach()


def _items(text: io.TextIOBase) -> Iterator[tuple[Any, str]]:
    """The items of one JSON list, parsed one by one, each with its text."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    buffer, index, ended = text.read(_CHUNK).lstrip(), 0, False
    place = 1  # behind the bracket
    while True:
        place = between.match(buffer, place).end()  # type: ignore[union-attr]
        if buffer.startswith("]", place):
            if (buffer[place + 1 :] + text.read(_CHUNK)).strip():
                raise Damage("more follows behind the list")
            return
        try:
            value, stop = decoder.raw_decode(buffer, place)
        except ValueError:
            stop = 0
        except RecursionError:
            raise Damage(f"row {index} is nested too deeply") from None
        # A value that touches the end of the buffer may go on behind it.
        if stop and stop < len(buffer):
            yield value, buffer[place:stop]
            index, place = index + 1, stop
            continue
        if ended or len(buffer) - place > ROW_BYTES:
            what = "the list is cut, or no JSON," if ended else f"over {ROW_BYTES:,} bytes of one row, or no JSON,"
            raise Damage(f"{what} in row {index}")
        more = text.read(max(_CHUNK, len(buffer) - place))
        buffer, place, ended = buffer[place:] + more, 0, not more


def _read_whole(file: Path, content: io.BufferedIOBase) -> Iterator[Found]:
    text = content.read(ROW_BYTES + 1)
    if len(text) > ROW_BYTES:
        yield Trouble(str(file), 1.0, TOO_LONG, f"over {ROW_BYTES:,} bytes")
        return
    try:
        yield f"{file}[0]", 1.0, json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Damage(f"not JSON ({error}); expected one list of rows, or JSON lines") from error


def _unpacked(raw: BinaryIO, suffix: str) -> io.BufferedIOBase:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".zst":
        return io.BufferedReader(_Zstd(raw), _CHUNK)
    return cast(io.BufferedIOBase, raw)


class _Zstd(io.RawIOBase):
    """The content of zstd frames. The library's own reader takes a frame that is cut for one that ended."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._library, self._raw = zstandard, raw
        self._frame: Any = None
        self._packed, self._plain = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._plain:
            packed = self._packed or self._raw.read(_PACKED_CHUNK)
            if not packed:
                if self._frame is not None:
                    raise Damage("the zstd frame ends in the middle")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._plain = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise Damage(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(target), len(self._plain))
        target[:count], self._plain = self._plain[:count], self._plain[count:]
        return count
