"""Which forward a target runs: its module's own layers in a loop, or fused kernels for the families that have them."""

from typing import Any

import torch

from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.fused import FusedForward
from draftgraph.engine.models.fused_llama import FusedLlama
from draftgraph.engine.models.fused_qwen3_5 import FusedQwen35

# By model_type of the text decoder's configuration.
FUSED: dict[str, type[FusedForward]] = {
    "llama": FusedLlama,
    "qwen2": FusedLlama,
    "qwen3": FusedLlama,
    "qwen3_5_text": FusedQwen35,
}


def choose_forward(
    decoder: Any, target_layer_ids: tuple[int, ...], max_context: int, wanted: str, slides: bool, final: bool = False
) -> FusedForward | None:
    """The fused forward of the target, or None for the loop over its module's layers.

    Args:
        wanted: "auto" (fused where there is one), "fused" or "module".
        slides: are there layers with a window shorter than max_context.
        final: are the last hidden states wanted too.
    Raises:
        UsageError: "fused" is wanted and there is none.
    """
    if wanted == "module":
        return None
    config = decoder.config
    reason = None
    if config.model_type not in FUSED:
        reason = f"there are only those of {', '.join(FUSED)}"
    elif slides:
        reason = f"its window of {config.sliding_window} tokens is shorter than the largest bucket ({max_context})"
    elif config.hidden_act != "silu":
        reason = f"its activation is {config.hidden_act}, not silu"
    if reason is None:
        return FUSED[config.model_type](decoder, target_layer_ids, max_context, final)
    if wanted == "fused":
        raise UsageError(
            f'profile: target.forward = "fused", but target family {config.model_type!r} has no fused forward here: '
            f'{reason}; write "auto" or "module"'
        )
    return None


def require_fp8(fused: FusedForward | None, family: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse products in FP8 where there are none.

    Raises:
        UsageError: with what to change.
    """
    reason = None
    if fused is None:
        reason = f"target family {family!r} runs its module's own layers here, and FP8 is for fused forwards"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        reason = f"{device} ({name}) has no products in FP8: they need compute capability 8.9 or more"
    elif device.type == "cuda" and dtype != torch.bfloat16:
        reason = 'its products give bfloat16; set target.dtype = "bfloat16"'
    if reason is not None:
        raise UsageError(f'profile: target.precision = "fp8", but {reason}; or write target.precision = "own"')
