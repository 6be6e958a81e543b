"""Processes that examine chunks of rows: parse, render, tokenise, judge.

Promises: results come in the order of the chunks, whatever the number of processes, and so do errors: of reading as
of examining. A bounded number of chunks is in memory. A process that dies is an error at its chunk, never a hang.
Workers are started afresh (exec, never a fork), import no torch, leave signals to their parent, and end when it does.

How: a thread per process sends a chunk through its pipe and waits for the answer.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from draftgraph.engine.data.examine import Examiner, Kept, Rules, Skipped
from draftgraph.engine.data.files import Found, understand
from draftgraph.engine.data.journal import Unfinished
from draftgraph.engine.data.template import Template

# Enough that no process waits for its next chunk while the main one writes a result.
_AHEAD = 2
_LENGTH_BYTES = 8
_PROGRAM = "from draftgraph.engine.data.workers import serve; serve()"


@dataclass(frozen=True)
class Work:
    """What is done to each row."""

    template: Template
    rules: Rules
    form: str | None


@dataclass(frozen=True)
class Chunk:
    """Some rows, each pickled by itself, and where reading stands behind them."""

    rows: list[bytes]
    file: int
    row: int  # of that file, rows read
    done: float  # share of that file


Examined = tuple[str, Kept | Skipped]  # where, and what became of the row


class InProcess:
    """The same work without processes: nothing has to start."""

    def __init__(self, work: Work) -> None:
        self._examine = examiner(work)

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, list[Examined]]]:
        """Each chunk with what became of its rows."""
        return ((chunk, self._examine(chunk.rows)) for chunk in chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Workers:
    """Owns `count` processes."""

    def __init__(self, work: Work, count: int) -> None:
        self._processes: list[subprocess.Popen] = []
        self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        setup = pickle.dumps(work)
        # One thread each: the tokenizer's and numpy's own would only fight over the cores.
        single = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **single, "TRANSFORMERS_VERBOSITY": "error"},
            )
            self._processes.append(process)
        self._threads = ThreadPoolExecutor(count)
        for process in self._processes:
            self._threads.submit(self._start, process, setup)

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, list[Examined]]]:
        """Each chunk with what became of its rows."""
        waiting: deque[tuple[Chunk, Future[list[Examined]]]] = deque()
        source, failure = iter(chunks), None
        while True:
            try:
                while failure is None and len(waiting) < _AHEAD * len(self._processes):
                    chunk = next(source)
                    waiting.append((chunk, self._threads.submit(self._examine, chunk.rows)))
            except Exception as error:  # the end, or a file that cannot be read: told behind the rows before it
                failure = error
            if not waiting:
                break
            chunk, result = waiting.popleft()
            yield chunk, result.result()
        if not isinstance(failure, StopIteration):
            assert failure is not None
            raise failure

    def close(self) -> None:
        """End the processes; what they are at is dropped."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # what was left in the buffer has no reader
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, process: subprocess.Popen, setup: bytes) -> None:
        try:
            _send(process.stdin, setup)
        except BrokenPipeError:
            pass  # told at its first chunk
        finally:
            self._idle.put(process)

    def _examine(self, rows: list[bytes]) -> list[Examined]:
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            _send(process.stdin, pickle.dumps(rows))
            answer = _receive(process.stdout)
        except (BrokenPipeError, EOFError):
            raise Unfinished(_reason(process)) from None
        finally:
            self._idle.put(process)
        found = pickle.loads(answer)
        if isinstance(found, str):
            raise RuntimeError(f"a row could not be examined:\n{found}")
        return found


def examiner(work: Work) -> Callable[[list[bytes]], list[Examined]]:
    """What a worker does with the rows of a chunk."""
    judge = Examiner(work.template, work.rules)

    def examine(rows: list[bytes]) -> list[Examined]:
        results = []
        for packed in rows:
            found: Found = pickle.loads(packed)
            row = understand(found, work.form)
            results.append((row.where, judge.examine(row)))
        return results

    return examine


def serve() -> None:
    """A worker process: answer chunks until the parent closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # NOTE: transformers looks for torch and imports it for types only; without it a worker starts in half the time.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with os.fdopen(os.dup(0), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        # What anything prints goes to the log, not into the pipe.
        os.dup2(2, 1)
        try:
            examine = examiner(pickle.loads(_receive(questions)))
            while True:
                rows = pickle.loads(_receive(questions))
                try:
                    answer = pickle.dumps(examine(rows))
                except Exception:
                    answer = pickle.dumps(traceback.format_exc())
                _send(answers, answer)
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent is gone, or done; nothing of this process matters


def _send(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    length = int.from_bytes(_read(pipe, _LENGTH_BYTES), "little")
    return _read(pipe, length)


def _read(pipe: IO[bytes], count: int) -> bytes:
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content


def _reason(process: subprocess.Popen) -> str:
    status = process.wait()
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}; its error is above"
    return (
        f"a worker process of prepare {ended}; is memory short? Run the same command again, with fewer --workers: it "
        "goes on where this one stopped"
    )
