"""Nsight Systems: the command that traces, and a reader of the SQLite file that it exports.

Promises: tables that an export left out, because nothing of the kind happened, are taken as empty. Columns are those of
the vendor's "SQLite Export Schema Reference"; names are ids into StringIds there.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from draftgraph.profiles.timeline import Event, Kind

_WORK: tuple[tuple[Kind, str, str], ...] = (
    ("kernel", "CUPTI_ACTIVITY_KIND_KERNEL", "demangledName"),
    ("graph", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ""),
    ("copy", "CUPTI_ACTIVITY_KIND_MEMCPY", ""),
    ("memset", "CUPTI_ACTIVITY_KIND_MEMSET", ""),
)
# Set for what nsys starts; the session's id only once it collects.
_SIGNS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


def under_nsys() -> bool:
    """Whether a tool has started this process to trace it."""
    return any(sign in os.environ for sign in _SIGNS)


def profile_command(report: Path, node: bool, program: Sequence[str]) -> list[str]:
    """The nsys session that traces a program between cudaProfilerStart and cudaProfilerStop.

    Args:
        report: without its suffix.
        node: every kernel of a graph, instead of every graph as a whole; slower.
    """
    return [
        *("nsys", "profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *(f"--cuda-graph-trace={'node' if node else 'graph'}", "--trace=cuda,nvtx,osrt"),
        *("--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--output={report}"),
        *program,
    ]


def export_command(report: Path) -> list[str]:
    """The command that writes `report`.sqlite from `report`.nsys-rep."""
    target = report.with_suffix(".sqlite")
    return [
        *("nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}"),
        str(report.with_suffix(".nsys-rep")),
    ]


def read_nsys(path: Path) -> list[Event]:
    """The events of an exported SQLite file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        tables = {name for (name,) in found}
        strings = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
        return [
            *_ranges(database, tables, strings),
            *_calls(database, tables, strings),
            *_work(database, tables, strings),
        ]


def _process(global_tid: int) -> int:
    """A global id holds the thread in its lowest 24 bits and the process in the next 24."""
    return global_tid >> 24 & 0xFFFFFF


def _ranges(database: sqlite3.Connection, tables: set[str], strings: dict[int, str]) -> Iterator[Event]:
    if "NVTX_EVENTS" in tables:
        # A registered name is in textId, another in text; a range that the trace's end cut has no end.
        for text, text_id, start, end, thread in database.execute(
            'SELECT text, textId, start, "end", globalTid FROM NVTX_EVENTS WHERE "end" IS NOT NULL'
        ):
            yield Event("range", text or strings.get(text_id, ""), start, end, _process(thread))


def _calls(database: sqlite3.Connection, tables: set[str], strings: dict[int, str]) -> Iterator[Event]:
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        for name, start, end, thread, correlation in database.execute(
            'SELECT nameId, start, "end", globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME'
        ):
            yield Event("call", strings.get(name, ""), start, end, _process(thread), correlation=correlation)


def _work(database: sqlite3.Connection, tables: set[str], strings: dict[int, str]) -> Iterator[Event]:
    for kind, table, name_column in _WORK:
        if table in tables:
            for name, start, end, device, correlation in database.execute(
                f'SELECT {name_column or "NULL"}, start, "end", deviceId, correlationId FROM {table}'
            ):
                yield Event(kind, strings.get(name, kind), start, end, device=device, correlation=correlation)
