"""The readers of traces and their tables, on a step that is small enough to count by hand."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from draftgraph.capture.families import family
from draftgraph.profiles.kineto import read_kineto
from draftgraph.profiles.nsys import export_command, profile_command, read_nsys, under_nsys
from draftgraph.profiles.timeline import UNDIVIDED, tables

# The columns that the vendor's schema reference names, as far as they are read, and some that are not.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    graphId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, graphExecId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
"""
US = 1000
PROCESS, DATA_PROCESS = 77, 88
BUCKET = "r4-s64-a8"
RANGES = [  # us
    (0, 100, "scheduler | step | - | -", PROCESS),
    (1, 2, "scheduler | wait | - | -", PROCESS),
    (2, 4, f"target 0 | h2d | {BUCKET} | cuda:0", PROCESS),
    (4, 7, f"target 0 | target replay | {BUCKET} | cuda:0", PROCESS),
    (7, 10, f"drafter 0 | drafter replay | {BUCKET} | cuda:0", PROCESS),
    (10, 13, f"drafter 0 | drafter replay | {BUCKET} | cuda:0", PROCESS),
    (20, 24, "drafter 0 | optimizer | - | cuda:0", PROCESS),
    (24, 28, "drafter 0 | metrics | - | cuda:0", PROCESS),
    (3, 9, f"data | collate | {BUCKET} | -", DATA_PROCESS),
    (3, 9, "somebody else's", PROCESS),
]
CALLS = [  # us, name, correlation
    (-5, -4, "cudaMalloc_v3020", 90),
    (2, 3, "cudaStreamWaitEvent_v3020", 91),
    (3, 4, "cudaMemcpyAsync_v3020", 1),
    (4, 6, "cudaGraphLaunch_v10000", 2),
    (4.5, 5.5, "cuGraphLaunch", 20),  # the driver's part of the call around it
    (6, 7, "cudaEventRecord_v3020", 92),
    (7, 8, "cudaGraphLaunch_v10000_ptsz", 3),
    (10, 11, "cuGraphLaunch", 4),
    (11, 12, "cudaEventRecordWithFlags_v11010", 93),
    (15, 16, "cudaEventQuery_v3020", 94),
    (16, 17, "cudaMemsetAsync_v3020", 95),  # outside every range of a device
    (20, 21, "cudaLaunchKernelExC_v11060", 5),
    (24, 25, "cudaMemcpyAsync_v3020", 6),
    (130, 131, "cudaDeviceSynchronize_v3020", 96),
]
GRAPHS = [(5, 25, 2), (45, 85, 3), (50, 90, 4)]  # the last two overlap, on two streams
COPIES = [(3, 5, 1), (95, 96, 6), (500, 900, 96)]
KERNELS = [(92, 95, 5, "void (anonymous namespace)::elementwise_kernel<128, 4>(int)")]


def write_export(path: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """An export of the step above, without some tables."""
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    ids: dict[str, int] = {}

    def string(value: str) -> int:
        if value not in ids:
            ids[value] = len(ids) + 1
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (ids[value], value))
        return ids[value]

    def thread(process: int) -> int:
        return 1 << 56 | process << 24 | 5

    for number, (start, end, name, process) in enumerate(RANGES):
        text, text_id = (
            (name, None) if number % 2 else (None, string(name))
        )  # as tools write plain and registered names
        database.execute(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, NULL, NULL, ?, ?, NULL, ?, 1, NULL)",
            (start * US, end * US, text, thread(process), text_id),
        )
    database.execute(  # cut by the end of the session
        "INSERT INTO NVTX_EVENTS VALUES (99, NULL, 59, NULL, NULL, NULL, ?, 1, NULL, NULL, 1, 0)",
        ("scheduler | step | - | -",),
    )
    for start, end, name, correlation in CALLS:
        row = (int(start * US), int(end * US), thread(PROCESS), correlation, string(name))
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)", row)
    for start, end, correlation in GRAPHS:
        row = (start * US, end * US, correlation)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 0, 9, 1, 7, ?, 0, 9)", row)
    for start, end, correlation in COPIES:
        row = (start * US, end * US, correlation)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 1, 7, ?, 0, 64, 1)", row)
    for start, end, correlation, name in KERNELS:
        row = (start * US, end * US, correlation, string(name), string("elementwise_kernel"))
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, 0, ?, ?, NULL)", row)
    for table in leave_out:
        database.execute(f"DROP TABLE {table}")
    database.commit()
    database.close()
    return path


def range_row(found: dict, phase: str) -> dict:
    (row,) = [row for row in found["ranges"] if row["phase"] == phase]
    return row


def test_time_is_told_per_range_and_a_range_holds_those_inside_it(tmp_path):
    found = tables(read_nsys(write_export(tmp_path / "steps.sqlite")), family)
    assert found["steps"] == 1
    assert [row["phase"] for row in found["ranges"]] == [
        *("step", "wait", "collate", "h2d", "target replay", "drafter replay", "optimizer", "metrics")
    ]
    replay = {"role": "drafter 0", "phase": "drafter replay", "bucket": BUCKET, "device": "cuda:0"}
    assert range_row(found, "drafter replay") == {**replay, "count": 2, "host_ms": 0.006, "device_ms": 0.08}
    assert range_row(found, "target replay")["device_ms"] == pytest.approx(0.020)
    assert range_row(found, "h2d")["device_ms"] == pytest.approx(0.002)
    assert range_row(found, "optimizer")["device_ms"] == pytest.approx(0.003)
    assert range_row(found, "step")["device_ms"] == pytest.approx(0.002 + 0.020 + 0.080 + 0.003 + 0.001)
    assert range_row(found, "collate") == {
        **{"role": "data", "phase": "collate", "bucket": BUCKET, "device": ""},
        **{"count": 1, "host_ms": 0.006, "device_ms": 0.0},
    }


