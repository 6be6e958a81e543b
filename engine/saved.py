"""Drafters as `eval` and `export` find them, in a run folder or exported, and the evaluation of one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftgraph.engine.config import Profile, load_profile
from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import UsageError
from draftgraph.engine.evaluate import PlainCache, evaluate
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.released import initialise, load_zlab
from draftgraph.engine.models.target import load_config, load_model, load_tokenizer, public_name
from draftgraph.engine.plan import drafter_shape
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.disk import write_text


@dataclass(frozen=True)
class SavedDrafter:
    """A drafter on the CPU in float32 and its origin. NOTE: its rotary table is short; `evaluate` makes its own."""

    drafter: Drafter
    target: str  # the target's name; empty where the source does not say
    step: int | None  # of the checkpoint
    profile: Profile | None  # of the run


def load_saved(source: Path, say: Callable[[str], None] = lambda _: None) -> SavedDrafter:
    """Read the newest good checkpoint of a run folder, or an exported drafter.

    Args:
        say: receives which checkpoint it is, and which newer ones are damaged.
    Raises:
        UsageError: the folder is neither. RunError, DataError: a file in it is damaged.
    """
    if (source / "profile.toml").is_file():
        profile = load_profile(str(source / "profile.toml"))
        shape = drafter_shape(profile, load_config(profile.target.model))
        newest = checkpoint.newest(source / "checkpoints", say)
        scalars, tensors = checkpoint.read(newest)
        say(f"the drafter of step {scalars['step']} ({newest})")
        state = {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}
        found = SavedDrafter(Drafter(shape, 1), profile.target.model, scalars["step"], profile)
    elif (source / "config.json").is_file():
        shape, state = load_zlab(source)
        found = SavedDrafter(Drafter(shape, 1), "", None, None)
    else:
        raise UsageError(f"{source} is neither a run folder (profile.toml) nor an exported drafter (config.json)")
    found.drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return found


def card_facts(source: Path, saved: SavedDrafter, target: str) -> dict[str, Any]:
    """What the model card of an export tells of a drafter's run; of an exported drafter, no more than its target."""
    facts: dict[str, Any] = {"base_model": public_name(target)}
    if saved.profile is None:
        return facts
    data, drafter = saved.profile.data, saved.profile.drafter
    facts["steps"] = saved.step
    facts["loss"] = f"{drafter.loss}, labels: {drafter.labels}"
    if drafter.init:
        facts["continues"] = Path(drafter.init).name
    if data.shards and (Path(data.shards) / "shards.json").is_file():
        rows = ShardReader(data.shards)
        facts["data"] = f"{len(rows):,} rows, {rows.lengths.sum():,} tokens, checksum {rows.facts['checksum']:08x}"
    for path in sorted(source.glob("eval-*.json")):
        found = json.loads(path.read_text())
        if found["step"] != saved.step:
            continue
        for part in found.get("sets") or [{"name": found["prompt_set"], **found}]:
            if part["acceptance"] is not None:
                name = f"acceptance length, {part['prompts']} prompts of {Path(part['name']).name}"
                facts[name] = f"{part['acceptance']:.3f}"
    if (source / "receipt.json").is_file():
        facts["SHA-256 of the run's receipt.json"] = checkpoint.digest(source / "receipt.json")
    return facts


def keep_evaluation(source: Path, saved: SavedDrafter, summary: dict[str, Any], say: Callable[[str], None]) -> None:
    """Write the evaluation of a run's drafter into its folder, where the model card finds it.

    Args:
        say: receives one line where the folder cannot be written: the figures are worth showing all the same.
    """
    if saved.profile is None:
        return
    prompts = Path(summary["prompt_set"])
    try:
        kept = {**summary, "prompt_set": prompts.name}
        write_text(source / f"eval-{prompts.stem}.json", json.dumps(kept, indent=1) + "\n")
    except OSError as error:
        say(f"not kept for the model card: {error.strerror}: {error.filename}")


def untrained(saved: SavedDrafter) -> Drafter:
    """The drafter as it was before step 1 of its run."""
    assert saved.profile is not None
    drafter = Drafter(saved.drafter.shape, 1)
    initialise(drafter, saved.profile.drafter.init, saved.profile.run.seed, saved.profile.drafter.init_std)
    return drafter


def default_device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def evaluate_saved(
    saved: SavedDrafter, target: str, prompts: str, num_prompts: int, max_new_tokens: int, with_untrained: bool
) -> dict[str, Any]:
    """The summary of `draftgraph eval`, in float32 on this machine's first device.

    Args:
        target: overrides what the run says; needed for an exported drafter.
        with_untrained: also evaluate the drafter of before step 1, on the same plain answers, under "untrained".
    """
    name = target or saved.target
    if not name:
        raise UsageError("an exported drafter does not name its target; add --target MODEL")
    if with_untrained and saved.profile is None:
        raise UsageError("--untrained needs a run folder: an exported drafter does not say how it began")
    texts = load_prompts(prompts, num_prompts)
    shape, config = saved.drafter.shape, load_config(name)
    if (shape.hidden_size, shape.vocab_size) != (config.hidden_size, config.vocab_size):
        raise UsageError(
            f"the drafter is for a target of hidden size {shape.hidden_size} and {shape.vocab_size} token ids; {name} "
            f"has {config.hidden_size} and {config.vocab_size}"
        )
    device = default_device()
    model, tokenizer = load_model(name, torch.float32, device), load_tokenizer(name)
    cache: PlainCache = {}

    def measure(drafter: Drafter) -> dict[str, Any]:
        return evaluate(model, tokenizer, drafter.to(device), texts, max_new_tokens=max_new_tokens, plain_cache=cache)

    before = measure(untrained(saved)) if with_untrained else None
    summary = {**measure(saved.drafter), "step": saved.step, "target": name, "prompt_set": prompts}
    return {**summary, "untrained": before, "acceptance_untrained": before["acceptance"]} if before else summary
