"""`draftgraph prepare`: conversations in, token shards and the doctor's counts out.

Promises: every row is used or counted with a reason, and one bad row never stops it unless `strict` is on. Shards and
report are the same bytes whatever the number of workers, and however often it was killed and started again. Memory does
not grow with the files, but for some fifty bytes a row.

How: this process reads files and writes shards, both in order; what lies between, `workers` do to chunks of rows.
Behind each chunk, the journal holds what became of its rows.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from draftgraph.engine.data.doctor import DETAIL, Doctor, report
from draftgraph.engine.data.examine import Examiner, Kept, Names, Rules, Skipped
from draftgraph.engine.data.files import conversation_files, find_rows, read_conversations
from draftgraph.engine.data.formats import Trouble
from draftgraph.engine.data.picture import draw_lengths
from draftgraph.engine.data.shards import PICTURE
from draftgraph.engine.data.template import Template
from draftgraph.engine.data.view import MARKS, row_text
from draftgraph.engine.data.workers import Chunk, InProcess, Work, Workers
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.errors import DataError, DraftgraphError

# A tokenizer takes 150 times a text's bytes, row by row; the rest of a chunk waits in a pipe.
CHUNK_BYTES = 2**18
CHUNK_ROWS = 256
# A process starts in a second, in which it would have prepared so much.
_WORKER_BYTES = 2**21
# The length of an outcome in the journal: of a used row its counts and name; of a skipped one reason, where, detail.
USED = 7


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
    workers: int | None = None,
) -> dict[str, Any]:
    """Write the token shards of conversations; go on where the same command was interrupted.

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
        workers: processes; 1 is this one. Without it, one for each core as far as the files are worth it.
    Returns:
        The doctor's summary, with `shards` (how many), `path`, and `picture` (null without matplotlib).
    Raises:
        DataError: an input cannot be read, `out` is something else, no row is left, or too many are bad.
    """
    rules = Rules(max_context, block_size, vocab_size, anchor_rule)
    files = [file for path in inputs for file in conversation_files(path)]
    sizes = [max(1, file.stat().st_size) for file in files]
    count = workers or min(len(os.sched_getaffinity(0)), 1 + sum(sizes) // _WORKER_BYTES)
    command = {
        "inputs": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "template": [template.fingerprint(), asdict(template.supervision), template.mask],
        "rules": asdict(rules),
        "switches": [target, form, max_bad_rows, strict],
    }
    work = Work(template, rules, form)
    with (
        ShardWriter(
            out,
            vocab_size=vocab_size,
            fingerprint=template.fingerprint(),
            max_context=max_context,
            target=target,
            command=command,
        ) as writer,
        _bar() if progress else nullcontext() as bar,
    ):
        done = _Done.restored(writer)
        if bar and writer.journal.changed:
            changed = ", ".join(writer.journal.changed)
            bar.console.print(f"starting over: an interrupted run had other {changed}", markup=False)
        if bar and done.rows_read:
            bar.console.print(f"going on behind {done.rows_read:,} rows of an interrupted run", markup=False)
        task = bar.add_task("prepare", total=sum(sizes)) if bar else None
        with Workers(work, count) if count > 1 else InProcess(work) as pool:
            for chunk, examined in pool.map(_chunks(files, done.file, done.row)):
                outcomes = [done.count(*result, writer, strict) for result in examined]
                writer.flush()
                place = {"file": chunk.file, "row": chunk.row, "checksum": writer.checksum}
                writer.journal.append({**place, "rows": outcomes})
                if bar and task is not None:
                    bar.update(task, completed=sum(sizes[: chunk.file]) + chunk.done * sizes[chunk.file])
        _check(done.doctor, max_bad_rows)
        drawn = draw_lengths(done.doctor.lengths, done.doctor.supervised, writer.partial / PICTURE)
        summary = done.doctor.summary()
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
    names = Names()
    examiner = Examiner(template, Rules(max_context, block_size, vocab_size, anchor_rule))
    coloured = console.color_system is not None
    console.print("supervised: green" if coloured else f"supervised: between {' and '.join(MARKS)}")
    for row in (row for path in inputs for row in read_conversations(path, form)):
        found = names.judge(examiner.examine(row))
        _tell(doctor, _outcome(row.where, found))
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


class _Done:
    """What has become of the rows so far."""

    def __init__(self) -> None:
        self.doctor, self.names = Doctor(), Names()
        self.file = self.row = 0  # where reading goes on

    @property
    def rows_read(self) -> int:
        return self.doctor.rows_used + self.doctor.rows_skipped.total()

    @classmethod
    def restored(cls, writer: ShardWriter) -> "_Done":
        """As the writer's journal tells."""
        done, checksum = cls(), 0
        for entry in writer.journal.entries():
            done.file, done.row, checksum = entry["file"], entry["row"], entry["checksum"]
            for outcome in entry["rows"]:
                _tell(done.doctor, outcome)
                if len(outcome) == USED:
                    done.names.add(outcome[-1])
        return done if writer.restore(done.doctor.lengths, checksum) else cls()

    def count(self, where: str, found: Kept | Skipped, writer: ShardWriter, strict: bool) -> list[Any]:
        """Count a row and write it, or not; returns what the journal keeps of it."""
        found = self.names.judge(found)
        _tell(self.doctor, outcome := _outcome(where, found))
        if isinstance(found, Kept):
            writer.append(found.input_ids, found.loss_mask)
        elif strict:
            raise DataError(f"the first bad row, and --strict is on\n{report(self.doctor.summary())}")
        return outcome


def _outcome(where: str, found: Kept | Skipped) -> list[Any]:
    if isinstance(found, Skipped):
        return [found.reason, where, " ".join(found.detail.split())[:DETAIL]]
    counts = [len(found.input_ids), int(found.loss_mask.sum()), found.tokens_cut, found.unknown_tokens]
    return [*counts, found.found_by, list(found.left_out), found.name]


def _tell(doctor: Doctor, outcome: list[Any]) -> None:
    if len(outcome) == USED:
        doctor.use(*outcome[:-1])
    else:
        doctor.skip(*outcome)


def _chunks(files: list[Path], first_file: int, first_row: int) -> Iterator[Chunk]:
    """The rows of all files behind a place, in order."""
    rows: list[bytes] = []
    size = 0
    chunk = None
    try:
        for index in range(first_file, len(files)):
            skip = first_row if index == first_file else 0
            for row, found in enumerate(islice(find_rows(files[index]), skip, None), start=skip + 1):
                rows.append(pickle.dumps(found))
                size += len(rows[-1])
                done = found.done if isinstance(found, Trouble) else found[1]
                chunk = Chunk(rows, index, row, done)
                if size >= CHUNK_BYTES or len(rows) == CHUNK_ROWS:
                    yield chunk
                    rows, size, chunk = [], 0, None
    except DraftgraphError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


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
