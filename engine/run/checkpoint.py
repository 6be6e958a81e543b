"""Checkpoints on disk: the drafter's masters, both moments and the position in the run.

A checkpoint is a folder step-NNNNNN of `state.safetensors`, `state.json` and `manifest.json`, which holds the size and
the SHA-256 of the other two.
Promises: it appears by one rename, after its files reached the disk; one that is damaged in any way is passed over and
named; the number of drafters may differ at a resume, since slices are joined before they are written.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftgraph.engine.errors import RunError
from draftgraph.engine.run.disk import flush
from draftgraph.engine.run.lanes import DrafterLane

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE, SCALARS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
FILES = (STATE, SCALARS)  # named by the manifest
FORMAT, VERSION = "draftgraph-checkpoint", 1
# What a resume may change: it is defined, and no longer gives the bits of an uninterrupted run.
CHANGEABLE = (
    "steps",
    "optim.lr",
    "chunk_slots",
    "buckets",
    "placement.targets",
    "placement.drafters",
    "placement.hosts",
)
# Where a profile says what a checkpoint holds under another name.
PROFILE_KEYS = {
    "seed": "run.seed",
    "steps": "run.steps",
    "reuse": "drafter.reuse",
    "chunk_slots": "drafter.chunk_slots",
    "draw.num_anchors": "drafter.anchors",
    "draw.rule": "drafter.anchor_rule",
    "loss.kind": "drafter.loss",
    "loss.gamma": "drafter.gamma",
    "loss.alpha": "drafter.alpha",
    "loss.labels": "drafter.labels",
    "loss.norm": "drafter.loss_norm",
    "drafter.num_layers": "drafter.layers",
    "drafter.num_heads": "drafter.heads",
    "drafter.num_kv_heads": "drafter.kv_heads",
    "drafter.layer_types": "drafter.sliding_layers",
}
# What a checkpoint of an older version does not say, since nothing else could be chosen.
UNSAID = {
    "placement.hosts": 1,
    "target.precision": "own",
    "loss.labels": "data",
    "loss.norm": "auto",
    "drafter.sliding_rule": "served",
}


class Damage(Exception):
    """Why a checkpoint cannot be used."""


def write(
    folder: Path, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], keep: int, best_step: int = 0
) -> None:
    """Write one checkpoint from host tensors and drop the oldest beyond `keep`, but `best_step`. Touches no device.

    Raises:
        RunError: the disk refused; older checkpoints are as they were.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(dict(tensors), partial / STATE)
        (partial / SCALARS).write_text(json.dumps(scalars, indent=1) + "\n")
        files = {name: {"bytes": (partial / name).stat().st_size, "sha256": digest(partial / name)} for name in FILES}
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            flush(path)
        # Only a damaged one can be in the way: the run went on from an earlier checkpoint.
        remove(final)
        partial.rename(final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"cannot write the checkpoint of step {step} in {folder}: {error}. "
            + (
                "The last good one is untouched; mend the cause, then go on with --resume"
                if found(folder)
                else "It would have been the first; mend the cause and start again in another --run folder"
            )
        ) from error
    # Later ones are of a run that this one replaced: a resume went on from an earlier checkpoint.
    earlier = [path for path in found(folder) if step_of(path) < step]
    later = [path for path in found(folder) if step_of(path) > step]
    for path in later + earlier[: max(0, len(earlier) + 1 - keep)]:
        if step_of(path) != best_step:
            remove(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Drop a checkpoint in one step: what a kill leaves of it does not look like one."""
    if path.exists():
        hidden = path.with_name(f".{path.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Drop what a killed run left half written or half removed."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def found(folder: Path) -> list[Path]:
    """All checkpoints, good or damaged, oldest first."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def verify(path: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        Damage: saying which file, and what is wrong with it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise Damage(f"{MANIFEST} is of another format")
        if manifest["step"] != step_of(path):
            raise Damage(f"it holds step {manifest['step']}, whatever its name says")
        for name in FILES:
            expected, size = manifest["files"][name], (path / name).stat().st_size
            if size != expected["bytes"]:
                raise Damage(f"{name} has {size} bytes, expected {expected['bytes']}")
            if digest(path / name) != expected["sha256"]:
                raise Damage(f"{name} is not what was written: its SHA-256 differs from {MANIFEST}'s")
    except FileNotFoundError as error:
        raise Damage(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise Damage(f"{error.strerror}: {error.filename}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damage(f"{MANIFEST} is damaged") from error


def newest(folder: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """The newest checkpoint whose every byte is what was written.

    Args:
        say: receives one line where a newer one was passed over.
    Raises:
        RunError: there is none; each is named with the reason.
    """
    reasons = []
    for path in reversed(found(folder)):
        try:
            verify(path)
        except Damage as damage:
            reasons.append(f"{path.name}: {damage}")
            continue
        if reasons:
            say(f"passed over damaged checkpoints ({'; '.join(reasons)}); using {path.name}")
        return path
    if not reasons:
        raise RunError(f"there is no checkpoint in {folder} yet; start without --resume")
    raise RunError(
        f"no usable checkpoint in {folder} ({'; '.join(reasons)}); move its checkpoints away and start without --resume"
    )


def of_step(folder: Path, step: int) -> Path:
    """The checkpoint of one step.

    Raises:
        RunError: there is none, or it is damaged.
    """
    path = folder / f"step-{step:06d}"
    try:
        verify(path)
    except Damage as damage:
        raise RunError(f"checkpoint {path} cannot be used: {damage}") from damage
    return path


def read_scalars(path: Path) -> dict[str, Any]:
    """The position and the identity in a checkpoint that `newest` found."""
    try:
        return json.loads((path / SCALARS).read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read checkpoint {path}: {error}; was it removed just now? Try again") from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The scalars of a checkpoint that `newest` found, and its tensors under KIND.PARAMETER."""
    scalars = read_scalars(path)
    try:
        with safe_open(path / STATE, "pt") as file:
            return scalars, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"cannot read checkpoint {path}: {error}; was it removed just now? Try again") from error


def check_identity(path: Path, identity: Mapping[str, Any], say: Callable[[str], None] = lambda _: None) -> None:
    """Refuse to go on with another drafter, target, tokenizer, data, loss, schedule or seed.

    Args:
        say: receives one line for each difference that is allowed.
    Raises:
        RunError: the fields that differ are named, with both values.
    """
    scalars = read_scalars(path)
    made_of, ours = UNSAID | leaves({key: scalars.get(key) for key in identity}), leaves(identity)
    different = [key for key in {**ours, **made_of} if made_of.get(key) != ours.get(key)]
    refused = [
        f"{PROFILE_KEYS.get(key, key)} = {made_of.get(key)!r} (the profile gives {ours.get(key)!r})"
        for key in different
        if key not in CHANGEABLE
    ]
    if refused:
        rows = ", over the rows that it was made with" if "data" in different else ""
        raise RunError(
            f"checkpoint {path} was made with {', '.join(refused)}; resume with the run's own profile.toml{rows}, or "
            "start a new run"
        )
    for key in different:
        said, was = PROFILE_KEYS.get(key, key), made_of.get(key)
        say(f"{said} is {ours[key]!r}, was {was!r} at {path.name}: from here on not the bits of an unbroken run")


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def restore(path: Path, drafters: Sequence[DrafterLane], rate_share: float | None = None) -> dict[str, Any]:
    """Write a checkpoint that `newest` found into the drafters' persistent tensors and return its scalars.

    Args:
        rate_share: of the profile's rate, from here on; None: what the checkpoint says.
    """
    scalars, tensors = read(path)
    spans = drafters[0].flat.spans
    flats = {kind: torch.cat([tensors[f"{kind}.{name}"].flatten() for name in spans]) for kind in ("master", *MOMENTS)}
    with torch.no_grad():
        for drafter in drafters:
            optimizer = drafter.optimizer
            drafter.flat.values.copy_(flats["master"])
            optimizer.reset()
            optimizer.master.copy_(flats["master"][optimizer.low : optimizer.high])
            for name in MOMENTS:
                optimizer.state[name].copy_(flats[name][optimizer.low : optimizer.high])
            optimizer.state["step"].fill_(scalars["updates"])
            optimizer.step_count.fill_(scalars["step"])
            optimizer.skipped.fill_(scalars["skipped"])
            # A checkpoint of an older version knows no share.
            optimizer.rate_share.fill_(scalars.get("rate_share", 1.0) if rate_share is None else rate_share)
    return scalars
