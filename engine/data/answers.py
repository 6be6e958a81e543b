"""Answers of the target: how they are asked for, what one is, and the file that they are appended to.

Promises: the file is plain JSON lines that `prepare` reads. Every answer is appended as one line when it is there, in
any order; `finish` puts them into the order of the prompts. A line that an interruption tore is cut off. What the file
was made from stands beside it, in OUT.settings, and a call with anything else is refused by name.
"""

import json
import math
import os
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftgraph.engine.data.prompts import Question
from draftgraph.engine.errors import DataError, UsageError

ROW_START = b'{"index": '
EMPTY_ANSWER = "empty answer"
CUT = "length"  # the finish_reason of an answer that ran into max_new_tokens


@dataclass(frozen=True)
class Sampling:
    """How the target chooses tokens; greedy at temperature 0."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature takes a number from 0, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p takes a share above 0, up to 1; found {self.top_p}")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"--seed takes a whole number from 0 to 2,147,483,647, found {self.seed}")
        if self.greedy and (self.top_p, self.seed) != (1.0, 0):
            raise UsageError("--top-p and --seed need a --temperature above 0: at 0 the answers are greedy")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Answer:
    """What the target said: a message, why it ended, and its tokens where somebody counted them."""

    message: dict[str, Any]
    finish_reason: str
    tokens: int | None


@dataclass(frozen=True)
class NoAnswer:
    """A prompt that stays without an answer: a short reason to count by, and what was found."""

    reason: str
    detail: str


Answers = Generator[tuple[int, Answer | NoAnswer], None, None]


class Answerer(Protocol):
    """Who answers: the target itself, or a server."""

    settings: dict[str, Any]  # whatever changes the answers
    retries: int

    def answers(self, questions: list[Question], missing: Collection[int]) -> Answers:
        """Answer the missing questions, in any order, each with its index; closing it ends the work."""


class AnswerFile:
    """The output: rows of {"index", "messages", "finish_reason"} and, where the prompt had some, "tools"."""

    def __init__(self, out: Path, settings: dict[str, Any], num_questions: int) -> None:
        """Create the file, or go on with it.

        Raises:
            DataError: it holds something else, or was made with other settings; it is left as it is.
        """
        self.path = out
        self._beside = out.with_name(out.name + ".settings")
        self.done: set[int] = set()
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.exists() and out.stat().st_size:
                self._require(settings)
                whole = self._read(num_questions)
                if whole < out.stat().st_size:
                    os.truncate(out, whole)
            else:
                _write_whole(self._beside, json.dumps(settings, indent=1).encode() + b"\n")
            self._file = out.open("ab")
        except OSError as error:
            raise DataError(f"cannot write {out}: {error.strerror}; name another --out") from error

    def append(self, index: int, question: Question, answer: Answer) -> None:
        row: dict[str, Any] = {"index": index, "messages": [*question.messages, answer.message]}
        if question.tools:
            row["tools"] = question.tools
        row["finish_reason"] = answer.finish_reason
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done.add(index)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        """Put the rows into the order of the prompts; the file is whole at every moment."""
        self.close()
        places, offset = [], 0
        with self.path.open("rb") as file:
            for line in file:
                places.append((_index(line), offset))
                offset += len(line)
            if places == sorted(places):
                return
            partial = self.path.with_name(self.path.name + ".partial")
            with partial.open("wb") as ordered:
                for _, offset in sorted(places):
                    file.seek(offset)
                    ordered.write(file.readline())
        partial.replace(self.path)

    def _require(self, settings: dict[str, Any]) -> None:
        try:
            made_with = json.loads(self._beside.read_bytes())
            differing = [key for key in settings | made_with if settings.get(key) != made_with.get(key)]
        except (FileNotFoundError, ValueError, TypeError) as error:
            raise self._foreign() from error
        if differing:
            listed = "; ".join(f"{key}: {made_with.get(key)!r}, not {settings.get(key)!r}" for key in differing)
            raise DataError(
                f"{self.path} was made with other settings ({listed}): name another --out. What it was made with "
                f"stands in {self._beside.name}; a server that moved may be renamed there"
            )

    def _read(self, num_questions: int) -> int:
        """Take in the indices of the rows; returns where the last whole one ends."""
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # only the last one
                    if line.startswith(ROW_START) or ROW_START.startswith(line):
                        break
                    raise self._foreign()
                try:
                    index = _index(line)
                except (ValueError, TypeError, KeyError) as error:
                    raise self._foreign() from error
                if not 0 <= index < num_questions:
                    raise self._foreign()
                self.done.add(index)
                end += len(line)
        return end

    def _foreign(self) -> DataError:
        return DataError(f"{self.path} holds something other than regenerated rows: name another output file")


def _index(line: bytes) -> int:
    return int(json.loads(line)["index"])


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
