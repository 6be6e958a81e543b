"""The drafter as the inference engines read it: z-lab's form (SGLang, vLLM) or that of the speculators library (vLLM).

Promises: config.json, model.safetensors and a model card appear together or not at all; tensors carry z-lab's names
without a prefix (SGLang ignores names that it does not know and would serve a random drafter).
Does not do: reading (`released`); the embedding and the lm_head, which every engine takes from the target.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftgraph.engine.errors import RunError, UsageError
from draftgraph.engine.models.card import model_card
from draftgraph.engine.models.drafter import Drafter
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
        raise UsageError(f"export: {folder} holds more than an earlier export. Name another --out, or empty it")
    if form == "zlab" and drafter.shape.sliding_rule != "served":
        raise UsageError(
            f'export: the drafter was trained with drafter.sliding_rule = "{drafter.shape.sliding_rule}", and readers '
            "of z-lab's form mask sliding layers in another way; write --format speculators"
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
