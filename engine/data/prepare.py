"""`draftgraph prepare`: conversations in, token shards and the doctor's counts out.

Promises: every row is used or counted with a reason, and one bad row never stops it unless `strict` is on. Memory does
not grow with the files, but for some hundred and fifty bytes a row.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from draftgraph.engine.data.doctor import Doctor, report
from draftgraph.engine.data.examine import Examiner, Kept, Rules, Skipped
from draftgraph.engine.data.files import conversation_files, read_conversations
from draftgraph.engine.data.formats import Row, Trouble
from draftgraph.engine.data.picture import draw_lengths
from draftgraph.engine.data.shards import PICTURE, ShardWriter
from draftgraph.engine.data.template import Template
from draftgraph.engine.data.view import MARKS, row_text
from draftgraph.engine.errors import DataError


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
    max_bad_rows: float = 1.0,
    strict: bool = False,
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
        max_bad_rows: the largest share of rows that may be skipped.
        strict: fail on the first row that would be skipped.
    Returns:
        The doctor's summary, with `shards` (how many), `path`, and `picture` (null without matplotlib).
    Raises:
        DataError: an input cannot be read, `out` is something else, no row is left, or too many are bad.
    """
    doctor = Doctor()
    examiner = Examiner(template, Rules(max_context, block_size, vocab_size, anchor_rule))
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
                found = examiner.examine(row)
                _count(doctor, row, found)
                if isinstance(found, Kept):
                    writer.append(found.input_ids, found.loss_mask)
                elif strict:
                    raise DataError(f"the first bad row, and --strict is on\n{report(doctor.summary())}")
                if bar and task is not None:
                    bar.update(task, completed=sum(sizes[:index]) + row.done * sizes[index])
        _check(doctor, max_bad_rows)
        drawn = draw_lengths(doctor.lengths, doctor.supervised, writer.partial / PICTURE)
        summary = doctor.summary()
        shards = writer.finish(summary)
    picture = str(Path(out) / PICTURE) if drawn else None
    return {**summary, "shards": shards, "path": str(out), "picture": picture}


def show_rows(
    inputs: Sequence[str | Path],
    template: Template,
    count: int,
    console: Console,
    *,
    max_context: int,
    block_size: int,
    vocab_size: int,
    anchor_rule: str,
    form: str | None = None,
) -> dict[str, Any]:
    """Print the first `count` rows that would be used, their supervised tokens marked; see `prepare` for the rest.

    Returns:
        The doctor's summary of the rows read for it.
    Raises:
        DataError: an input cannot be read, or no row can be used.
    """
    doctor = Doctor()
    examiner = Examiner(template, Rules(max_context, block_size, vocab_size, anchor_rule))
    coloured = console.color_system is not None
    console.print("supervised: green" if coloured else f"supervised: between {' and '.join(MARKS)}")
    for row in (row for path in inputs for row in read_conversations(path, form)):
        found = examiner.examine(row)
        _count(doctor, row, found)
        if isinstance(found, Skipped):
            continue
        tokens = f"{int(found.loss_mask.sum())} of {len(found.input_ids)} tokens supervised"
        title = f"{row.where}: {tokens} ({found.found_by})"
        console.rule(Text(title), align="left")
        console.print(row_text(template.tokenizer, found.input_ids, found.loss_mask, coloured))
        if doctor.rows_used == count:
            break
    _check(doctor, max_bad_rows=1.0)
    return doctor.summary()


def _count(doctor: Doctor, row: Row | Trouble, found: Kept | Skipped) -> None:
    if isinstance(found, Skipped):
        doctor.skip(found.reason, row.where, found.detail)
    else:
        doctor.use(len(found.input_ids), int(found.loss_mask.sum()), *found[2:])


def _check(doctor: Doctor, max_bad_rows: float) -> None:
    summary = doctor.summary()
    bad, read = doctor.rows_skipped.total(), summary["rows_read"]
    if not doctor.rows_used:
        raise DataError(f"no row can be used\n{report(summary)}" if read else "the files hold no row")
    if bad > max_bad_rows * read:
        raise DataError(
            f"{bad / read:.1%} of the rows are bad, --max-bad-rows is {max_bad_rows:.1%}\n{report(summary)}"
        )


def _bar() -> Progress:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))
