"""A row as a person sees it: its text, with the supervised tokens marked."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

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


def _runs(input_ids: np.ndarray, loss_mask: np.ndarray) -> Iterator[tuple[bool, list[int]]]:
    for supervised, pairs in groupby(zip(loss_mask.tolist(), input_ids.tolist(), strict=True), lambda pair: pair[0]):
        yield supervised, [token for _, token in pairs]
