"""A row as a person sees it: its text, with the supervised tokens marked."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import UsageError

# Around supervised text where there is no colour.
MARKS = ("\u27e6", "\u27e7")


def row_text(tokenizer: Any, input_ids: np.ndarray, loss_mask: np.ndarray, coloured: bool) -> Text:
    """The tokens of one row, special ones included; supervised ones green, or between MARKS.

    Args:
        tokenizer: it decodes.
        input_ids: [n] int.
        loss_mask: [n] bool.
        coloured: False writes MARKS.
    """
    text = Text()
    for supervised, run in _runs(input_ids, loss_mask):
        decoded = tokenizer.decode(run)
        if coloured:
            text.append(decoded, style="bold green" if supervised else "dim")
        else:
            text.append(decoded.join(MARKS) if supervised else decoded)
    return text


def show_shard_rows(folder: str, rows: list[int], tokenizer: Any, console: Console) -> dict[str, Any]:
    """Print rows of a shard folder by their numbers, supervised tokens marked.

    Returns:
        A summary: the rows, their tokens and supervised tokens.
    Raises:
        UsageError: it has no such row. DataError: it is damaged.
    """
    reader, coloured = ShardReader(folder), console.color_system is not None
    beyond = [row for row in rows if row >= len(reader)]
    if beyond:
        raise UsageError(f"prepare: {folder} has rows 0 to {len(reader) - 1}, found --show-rows {beyond[0]}")
    counts = []
    for row in rows:
        ids, mask = reader[row]
        counts.append((len(ids), int(mask.sum())))
        console.rule(Text(f"row {row}: {counts[-1][1]} of {counts[-1][0]} tokens supervised"), align="left")
        console.print(row_text(tokenizer, ids, mask, coloured))
    tokens, supervised = zip(*counts, strict=True)
    return {"rows": rows, "tokens": sum(tokens), "supervised_tokens": sum(supervised)}


def _runs(input_ids: np.ndarray, loss_mask: np.ndarray) -> Iterator[tuple[bool, list[int]]]:
    for supervised, pairs in groupby(zip(loss_mask.tolist(), input_ids.tolist(), strict=True), lambda pair: pair[0]):
        yield supervised, [token for _, token in pairs]
