"""A reader of the trace that torch's built-in profiler exports (Chrome's trace format, which Perfetto opens too)."""

import gzip
import json
from pathlib import Path

from draftgraph.profiles.timeline import Event, Kind

_KINDS: dict[str, Kind] = {
    "user_annotation": "range",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "memset",
}


def read_kineto(path: Path) -> list[Event]:
    """The events of an exported trace, gzipped. Kernels of graphs are told one by one."""
    with gzip.open(path, "rt") as file:
        recorded = json.load(file)["traceEvents"]
    found = []
    for event in recorded:
        kind = _KINDS.get(event.get("cat", ""))
        if kind is not None and event["ph"] == "X":
            start, ns, values = round(event["ts"] * 1000), round(event["dur"] * 1000), event.get("args", {})
            on_host = kind in ("range", "call")
            found.append(
                Event(
                    kind,
                    event["name"],
                    start,
                    start + ns,
                    process=event["pid"] if on_host else 0,
                    device=None if on_host else values["device"],
                    correlation=values.get("correlation"),
                )
            )
    return found
