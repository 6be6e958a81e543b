"""Drafters as `eval` and `export` find them, in a run folder or exported, and the evaluation of one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftgraph.engine.config import Profile, load_profile
from draftgraph.engine.data.prompts import HUMAN_EVAL, load_prompts
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import UsageError
from draftgraph.engine.evaluate import Evaluation
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.released import initialise, load_zlab
from draftgraph.engine.models.target import load_config, load_model, load_tokenizer, public_name
from draftgraph.engine.plan import drafter_shape
from draftgraph.engine.report.record import json_of
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.run.metrics import real_acceptances


@dataclass(frozen=True)
class SavedDrafter:
    """A drafter on the CPU in float32 and its origin. NOTE: its rotary table is short; decoding makes its own."""

    drafter: Drafter
    target: str  # the target's name; empty where the source does not say
    step: int | None  # of the checkpoint
    profile: Profile | None  # of the run


def load_saved(
    source: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    best: bool = False,
    checkpoint_step: int | None = None,
) -> SavedDrafter:
    """Read a checkpoint of a run folder, the newest good one, or an exported drafter.

    Args:
        say: receives which checkpoint it is, and which newer ones are damaged.
        best: the checkpoint of the best real acceptance instead.
        checkpoint_step: or that of this step.
    Raises:
        UsageError: the folder is neither. RunError, DataError: a file in it is damaged.
    """
    if (source / "profile.toml").is_file():
        profile = load_profile(str(source / "profile.toml"))
        shape = drafter_shape(profile, load_config(profile.target.model))
        folder = source / "checkpoints"
        step = best_step(source) if best else checkpoint_step
        newest = checkpoint.newest(folder, say) if step is None else checkpoint.of_step(folder, step)
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


def best_step(run: Path) -> int:
    """The step of the best real acceptance whose checkpoint is there.

    Raises:
        UsageError: the run measured none that it kept.
    """
    there = {checkpoint.step_of(path) for path in checkpoint.found(run / "checkpoints")}
    measured = {step: real for step, real in real_acceptances(run / "metrics.jsonl").items() if step in there}
    if not measured:
        raise UsageError(
            f"{run} holds no checkpoint whose real acceptance was measured; train with eval.every and "
            "checkpoint.keep_best = true, or leave --best away"
        )
    return max(measured, key=lambda step: measured[step])


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
        found = json_of(path, trouble=[])
        if found.get("step") != saved.step:
            continue
        how = f", sampled at {found['temperature']}" if found["temperature"] else ""
        for part in found["sets"]:
            if part["acceptance"] is not None:
                name = f"acceptance length, {part['prompts']} prompts of {Path(part['name']).name}{how}"
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
    name = "-".join(["eval", *(Path(prompts["name"]).stem for prompts in summary["sets"])])
    try:
        write_text(source / f"{name}.json", json.dumps(summary, indent=1) + "\n")
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


@dataclass(frozen=True)
class EvalOptions:
    """How `eval` decodes."""

    prompts: Sequence[str] = (HUMAN_EVAL,)  # each a set
    num_prompts: int = 16  # of each set
    new_tokens: int = 64
    batch_size: int = 8
    temperature: float = 0.0  # 0: greedy
    tree_budget: int = 0  # nodes of a tree; 0: chains alone
    dtype: str = ""  # "": on a GPU what the run trained with, else float32
    untrained: bool = False  # evaluate the drafter of before step 1 as well


def evaluate_saved(saved: SavedDrafter, target: str, options: EvalOptions, console: Console) -> dict[str, Any]:
    """The summary of `draftgraph eval`, on this machine's first device.

    Args:
        target: overrides what the run says; needed for an exported drafter.
    """
    name = target or saved.target
    if not name:
        raise UsageError("an exported drafter does not name its target; add --target MODEL")
    if options.untrained and saved.profile is None:
        raise UsageError("--untrained needs a run folder: an exported drafter does not say how it began")
    sets = {source: load_prompts(source, options.num_prompts) for source in options.prompts}
    shape, config = saved.drafter.shape, load_config(name)
    if (shape.hidden_size, shape.vocab_size) != (config.hidden_size, config.vocab_size):
        raise UsageError(
            f"the drafter is for a target of hidden size {shape.hidden_size} and {shape.vocab_size} token ids; {name} "
            f"has {config.hidden_size} and {config.vocab_size}"
        )
    device = default_device()
    trained_in = saved.profile.target.dtype if saved.profile and device.type == "cuda" else "float32"
    dtype = options.dtype or trained_in
    evaluation = Evaluation(
        load_model(name, getattr(torch, dtype), device),
        load_tokenizer(name),
        shape,
        sets,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        temperature=options.temperature,
        tree_budget=options.tree_budget,
        console=console,
    )
    before = evaluation.measure(untrained(saved)) if options.untrained else None
    summary = {
        **evaluation.measure(saved.drafter),
        "step": saved.step,
        "target": name,
        "prompt_set": ", ".join(options.prompts),
        "dtype": dtype,
        "mode": evaluation.decoder.lane.mode,
    }
    evaluation.close()
    return {**summary, "untrained": before, "acceptance_untrained": before["acceptance"]} if before else summary
