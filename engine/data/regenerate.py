"""Answer prompts with the target itself, so that the drafter learns what the target says, not what somebody else said.

Promises: every answer is kept as soon as it is there, a second call goes on where the first one stopped, and in the end
the rows stand in the order of the prompts. A prompt without an answer is counted with its reason; another call asks it
again. It does not judge the answers: `prepare` counts what it cannot use.
"""

import hashlib
import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from draftgraph.engine.data.answers import CUT, Answer, Answerer, AnswerFile, NoAnswer
from draftgraph.engine.data.formats import Trouble
from draftgraph.engine.data.prompts import Question, load_questions
from draftgraph.engine.errors import DataError, RunError
from draftgraph.engine.progress import progress_bar

DUPLICATE = "duplicate"
# So many prompts in a row without an answer are no matter of the prompts.
MAX_UNANSWERED = 20


class _Skipped:
    """Prompts that get no answer, by reason, and the first example of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, where: str, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}")


def regenerate(source: str, answerer: Answerer, out: Path, *, progress: bool) -> dict[str, Any]:
    """Append the target's answer to every prompt that `out` does not answer yet.

    Args:
        source: anything that `load_questions` takes.
        answerer: a LocalTarget or a Server.
        out: JSON lines of messages, created or continued; beside it OUT.settings.
        progress: draw a bar with the time left and tokens/s on stderr.
    Returns:
        rows_read, rows_kept (answered before), rows_answered, rows_skipped {reason: count}, examples {reason: where},
        rows_cut (by max_new_tokens; their finish_reason is "length"), retries, tokens (null where the server does not
        count them), seconds, out. All but rows_read, rows_kept and out are of this call.
    Raises:
        DataError: there are no prompts, or `out` holds something else. RunError: no answers are to be had.
    """
    skipped = _Skipped()
    questions, rows_read = _read(source, skipped)
    prompts = hashlib.sha256(b"".join(questions)).hexdigest()[:16]
    rows = list(questions.values())
    file = AnswerFile(out, {"prompts": prompts, **answerer.settings}, len(rows))
    rows_kept, start = len(file.done), time.monotonic()
    missing = set(range(len(rows))) - file.done
    rows_cut = unanswered = tokens = uncounted = 0
    try:
        with progress_bar(disable=not progress) as bar, closing(answerer.answers(rows, missing)) as answers:
            task = bar.add_task("answering", total=len(rows), completed=rows_kept)
            for index, answer in answers:
                if isinstance(answer, Answer):
                    file.append(index, rows[index], answer)
                    tokens += answer.tokens or 0
                    uncounted += answer.tokens is None
                    rows_cut += answer.finish_reason == CUT
                    unanswered = 0
                else:
                    skipped.add(rows[index].where, answer.reason, answer.detail)
                    unanswered += 1
                    _require_some(answer, unanswered, rows[index].where)
                pace = [f", {tokens / (time.monotonic() - start):,.0f} tokens/s"] if tokens else []
                pace += [f", {answerer.retries:,} retries"] if answerer.retries else []
                bar.update(task, advance=1, description="answering" + "".join(pace))
        file.finish()
    finally:
        file.close()
    if not file.done:
        raise RunError(f"{out}: not one prompt got an answer. {'; '.join(skipped.examples.values())}")
    return {
        "rows_read": rows_read,
        "rows_kept": rows_kept,
        "rows_answered": len(file.done) - rows_kept,
        "rows_skipped": dict(skipped.counts),
        "examples": skipped.examples,
        "rows_cut": rows_cut,
        "retries": answerer.retries,
        "tokens": None if uncounted else tokens,
        "seconds": time.monotonic() - start,
        "out": str(out),
    }


def _read(source: str, skipped: _Skipped) -> tuple[dict[bytes, Question], int]:
    """The questions by their hashes, in order, each once; and the number of rows read."""
    questions: dict[bytes, Question] = {}
    rows_read = 0
    for found in load_questions(source):
        rows_read += 1
        if isinstance(found, Trouble):
            skipped.add(found.where, found.reason, found.detail)
            continue
        name = hashlib.sha256(json.dumps([found.messages, found.tools]).encode()).digest()
        if name in questions:
            skipped.add(found.where, DUPLICATE, f"as {questions[name].where}")
        else:
            questions[name] = found
    if not questions:
        found_instead = "; ".join(f"{reason}, {example}" for reason, example in skipped.examples.items())
        raise DataError(f"prompts: {source} holds none. {found_instead}")
    return questions, rows_read


def _require_some(answer: NoAnswer, unanswered: int, where: str) -> None:
    if unanswered >= MAX_UNANSWERED:
        raise RunError(
            f"{unanswered} prompts in a row got no answer, the last one: {where}: {answer.reason}: {answer.detail}. "
            "What was answered is kept; change the cause and run the same command again"
        )
