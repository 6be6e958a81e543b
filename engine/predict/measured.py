"""What a warm-up measured, and whether it was of the graphs that a plan would have.

Promises: a file that `draftgraph warmup` did not write is refused in one sentence; times of other graphs are not taken.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from draftgraph.engine.errors import UsageError
from draftgraph.engine.plan import Plan
from draftgraph.engine.run.checkpoint import leaves

Evidence = Mapping[str, Any]  # what is read of a warmup.json
LONGEST_MS = 1e9


def read_warmup(path: Path) -> Evidence:
    """A warm-up's evidence, as far as a prediction needs it.

    Raises:
        UsageError: there is none, or it is of another shape.
    """
    try:
        evidence = json.loads(path.read_text())
        evidence = evidence.get("warmup") or evidence  # a receipt holds one
        graphs = [{key: row[key] for key in ("step", "bucket", "eager_ms", "replay_ms")} for row in evidence["graphs"]]
        devices = [{"name": row["name"]} for row in evidence["devices"]]
        made_of = evidence.get("made_of")
        texts = [row[key] for row in graphs for key in ("step", "bucket")]
        texts += [row["name"] for row in devices if row["name"] is not None]
        times = [row[key] for row in graphs for key in ("eager_ms", "replay_ms") if row[key] is not None]
        if not graphs or not devices or not isinstance(made_of, dict | None):
            raise ValueError("it holds no graphs, no devices, or a made_of that is no table")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"{wrong[0]!r} is no name")
        if wrong := [ms for ms in times if type(ms) not in (int, float) or not 0 < ms < LONGEST_MS]:
            raise ValueError(f"{wrong[0]!r} is no time")
        return {"graphs": graphs, "devices": devices, "made_of": made_of}
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"plan: cannot read {path} ({why}); `draftgraph warmup` writes a warmup.json to its run folder"
        ) from error


def differences(plan: Plan, evidence: Evidence) -> list[str]:
    """What the graphs of a warm-up were made of that the plan's are not; nothing where the warm-up does not say."""
    if not evidence.get("made_of"):
        return []
    theirs, ours = leaves(evidence["made_of"]), leaves(plan.graphs_made_of)
    different = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    return [f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}" for key in different]


def measured_ms(plan: Plan, evidence: Evidence | None) -> dict[str, float]:
    """Per step and bucket, the median over lanes of its replay, or of its eager run where it is not captured.

    Returns:
        Nothing where there is no warm-up, or one of other graphs.
    """
    times: dict[str, list[float]] = {}
    if evidence is None or differences(plan, evidence):
        return {}
    for row in evidence["graphs"]:
        ms = row["replay_ms"] if row["replay_ms"] is not None else row["eager_ms"]
        if ms is not None:
            times.setdefault(f"{row['step']} {row['bucket']}".strip(), []).append(ms)
    return {name: median(values) for name, values in times.items()}


def gpu_name(evidence: Evidence | None) -> str | None:
    """The GPU that a warm-up ran on, as its driver names it; None on a CPU."""
    return next((row["name"] for row in evidence["devices"] if row["name"]), None) if evidence else None


def notes(plan: Plan, evidence: Evidence | None) -> list[str]:
    """What must be said of a warm-up's times: they are not taken, or it is not known what they are of."""
    if evidence is None:
        return []
    if different := differences(plan, evidence):
        return [f"The warm-up was of other graphs, so its times are not used: {'; '.join(different)}."]
    if not evidence.get("made_of"):
        return ["The warm-up does not say what its graphs were made of: its times are taken for this profile's."]
    return []
