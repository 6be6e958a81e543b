"""The drafter as the inference engines read it: z-lab's form (SGLang, vLLM) or that of the speculators library (vLLM).

Promises: config.json, model.safetensors and a model card appear together or not at all; tensors carry z-lab's names
without a prefix (SGLang ignores names that it does not know and would serve a random drafter); what was written can
be read back and is checked name by name.
Does not do: the embedding and the lm_head, which every engine takes from the target.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgraph.engine.errors import DataError, RunError, UsageError
from draftgraph.engine.models.card import model_card
from draftgraph.engine.models.drafter import Drafter, DrafterShape
from draftgraph.engine.models.export_config import speculators_config, zlab_config

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def replaceable(folder: Path) -> bool:
    """Whether a folder is empty or an earlier export and nothing else: the only things that an export may replace."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    try:
        architectures = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return architectures == ["DFlashDraftModel"] and names <= {CONFIG, WEIGHTS, CARD}


def export_drafter(
    folder: Path,
    drafter: Drafter,
    target_config: Any,
    *,
    form: str = "zlab",
    dtype: torch.dtype = torch.bfloat16,
    card: dict[str, Any],
) -> dict[str, Any]:
    """Write the drafter for the inference engines; an earlier export in `folder` is replaced.

    Args:
        folder: where to; a folder that holds something other than an export is refused.
        drafter: on any device.
        target_config: the target's text configuration.
        form: "zlab" or "speculators"; the latter names the target in config.json, where its library finds it.
        dtype: of the tensors in the file.
        card: facts for the model card, name to value; `base_model` is the target's name.
    Returns:
        The summary of `export`: format, path, tensors, parameters.
    Raises:
        UsageError: the folder is in use for something else. RunError: it cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not replaceable(folder):
        raise UsageError(
            f"export: {folder} exists and is not an exported drafter and nothing else. Name another --out, or empty it"
        )
    if form == "zlab":
        config = zlab_config(drafter.shape, target_config, dtype)
    else:
        config = speculators_config(drafter.shape, target_config, dtype, card["base_model"])
    # copy=True: the parameters may be views of one flat buffer, which safetensors would refuse or write whole.
    tensors = {name: p.detach().to("cpu", dtype, copy=True) for name, p in drafter.named_parameters()}
    fresh, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir(parents=True)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (fresh / CARD).write_text(model_card(drafter.shape, card, form), encoding="utf-8")
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise RunError(f"export: cannot write {folder}: {error}. Check the disk and the permissions") from error
    parameters = sum(t.numel() for t in tensors.values())
    return {"format": form, "path": str(folder), "tensors": len(tensors), "parameters": parameters}


def load_zlab(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Read an exported drafter back: its shape, and its tensors on the CPU in the file's dtype.

    Raises:
        DataError: a file, a field or a tensor is missing, unexpected or of another shape.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        state = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} is not an exported drafter: {error}. Expected {CONFIG} and {WEIGHTS}") from error
    try:
        shape = DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            block_size=config["block_size"],
            vocab_size=config["vocab_size"],
            mask_token_id=config["dflash_config"]["mask_token_id"],
            target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            layer_types=tuple(config["layer_types"]),
            sliding_window=config["sliding_window"],
            rope_theta=config["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / CONFIG} does not describe a DFlash drafter; missing or wrong: {error}") from error
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in Drafter(shape, max_context=1).named_parameters()}
    found = {name: tuple(t.shape) for name, t in state.items()}
    if found != expected:
        wrong = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
        wrong += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
        wrong += [
            f"{n} is {found[n]}, expected {expected[n]}"
            for n in sorted(expected.keys() & found.keys())
            if found[n] != expected[n]
        ]
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise DataError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {'; '.join(wrong[:8])}{more}")
    return shape, state
