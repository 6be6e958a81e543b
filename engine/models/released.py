"""Drafters in z-lab's form: released ones, and our own exports.

Promises: a tensor or a field that is missing, unexpected or of another shape is named; a drafter that computes anything
besides what ours does (a bias, scaled embeddings, capped logits, another rotation) is refused by that field.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.drafter import Drafter, DrafterShape, default_target_layer_ids
from draftgraph.engine.models.export import CONFIG, WEIGHTS

# What each may be, where a config says it at all.
SUPPORTED = {
    "architectures": (["DFlashDraftModel"],),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "rope_scaling": (None,),
    "is_causal": (None,),
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
}
# The key of [drafter] that sets a field, where there is one.
KEYS = {
    "num_layers": "layers",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "layer_types": "sliding_layers",
    **{name: name for name in ("intermediate_size", "head_dim", "block_size", "mask_token_id", "target_layer_ids")},
    **{name: name for name in ("sliding_window", "sliding_rule", "rope_theta")},
}


def load_zlab(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """A drafter's shape, and its tensors on the CPU in the file's dtype.

    Raises:
        DataError: a file, a field or a tensor is missing, unexpected or of another shape.
    """
    shape = read_shape(folder)
    try:
        state = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} is not an exported drafter: {error}. Expected {CONFIG} and {WEIGHTS}") from error
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


def read_shape(folder: Path) -> DrafterShape:
    """The shape that config.json describes. Older releases have some fields at the top, newer in dflash_config.

    Raises:
        DataError: it is missing, or describes something that ours does not compute.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not an exported drafter: {error}. Expected {CONFIG} and {WEIGHTS}") from error
    if isinstance(config, dict) and "speculators_model_type" in config:
        raise DataError(f"{folder} is in the form of speculators; name an export of --format zlab")
    try:
        values = {**config, **config.get("dflash_config", {})}
        rope = config.get("rope_parameters") or {}
        refuse_unsupported(folder, {**values, "rope_type": rope.get("rope_type", "default")})
        layers, target_layers = config["num_hidden_layers"], config["num_target_layers"]
        layer_types = tuple(config.get("layer_types") or ["full_attention"] * layers)
        return DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            block_size=values["block_size"],
            vocab_size=config["vocab_size"],
            mask_token_id=values["mask_token_id"],
            target_layer_ids=tuple(values.get("target_layer_ids") or default_target_layer_ids(layers, target_layers)),
            num_target_layers=target_layers,
            layer_types=layer_types,
            sliding_window=config["sliding_window"] if "sliding_attention" in layer_types else None,
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
            rms_norm_eps=config["rms_norm_eps"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / CONFIG} does not describe a DFlash drafter; missing or wrong: {error}") from error


def refuse_unsupported(folder: Path, values: dict[str, Any]) -> None:
    for name, known in {**SUPPORTED, "rope_type": ("default",)}.items():
        if name in values and values[name] not in known:
            raise DataError(
                f"{folder / CONFIG} says {name} = {values[name]!r}, which this drafter does not compute (it does "
                f"{known[-1]!r})"
            )


def require_same_shape(folder: Path, wanted: DrafterShape) -> None:
    """Refuse to start from a drafter that is not the profile's.

    Raises:
        UsageError: naming every field that differs, and what to write in the profile.
        DataError: the folder holds no drafter in z-lab's form.
    """
    found = dataclasses.asdict(read_shape(folder))
    lines = []
    for name, value in dataclasses.asdict(wanted).items():
        if found[name] != value:
            # Which layers slide is a number of them in the profile.
            shown = found[name].count("sliding_attention") if name == "layer_types" else found[name]
            remedy = f"write drafter.{KEYS[name]} = {as_toml(shown)}" if name in KEYS else "it is another target's"
            lines.append(f"{name} is {found[name]} there and {value} here ({remedy})")
    if lines:
        raise UsageError(f"profile: drafter.init = {str(folder)!r} is another drafter: {'; '.join(lines)}")


def as_toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def initialise(drafter: Drafter, init: str, seed: int, std: float) -> None:
    """The weights of step 1, in place: those of the drafter in the folder `init`, or random ones where it is empty."""
    if init:
        drafter.load_state_dict(load_zlab(Path(init))[1])
    else:
        drafter.initialise(seed, std)
