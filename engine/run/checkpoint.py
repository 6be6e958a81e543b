"""Checkpoints: the drafter's masters, both moments and the position in the run; written whole or not at all.

Promises: a checkpoint folder appears by one rename, after its files reached the disk; a resume continues bit for bit;
the number of drafters may differ, since slices are joined before they are written.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftgraph.engine.errors import RunError
from draftgraph.engine.run.lanes import DrafterLane

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, step: int, drafters: Sequence[DrafterLane], micro_step: int, identity: dict, keep: int) -> Path:
    """Write checkpoints/step-NNNNNN and drop the oldest beyond `keep`. The devices must be idle."""
    first = drafters[0]
    flats = {
        "master": torch.cat([d.optimizer.master.cpu() for d in drafters]),
        **{name: torch.cat([d.optimizer.state[name].cpu() for d in drafters]) for name in MOMENTS},
    }
    tensors = {f"{kind}.{name}": t for kind, flat in flats.items() for name, t in first.flat.named(flat).items()}
    scalars = {
        "step": step,
        "micro_step": micro_step,
        "updates": int(first.optimizer.state["step"].item()),
        "skipped": int(first.optimizer.skipped.item()),
        **identity,
    }
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / "state.safetensors")
        (partial / "state.json").write_text(json.dumps(scalars, indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"cannot write the checkpoint of step {step} in {folder}: {error}. The last good checkpoint is untouched; "
            "free some space, then go on with --resume"
        ) from error
    # Later ones are of a run that this one replaced: a resume went on from an earlier checkpoint.
    earlier = [path for path in found(folder) if path < final]
    later = [path for path in found(folder) if path > final]
    for path in later + earlier[: max(0, len(earlier) + 1 - keep)]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def found(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def newest(folder: Path) -> Path:
    """The newest checkpoint that can be read.

    Raises:
        RunError: there is none.
    """
    reasons = []
    for path in reversed(found(folder)):
        try:
            read_scalars(path)
            with safe_open(path / "state.safetensors", "pt") as file:
                file.keys()
            return path
        except (OSError, RunError, SafetensorError) as error:
            reasons.append(f"{path.name}: {error}")
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise RunError(f"no usable checkpoint in {folder}{detail}; move its checkpoints away and start without --resume")


def read_scalars(path: Path) -> dict:
    try:
        scalars = json.loads((path / "state.json").read_text())
        if not all(type(scalars[key]) is int for key in ("step", "micro_step", "updates", "skipped")):
            raise ValueError("a count in state.json is not a whole number")
        return scalars
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read checkpoint {path}: {error}; remove it and use --resume again") from error


def read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """A checkpoint's scalars and its tensors under KIND.PARAMETER.

    Raises:
        RunError: a file is damaged.
    """
    scalars = read_scalars(path)
    try:
        with safe_open(path / "state.safetensors", "pt") as file:
            return scalars, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"cannot read checkpoint {path}: {error}; remove it and use --resume again") from error


def check_identity(path: Path, identity: dict) -> None:
    """Refuse to go on with another drafter, target, data, loss, schedule or seed.

    Raises:
        RunError: the field that differs is named.
    """
    made_of = read_scalars(path)
    for key, expected in identity.items():
        if made_of.get(key) != expected:
            raise RunError(
                f"checkpoint {path} was made with {key} = {made_of.get(key)!r}, the profile gives {expected!r}; "
                "resume with the run's own profile.toml, or start a new run"
            )


def restore(path: Path, drafters: Sequence[DrafterLane]) -> dict:
    """Write a checkpoint into the drafters' persistent tensors and return its scalars.

    Raises:
        RunError: a file is damaged.
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
    return scalars
