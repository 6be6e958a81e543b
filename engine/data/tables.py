"""Rows of Parquet and Arrow files, and of folders that Hugging Face `datasets` saved, through pyarrow.

Promises: one batch of rows is in memory at a time, and only the columns that forms know are read. A null in a row is a
key that the row does not have: Arrow gives each struct of a column all keys of that column.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftgraph.engine.data.formats import KEYS, NOT_UTF8, Trouble
from draftgraph.engine.errors import DataError, UsageError

BATCH_ROWS = 256


class Damage(Exception):
    """Where and how a file breaks."""


def saved_files(folder: Path) -> list[Path]:
    """The data files of a folder written by `datasets`' save_to_disk; files of its cache lie there too."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        return [folder / name for name in names]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / 'state.json'}: expected the list `_data_files` of a saved data set") from error


def read_table(file: Path) -> Iterator[tuple[str, float, Any] | Trouble]:
    """Yield the rows of a Parquet file, or of an Arrow file or stream.

    Raises:
        UsageError: pyarrow is missing. DataError: no column belongs to a form. Damage: the file breaks there.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{file}: needs the extra `data` ({error}): pip install 'draftgraph[data]'") from error
    index = 0
    try:
        total, names, batches = _open_parquet(file) if file.suffix == ".parquet" else _open_arrow(file)
        known = [place for place, name in enumerate(names) if name in KEYS]
        if not known:
            raise DataError(f"{file}: columns {', '.join(names) or 'none'}; expected some of {', '.join(sorted(KEYS))}")
        for share, batch in batches:
            columns = [(batch.schema.names[place], batch.column(place)) for place in range(batch.num_columns)]
            columns = [(name, column) for name, column in columns if name in KEYS]
            for _, column in columns:
                _check(column, arrow.ArrowInvalid)
            for row in range(batch.num_rows):
                where = f"{file}[{index}]"
                done = (index + 1) / total if total else share
                index += 1
                try:
                    value = _without_nulls({name: column[row].as_py() for name, column in columns})
                except UnicodeDecodeError as error:
                    byte = f"byte {error.object[error.start]:#04x} at {error.start}"
                    yield Trouble(where, done, NOT_UTF8, byte)
                else:
                    yield where, done, value
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise Damage(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _open_parquet(file: Path) -> tuple[int, list[str], Iterator[tuple[float, Any]]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    names = table.schema_arrow.names
    batches = table.iter_batches(BATCH_ROWS, columns=[name for name in names if name in KEYS])
    return table.metadata.num_rows, names, ((1.0, batch) for batch in batches)


def _open_arrow(file: Path) -> tuple[int, list[str], Iterator[tuple[float, Any]]]:
    import pyarrow

    source = pyarrow.memory_map(str(file))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        reader = pyarrow.ipc.open_file(source)
        count = reader.num_record_batches
        return 0, reader.schema.names, (((i + 1) / count, reader.get_batch(i)) for i in range(count))
    stream = pyarrow.ipc.open_stream(source)
    return 0, stream.schema.names, ((source.tell() / source.size(), batch) for batch in stream)


def _check(column: Any, invalid: type[Exception]) -> None:
    """Refuse offsets that point outside: reading them would crash. Text that is no UTF-8 is told row by row instead."""
    try:
        column.validate(full=True)
    except invalid as error:
        if "UTF8" not in str(error):
            raise


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
