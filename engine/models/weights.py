"""The weights of a target from sharded safetensors, straight to the device that runs it, and the bytes they take.

Promises: the host holds one tensor at a time; layers after the last tap are neither made nor read; a tensor that is
missing, has another shape, is quantised or belongs to nothing is named. Names of multimodal checkpoints are understood
where a text decoder is nested in them; their other towers are left out.
Does not do: families whose checkpoints hold other tensors than their module (mixtures of experts), GGUF, quantised
checkpoints: transformers loads those.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from draftgraph.engine.errors import UsageError

# Families of which every tensor of a checkpoint is one of the module, by model_type of the text configuration.
STREAMED = (
    *("llama", "mistral", "phi3", "olmo2", "starcoder2", "qwen2", "qwen3", "qwen3_5_text"),
    *("gemma2", "gemma3_text"),
)
# What may stand before a name of the text model, and what that model calls it.
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_OTHER_TOWERS = re.compile(r"(model\.)?(visual|vision_\w+|multi_modal_projector|mtp)\.|.*rotary_emb\.inv_freq$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PLAIN = {"F64", "F32", "F16", "BF16"}
_MIB = 2**20


def weight_bytes(decoder: Any, last_layer: int, element_size: int, precision: str) -> int:
    """Bytes of what a run keeps of a target: its layers up to the last tap, its embedding and its lm_head."""
    config, layers = decoder.config, decoder.layers[: last_layer + 1]
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() > 1)
    others = sum(p.numel() for p in layers.parameters() if p.dim() == 1)
    heads = 1 if getattr(config, "tie_word_embeddings", False) else 2
    kept = others + heads * config.vocab_size * config.hidden_size
    return matrices * (1 if precision == "fp8" else element_size) + kept * element_size


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a folder or hub name; none where it has others.

    Raises:
        OSError: there is no such model.
    """
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        return [Path(file) for file in get_checkpoint_shard_files(path, index)[0]]
    single = cached_file(path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    return [] if single is None else [Path(single)]


def cut_layers(model: Any, last_layer: int) -> None:
    """Drop layers after the last tap, and the final norm: the model's last hidden state is then that of a tap."""
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[: last_layer + 1]
    decoder.norm = nn.Identity()


def materialise(model: Any, device: torch.device) -> None:
    """Give a model on the meta device memory: parameters without values, buffers with theirs, tied heads tied."""
    model.to_empty(device=device)
    persistent = set(model.state_dict())
    for prefix, module in model.named_modules():
        if any(f"{prefix}.{name}" not in persistent for name, _ in module.named_buffers(recurse=False)):
            model._init_weights(module)  # rotary frequencies, scales of embeddings: made from the configuration
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def copy_weights(source: Any, model: Any) -> None:
    """The same weights from a device of this host."""
    found = source.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(found[name], non_blocking=True)


def read_weights(model: Any, files: list[Path], progress: Progress | None = None) -> int:
    """Fill a model's tensors from files, one tensor at a time; returns the bytes read.

    Args:
        model: with memory, perhaps cut.
    Raises:
        UsageError: naming what is missing, wrong, or not the model's.
    """
    wanted = model.state_dict()
    last_layer = len(model.get_decoder().layers) - 1
    places: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    problems, total = [], 0
    for file in files:
        with opened(file) as shard:
            # In the order in which they lie.
            for stored in shard.offset_keys():
                part, name = shard.get_slice(stored), name_in(wanted, stored)
                found, dtype = list(part.get_shape()), part.get_dtype()
                if name is None:
                    if not left_out(stored, last_layer, wanted):
                        problems.append(f"{stored} belongs to nothing in {type(model).__name__}")
                elif dtype not in _PLAIN:
                    problems.append(f"{stored} is {dtype}: give the checkpoint that is not quantised")
                elif found != list(wanted[name].shape):
                    problems.append(f"{stored} has the shape {found}, expected {list(wanted[name].shape)}")
                else:
                    places[file].append((stored, name))
                    total += wanted[name].nbytes
    there = {wanted[name].data_ptr() for names in places.values() for _, name in names}
    missing = [name for name, tensor in wanted.items() if tensor.data_ptr() not in there]
    if problems or missing:
        said = problems[:3] or [f"{missing[0]} is missing"]
        raise UsageError(
            f"target.model: the checkpoint in {files[0].parent} does not fit ({len(missing)} tensors missing, "
            f"{len(problems)} wrong): {'; '.join(said)}. Fetch or convert it again"
        )
    task = None if progress is None else progress.add_task("load the target, MiB", total=total // _MIB)
    done = 0
    for file, names in places.items():
        for stored, name in names:
            # NOTE: opened anew for each tensor: what was read stays mapped, and counted, until it is closed.
            with opened(file) as shard, torch.no_grad():
                wanted[name].copy_(shard.get_tensor(stored))
            done += wanted[name].nbytes
            if progress is not None and task is not None:
                progress.update(task, completed=done // _MIB)
    if progress is not None and task is not None:
        progress.remove_task(task)
    return done


def opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"target.model: cannot read {file}: {error}; fetch or convert it again") from error


def name_in(wanted: Mapping[str, Tensor], stored: str) -> str | None:
    """The model's name of a stored tensor; None where it has none."""
    candidates = [stored, f"model.{stored}"]
    candidates += [inner + stored.removeprefix(outer) for outer, inner in _PREFIXES if stored.startswith(outer)]
    return next((name for name in candidates if name in wanted), None)


def left_out(stored: str, last_layer: int, wanted: Mapping[str, Tensor]) -> bool:
    """Whether a tensor that the model has no place for is one that a run does not need."""
    inner = next((i + stored.removeprefix(o) for o, i in _PREFIXES if stored.startswith(o)), stored)
    inner = inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    layer = _LAYER.match(inner)
    if layer is not None:
        return int(layer[1]) > last_layer
    return bool(_OTHER_TOWERS.match(stored)) or (inner == "model.norm.weight" and inner not in wanted)
