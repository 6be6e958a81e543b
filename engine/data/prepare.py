"""`draftgraph prepare`: conversations in, token shards and the doctor's counts out.

Promises: one bad row never stops it; every row is used or counted with a reason. A row longer than max_context is cut
at its end and counted. Rows that could not train anything stay out of the shards.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftgraph.engine.data import doctor as reasons
from draftgraph.engine.data.anchors import valid_anchors
from draftgraph.engine.data.doctor import Doctor
from draftgraph.engine.data.files import conversation_files, read_conversations
from draftgraph.engine.data.formats import Row, Tokens, Trouble
from draftgraph.engine.data.shards import ShardWriter
from draftgraph.engine.data.template import Template, TemplateRefusal
from draftgraph.engine.errors import DataError


class _Kept(NamedTuple):
    input_ids: np.ndarray
    loss_mask: np.ndarray
    tokens_cut: int


class _Skipped(NamedTuple):
    reason: str
    detail: str


def prepare(
    inputs: Sequence[str | Path],
    template: Template,
    out: str | Path,
    *,
    max_context: int,
    block_size: int,
    vocab_size: int,
    anchor_rule: str,
    target: str,
    progress: bool,
    form: str | None = None,
) -> dict[str, Any]:
    """Write the token shards of conversations.

    Args:
        inputs: files and folders of conversations.
        template: the target's tokenizer and chat template.
        out: the shard folder; an older one is replaced.
        max_context: tokens; longer rows are cut at their end.
        block_size: K, tokens; rows shorter than a block are left out.
        vocab_size: V, the rows of the target's embedding.
        anchor_rule: rows without a valid anchor under it are left out.
        target: the target's name, as profiles give it; recorded in the shards.
        progress: show a bar on stderr.
        form: the form of all rows; without it each row's keys tell.
    Returns:
        The doctor's summary, with `shards` (how many) and `path`.
    Raises:
        DataError: an input cannot be read, `out` is something else, or no row is left.
    """
    doctor = Doctor()
    files = [file for path in inputs for file in conversation_files(path)]
    sizes = [max(1, file.stat().st_size) for file in files]
    with (
        ShardWriter(
            out, vocab_size=vocab_size, fingerprint=template.fingerprint(), max_context=max_context, target=target
        ) as writer,
        _bar() if progress else nullcontext() as bar,
    ):
        task = bar.add_task("prepare", total=sum(sizes)) if bar else None
        for index, file in enumerate(files):
            for row in read_conversations(file, form):
                found = _examine(row, template, max_context, block_size, vocab_size, anchor_rule)
                if isinstance(found, _Skipped):
                    doctor.skip(found.reason, row.where, found.detail)
                else:
                    writer.append(found.input_ids, found.loss_mask)
                    doctor.use(len(found.input_ids), int(found.loss_mask.sum()), found.tokens_cut)
                if bar and task is not None:
                    bar.update(task, completed=sum(sizes[:index]) + row.done * sizes[index])
        summary = doctor.summary()
        if not doctor.rows_used:
            counts = (
                ", ".join(f"{count} {reason}" for reason, count in summary["rows_skipped"].items())
                or "the files are empty"
            )
            examples = "".join(f"\n  {reason}: {found[0]}" for reason, found in summary["examples"].items())
            raise DataError(f"none of {summary['rows_read']} rows can be used ({counts}){examples}")
        return {**summary, "shards": writer.finish(summary), "path": str(out)}


def _examine(
    row: Row | Trouble, template: Template, max_context: int, block_size: int, vocab_size: int, rule: str
) -> _Kept | _Skipped:
    """The row as it goes into a shard, or why it does not."""
    if isinstance(row, Trouble):
        return _Skipped(row.reason, row.detail)
    if not isinstance(row, Tokens):
        try:
            encoded = template.encode(row)
        except TemplateRefusal as refusal:
            return _Skipped(reasons.REFUSED, str(refusal))
        ids, mask = np.array(encoded[0], dtype=np.int64), np.array(encoded[1], dtype=bool)
    else:
        ids, mask = row.input_ids, row.loss_mask
    length = len(ids)
    if not length:
        return _Skipped(reasons.EMPTY, "no tokens")
    if ids.min() < 0 or ids.max() >= vocab_size:
        return _Skipped(reasons.OUT_OF_RANGE, f"ids {ids.min()} to {ids.max()}, vocabulary {vocab_size}")
    if length < block_size:
        return _Skipped(reasons.SHORT, f"{length} tokens, block {block_size}")
    ids, mask = ids[:max_context], mask[:max_context]
    if not mask.any():
        return _Skipped(reasons.UNSUPERVISED, f"{length} tokens")
    if not valid_anchors(mask, rule, block_size).any():
        return _Skipped(reasons.NO_ANCHOR, f"{int(mask.sum())} supervised of {len(ids)} tokens")
    return _Kept(ids, mask, length - len(ids))


def _bar() -> Progress:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))
