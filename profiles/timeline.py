"""What happened in some traced steps, and the tables that say where the time went.

Promises: one plain form of event whatever tool recorded it (nsys.py, kineto.py). A device's work belongs to the ranges
around the host call that issued it, found by the correlation that the tool recorded, never by time alone. Steps and
micro-steps are counted from the ranges in the trace itself.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftgraph.profiles.ranges import PHASES, RangeName, parse

Kind = Literal["range", "call", "kernel", "graph", "copy", "memset"]

# Shorter than this is the device's own pause between kernels, not idleness.
GAP_NS = 10_000
UNDIVIDED = "graphs, not divided into kernels"

# Host calls as design counts them, and kernels that are launched outside graphs. Driver and Ex variants included.
_CALLS = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("graph_launches", r"cu(da)?GraphLaunch"),
        ("kernel_launches", r"cu(da)?LaunchKernel|cu(da)?LaunchCooperativeKernel"),
        ("copies", r"cu(da)?Memcpy"),
        ("memsets", r"cu(da)?Memset"),
        ("event_records", r"cu(da)?EventRecord"),
        ("event_waits", r"cu(da)?StreamWaitEvent"),
    )
]
CALL_KINDS = tuple(kind for kind, _ in _CALLS)


@dataclass(frozen=True, slots=True)
class Event:
    """A range or CUDA call of the host, or a piece of a device's work."""

    kind: Kind
    name: str
    start: int  # ns
    end: int  # ns
    process: int = 0  # of the host
    device: int | None = None  # of the work
    correlation: int | None = None  # the same for a call and for the work that it issued

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _Placed:
    """A host call and the ranges around it, outermost first."""

    call: Event
    ranges: tuple[RangeName, ...]
    nested: bool  # inside another call: a driver call of a runtime call

    @property
    def device(self) -> str:
        return next((name.device for name in reversed(self.ranges) if name.device), "")