def test_host_calls_are_counted_per_device_and_micro_step_and_a_drivers_part_once(tmp_path):
    found = tables(read_nsys(write_export(tmp_path / "steps.sqlite")), family)
    outside, device = found["host_calls"]
    assert device == {
        **{"device": "cuda:0", "micro_steps": 2, "graph_launches": 3, "kernel_launches": 1, "copies": 2},
        **{"memsets": 0, "event_records": 2, "event_waits": 1, "per_micro_step": 4.5},
    }
    assert outside["device"] == "" and outside["memsets"] == 1 and outside["per_micro_step"] is None
    assert found["host_calls_per_micro_step_max"] == 4.5
    assert found["graph_launches_per_step"] == 3 and found["kernel_launches_per_step"] == 1
    # What lies before the first step and after the last is not of the steps.
    assert found["calls_by_name"]["cudaGraphLaunch"] == 2 and found["calls_by_name"]["cudaEventQuery"] == 1
    assert not {"cudaMalloc", "cudaDeviceSynchronize"} & set(found["calls_by_name"])


def test_a_device_is_busy_once_however_many_streams_and_short_pauses_are_no_gaps(tmp_path):
    found = tables(read_nsys(write_export(tmp_path / "steps.sqlite")), family)
    (row,) = found["devices"]
    assert row["device"] == "cuda:0"
    assert row["window_ms"] == pytest.approx(0.093)  # 3 to 96
    assert row["busy_share"] == pytest.approx((22 + 45 + 3 + 1) / 93)
    assert (row["gaps"], row["gaps_ms"], row["largest_gap_ms"]) == (1, 0.02, 0.02)


def test_a_graph_that_was_traced_whole_is_no_kernel_family(tmp_path):
    found = tables(read_nsys(write_export(tmp_path / "steps.sqlite")), family)
    rows = {(row["role"], row["family"]): (row["per_step"], row["ms_per_step"]) for row in found["families"]}
    assert rows == {
        ("target", UNDIVIDED): (1, 0.02),
        ("drafter", UNDIVIDED): (2, 0.08),
        ("target", "copy"): (1, 0.002),
        ("drafter", "copy"): (1, 0.001),
        ("drafter", "elementwise"): (1, 0.003),
    }
    assert sum(row["share"] for row in found["families"]) == pytest.approx(1)


def test_tables_that_an_export_leaves_out_are_empty(tmp_path):
    names = [line.split()[2] for line in SCHEMA.splitlines() if line.startswith("CREATE")]
    for number, name in enumerate(names):
        tables(read_nsys(write_export(tmp_path / f"{number}.sqlite", (name,))), family)
    work = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_MEMCPY")
    found = tables(read_nsys(write_export(tmp_path / "none.sqlite", work)), family)
    assert found["devices"] == found["families"] == [] and range_row(found, "step")["device_ms"] is None
    empty = tables(read_nsys(write_export(tmp_path / "empty.sqlite", tuple(names))), family)
    assert empty["steps"] == 0 and empty["host_calls"] == [] and empty["graph_launches_per_step"] is None


def test_the_built_in_profilers_trace_gives_the_same_tables(tmp_path):
    def span(category: str, start: float, end: float, name: str, args: dict) -> dict:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "tid": 2,
            "ts": start,
            "dur": end - start,
            "args": args,
        }

    def plain(name: str) -> str:
        return name.removesuffix("_ptsz").partition("_v")[0]

    records = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        span("cpu_op", 4, 5, "aten::copy_", {}),
        span("gpu_user_annotation", 5, 25, "scheduler | step | - | -", {"device": 0}),
        *(span("user_annotation", s, e, name, {}) for s, e, name, process in RANGES if process == PROCESS),
        *(span("cuda_runtime", s, e, plain(name), {"correlation": c}) for s, e, name, c in CALLS),
        *(span("kernel", s, e, "nvjet_tst_128x256", {"device": 0, "correlation": c}) for s, e, c in GRAPHS),
        *(span("gpu_memcpy", s, e, "Memcpy HtoD", {"device": 0, "correlation": c}) for s, e, c in COPIES),
        *(span("kernel", s, e, name, {"device": 0, "correlation": c}) for s, e, c, name in KERNELS),
    ]
    path = tmp_path / "steps.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": records}, file)
    found = tables(read_kineto(path), family)
    expected = tables(read_nsys(write_export(tmp_path / "steps.sqlite")), family)
    for name in ("steps", "devices", "host_calls", "calls_by_name"):
        assert found[name] == expected[name], name
    assert found["ranges"] == [row for row in expected["ranges"] if row["role"] != "data"]
    counts = {(row["role"], row["family"]): row["per_step"] for row in found["families"]}
    target, drafter = {"gemm": 1, "copy": 1}, {"gemm": 2, "copy": 1, "elementwise": 1}
    assert counts == {("target", n): c for n, c in target.items()} | {("drafter", n): c for n, c in drafter.items()}


def test_the_commands_name_the_range_the_graphs_and_the_files(monkeypatch):
    command = profile_command(Path("run/trace/steps"), False, ["draftgraph", "trace", "p"])
    assert command[:2] == ["nsys", "profile"] and command[-3:] == ["draftgraph", "trace", "p"]
    assert {"--capture-range=cudaProfilerApi", "--cuda-graph-trace=graph", "--output=run/trace/steps"} <= set(command)
    assert "--cuda-graph-trace=node" in profile_command(Path("r"), True, [])
    assert export_command(Path("r/steps"))[-2:] == ["--output=r/steps.sqlite", "r/steps.nsys-rep"]
    for sign in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(sign, raising=False)
    assert not under_nsys()
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/somewhere/lib.so")
    assert under_nsys()
