"""Receipts: a figure is worth nothing without the machine, the versions and the work it was measured on.

Promises that what cannot be found out is None, and that a receipt is on disk whole or not at all.
It measures nothing itself: figures come from the caller.
"""

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "fla": "flash-linear-attention",
}


def receipt(
    workload: str,
    profile: Mapping[str, object] | str,
    *,
    ours: Mapping[str, object] | None = None,
    peer: Mapping[str, object] | None = None,
    ratio: float | None = None,
    ceiling_tflops: float | None = None,
) -> dict[str, object]:
    """Gather what a measurement needs to be believed and repeated.

    Args:
        workload: name of the work, such as "w27-full" or "train".
        profile: the resolved profile, or its name.
        ours, peer: figures measured in the same run, ours and those of the peer.
        ratio: ours over the peer's, larger is better.
        ceiling_tflops: the bf16 matmul rate measured in the same run.
    """
    gpus = _nvidia_smi("name", "driver_version", "clocks.sm", "clocks.mem")
    return {
        "workload": workload,
        "gpu": ", ".join(sorted({name for name, *_ in gpus})) or None,
        "num_gpus": len(gpus),
        "driver": gpus[0][1] if gpus else None,
        "clocks": [f"SM {sm}, memory {memory}" for _, _, sm, memory in gpus] or None,
        "num_cpus": os.cpu_count(),
        **{name: _version(package) for name, package in _PACKAGES.items()},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "profile": profile,
        "ceiling_tflops": ceiling_tflops,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
    }


def write_receipt(path: Path, content: Mapping[str, object]) -> None:
    """Write a receipt as JSON, replacing an older one in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this file's checkout, marked where files differ from it; outside one, DRAFTGRAPH_COMMIT."""
    here = Path(__file__).resolve()
    # An installed copy may lie inside somebody else's checkout: only a tracked file belongs to one.
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return os.environ.get("DRAFTGRAPH_COMMIT")
    return _output("git", "-C", str(here.parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _nvidia_smi(*fields: str) -> list[list[str]]:
    """One row of fields per GPU; no rows without a driver."""
    table = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [[cell.strip() for cell in line.split(",")] for line in (table or "").splitlines()]


def _output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