def tables(events: Sequence[Event], family: Callable[[str], str]) -> dict[str, Any]:
    """The tables of `draftgraph trace`; times in ms over all traced steps, None where nothing was recorded.

    Args:
        family: the family of a kernel's name.
    """
    ranges = [(event, name) for event in events if event.kind == "range" and (name := parse(event.name))]
    whole = [event for event, name in ranges if name.phase == "step"]
    start, end = min((e.start for e in whole), default=0), max((e.end for e in whole), default=0)
    calls = [e for e in events if e.kind == "call" and start <= e.start < end]
    placed = place(ranges, calls)
    issued: dict[int | None, _Placed] = {
        one.call.correlation: one for one in placed if one.call.correlation is not None
    }
    work = [e for e in events if e.device is not None and e.correlation in issued]
    named = Counter(re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", one.call.name) for one in placed if not one.nested)
    host_calls = host_call_rows(ranges, placed)
    return {
        "steps": len(whole),
        "ranges": range_rows(ranges, work, issued),
        "families": family_rows(work, issued, family, len(whole)),
        "devices": [device_row(device, work) for device in sorted({e.device for e in work if e.device is not None})],
        "host_calls": host_calls,
        "host_calls_per_micro_step_max": max((row["per_micro_step"] or 0.0 for row in host_calls), default=None),
        "graph_launches_per_step": per_step(host_calls, "graph_launches", len(whole)),
        "kernel_launches_per_step": per_step(host_calls, "kernel_launches", len(whole)),
        "calls_by_name": dict(named.most_common()),
    }


def place(ranges: Iterable[tuple[Event, RangeName]], calls: Iterable[Event]) -> list[_Placed]:
    """Find the ranges around every call of the same process, whichever thread issued it."""
    hosts: list[tuple[Event, RangeName | None]] = [*ranges, *((call, None) for call in calls)]
    hosts.sort(key=lambda host: (host[0].process, host[0].start, -host[0].end))
    placed = []
    around: list[tuple[Event, RangeName]] = []
    outer: Event | None = None
    for event, name in hosts:
        while around and (around[-1][0].process != event.process or around[-1][0].end <= event.start):
            around.pop()
        if name is not None:
            around.append((event, name))
            continue
        nested = outer is not None and outer.process == event.process and event.end <= outer.end
        outer = outer if nested else event
        placed.append(_Placed(event, tuple(n for _, n in around), nested))
    return placed


def range_rows(
    ranges: Sequence[tuple[Event, RangeName]], work: Sequence[Event], issued: dict[int | None, _Placed]
) -> list[dict[str, Any]]:
    """Time per range; a range holds the time of those inside it."""
    host: dict[RangeName, list[int]] = defaultdict(list)
    device: Counter[RangeName] = Counter()
    for event, name in ranges:
        host[name].append(event.ns)
    for event in work:
        for name in set(issued[event.correlation].ranges):
            device[name] += event.ns
    return [
        {
            **name._asdict(),
            "count": len(host[name]),
            "host_ms": sum(host[name]) / 1e6,
            "device_ms": device[name] / 1e6 if work else None,
        }
        for name in sorted(host, key=lambda name: (PHASES.index(name.phase), name.role, name.bucket, name.device))
    ]


def family_rows(
    work: Sequence[Event], issued: dict[int | None, _Placed], family: Callable[[str], str], steps: int
) -> list[dict[str, Any]]:
    """Device time per family of kernels and kind of role ("target", "drafter", ...), the largest first."""
    times: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for event in work:
        ranges = issued[event.correlation].ranges
        role = ranges[-1].role.split()[0] if ranges else ""
        name = {"graph": UNDIVIDED, "copy": "copy", "memset": "copy"}.get(event.kind) or family(event.name)
        times[role, name] += event.ns
        counts[role, name] += 1
    total = sum(times.values())
    return [
        {
            "role": role,
            "family": name,
            "per_step": counts[role, name] / steps,
            "ms_per_step": ns / 1e6 / steps,
            "share": ns / total,
        }
        for (role, name), ns in times.most_common()
    ]


def device_row(device: int, work: Sequence[Event]) -> dict[str, Any]:
    """How busy a device was from the first to the last of its work; work on several streams counts once."""
    spans = sorted((event.start, event.end) for event in work if event.device == device)
    busy, gaps, latest = 0, [], spans[0][0]
    for start, end in spans:
        if start - latest >= GAP_NS:
            gaps.append(start - latest)
        busy += max(0, end - max(start, latest))
        latest = max(latest, end)
    window = latest - spans[0][0]
    return {
        "device": f"cuda:{device}",
        "window_ms": window / 1e6,
        "busy_share": busy / window if window else None,
        "gaps": len(gaps),
        "gaps_ms": sum(gaps) / 1e6,
        "largest_gap_ms": max(gaps, default=0) / 1e6,
    }


def host_call_rows(ranges: Sequence[tuple[Event, RangeName]], placed: Sequence[_Placed]) -> list[dict[str, Any]]:
    """Host calls per device, as the ranges around them say; a row without a device is of calls outside them.

    The micro-steps of a device are those that one of its roles took part in.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in placed:
        kind = next((kind for kind, pattern in _CALLS if pattern.match(one.call.name)), None)
        if kind is not None and not one.nested:
            counts[one.device][kind] += 1
    replays = Counter((name.device, name.phase) for _, name in ranges)
    rows = []
    for device, found in sorted(counts.items()):
        micro_steps = max(replays[device, "target replay"], replays[device, "drafter replay"]) if device else 0
        rows.append(
            {
                "device": device,
                "micro_steps": micro_steps,
                **{kind: found[kind] for kind in CALL_KINDS},
                "per_micro_step": found.total() / micro_steps if micro_steps else None,
            }
        )
    return rows


def per_step(rows: Sequence[dict[str, Any]], kind: str, steps: int) -> float | None:
    return sum(row[kind] for row in rows) / steps if rows and steps else None
