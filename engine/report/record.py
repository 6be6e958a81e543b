"""What a run folder holds, read in one pass and in fixed memory, however long the run was.

Promises: a file that is missing, torn or not ours is told in `trouble` and never stops a report; the run may still be
going on.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from draftgraph.engine.errors import UsageError
from draftgraph.engine.report.curves import Curve
from draftgraph.engine.run.flatness import Flatness

FIGURES = ("loss", "acceptance", "real_acceptance", "grad_norm", "lr")
STALL = 3.0  # a step that takes longer than this many usual ones
USUAL = 0.02  # weight of a step in the usual time of one


@dataclass
class Device:
    """Samples of one device over the minutes of the run, pauses between processes left out."""

    used_gib: Curve = field(default_factory=Curve)
    utilisation: Curve = field(default_factory=Curve)
    power_w: Curve = field(default_factory=Curve)
    sm_mhz: Curve = field(default_factory=Curve)
    temperature_c: Curve = field(default_factory=Curve)
    throttled: dict[str, int] = field(default_factory=dict)  # reason -> samples


@dataclass
class Record:
    """One run. Dictionaries are those of the files, empty where there is none."""

    folder: Path
    receipt: dict[str, Any] = field(default_factory=dict)
    warmup: dict[str, Any] = field(default_factory=dict)
    filling: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    profile_text: str = ""
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in FIGURES})
    per_slot: list[Curve] = field(default_factory=list)  # of training rows
    real_per_slot: list[Any] = field(default_factory=list)  # of the last evaluation by decoding
    tokens_per_s: Curve = field(default_factory=Curve)
    last_step: int = 0
    slowest: list[tuple[float, int]] = field(default_factory=list)  # seconds, step
    stalled: int = 0
    usual_seconds: float | None = None
    devices: dict[str, Device] = field(default_factory=dict)
    phases: list[tuple[float, float, str]] = field(default_factory=list)  # minutes from, to, name
    flatness: Flatness = field(default_factory=Flatness)
    notes: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ours(self) -> dict[str, Any]:
        return mapping(self.receipt.get("ours"))


def read_run(folder: Path) -> Record:
    """Everything a report shows of a run.

    Raises:
        UsageError: the folder holds no run.
    """
    if not any((folder / name).is_file() for name in ("profile.toml", "metrics.jsonl", "receipt.json")):
        raise UsageError(f"{folder} holds no run; name the folder that `draftgraph train --run` wrote")
    record = Record(folder)
    record.receipt, record.warmup, record.filling = (
        json_of(folder / f"{name}.json", record.trouble) for name in ("receipt", "warmup", "buckets")
    )
    try:
        record.profile_text = (folder / "profile.toml").read_text(errors="replace")
        record.profile = tomllib.loads(record.profile_text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        record.trouble.append(f"profile.toml cannot be read: {error}")
    starts = read_devices(record)
    read_metrics(record, starts)
    return record


def json_of(path: Path, trouble: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return mapping(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        trouble.append(f"{path.name} cannot be read: {error}")
        return {}


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def rows_of(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def lines_of(path: Path, trouble: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; torn lines are counted."""
    if not path.is_file():
        return
    torn = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    torn += 1
    except OSError as error:
        trouble.append(f"{path.name} cannot be read: {error.strerror}")
    if torn:
        trouble.append(f"{path.name}: {torn} lines are torn and were left out")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def read_metrics(record: Record, starts: list[float]) -> None:
    """Curves over steps.

    Args:
        starts: when the steady phase of each process of the run began: the time before is no step's.
    """
    previous: float | None = None
    pending = list(starts)
    tokens, seconds = 0.0, 0.0
    for line in lines_of(record.folder / "metrics.jsonl", record.trouble):
        step = line.get("step")
        if not is_number(step):
            continue
        record.last_step = int(step)
        for name, curve in record.curves.items():
            curve.add(step, line.get(name))
        slots = line.get("accuracy_per_slot")
        for index, value in enumerate(slots[:64] if isinstance(slots, list) else []):
            if index == len(record.per_slot):
                record.per_slot.append(Curve())
            record.per_slot[index].add(step, value)
        if isinstance(line.get("real_acceptance_per_slot"), list):
            record.real_per_slot = [value if is_number(value) else None for value in line["real_acceptance_per_slot"]]
        now = line.get("time")
        if not is_number(now):
            continue
        begins = False
        while pending and now >= pending[0]:
            previous, begins = pending.pop(0), True
        if previous is not None and now >= previous:
            took, real = now - previous, line.get("real_tokens")
            if not begins:  # the first step waits for the data process
                watch_stall(record, took, int(step))
            tokens, seconds = tokens + (real if is_number(real) else 0), seconds + took
            # Figures are read late and may arrive together: a rate is over a tenth of a second at least.
            if seconds >= 0.1:
                if tokens:
                    record.tokens_per_s.add(step, tokens / seconds)
                tokens = seconds = 0.0
        previous = now


def watch_stall(record: Record, took: float, step: int) -> None:
    """Count a step as stalled where it takes much longer than usual; usual is a running mean of those that do not."""
    usual = record.usual_seconds
    if usual is not None and took > STALL * usual and took > 0.05:
        record.stalled += 1
        record.slowest = sorted([*record.slowest, (took, step)], reverse=True)[:5]
    else:
        record.usual_seconds = took if usual is None else usual + USUAL * (took - usual)


def read_devices(record: Record) -> list[float]:
    """Samples of devices.jsonl, and when each process's steady phase began."""
    starts: list[float] = []
    shown = 0.0  # minutes of earlier processes
    origin: float | None = None
    latest = 0.0
    open_phase: tuple[float, str] | None = None
    for line in lines_of(record.folder / "devices.jsonl", record.trouble):
        now, phase = line.get("time"), line.get("phase")
        if not is_number(now) or not isinstance(phase, str):
            continue
        record.flatness.add(line)
        if line.get("event") == "start":
            if origin is not None:
                shown += (latest - origin) / 60
            origin = now
        elif origin is None:
            origin = now
        minutes = shown + (now - origin) / 60
        latest = now
        if line.get("event") == "phase" and phase == "steady":
            starts.append(now)
        if isinstance(line.get("note"), str) and line["note"] not in record.notes:
            record.notes.append(line["note"])
        if open_phase is None or open_phase[1] != phase:
            if open_phase is not None:
                record.phases.append((open_phase[0], minutes, open_phase[1]))
            open_phase = (minutes, phase)
        if isinstance(line.get("device"), str):
            add_sample(record.devices.setdefault(line["device"], Device()), minutes, line)
    if open_phase is not None and origin is not None:
        record.phases.append((open_phase[0], shown + (latest - origin) / 60, open_phase[1]))
    return starts


def add_sample(device: Device, minutes: float, line: dict[str, Any]) -> None:
    used = line.get("used_bytes")
    if is_number(used):
        device.used_gib.add(minutes, used / 2**30)
    for name in ("utilisation", "power_w", "sm_mhz", "temperature_c"):
        getattr(device, name).add(minutes, line.get(name))
    reasons = line.get("throttled")
    for reason in reasons if isinstance(reasons, list) else []:
        device.throttled[str(reason)] = device.throttled.get(str(reason), 0) + 1
