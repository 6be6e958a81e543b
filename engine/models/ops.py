"""Ops of a target's module that have a GPU package and a PyTorch twin: which one runs on which device. And which
implementation of attention and experts its module takes.

Promises: CUDA tensors take the package's kernel, CPU tensors the twin; a GPU run that would fall back to slow PyTorch
code is refused with the install command, unless the profile allows it by name.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftgraph.engine.errors import CaptureError
from draftgraph.engine.models.contexts import quiet
from draftgraph.engine.models.layers import num_experts

# Ops for which transformers resolves a GPU kernel once per process; on CPU tensors those kernels crash (seen with
# transformers 5.24 and fla 0.6), so each call picks the kernel or its PyTorch twin by the device of its input.
DEVICE_DEPENDENT_OPS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


def choose_ops_by_device(model: Any) -> None:
    """Let the model's module call fla / causal-conv1d for CUDA tensors, PyTorch twins for CPU tensors."""
    namespace = vars(sys.modules[type(model).__module__])
    for name in DEVICE_DEPENDENT_OPS:
        op = namespace.get(name)
        if op is not None and not hasattr(op, "draftgraph_op"):
            namespace[name] = by_device(op)


def choose_implementations(model: Any) -> None:
    """Where transformers' own choice (SDPA where the family has it) is wrong or is not certain."""
    config = model.config.get_text_config()
    with quiet():
        # transformers 5.17 runs soft-capped scores through SDPA, without the cap.
        if getattr(config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")
        # The only path of experts without nonzero() or a copy of the weights for every token.
        if num_experts(config):
            model.set_experts_implementation("grouped_mm")


@contextmanager
def twins(model: Any) -> Iterator[None]:
    """The model's module calls PyTorch twins on every device: as a truth to compare with, it needs no tuned kernels.

    Cold, fla's would take most of a minute to choose for shapes that no graph has.
    """
    namespace = vars(sys.modules[type(model).__module__])
    ours = (name for name in DEVICE_DEPENDENT_OPS if hasattr(namespace.get(name), "draftgraph_op"))
    chosen = {name: namespace[name] for name in ours}
    namespace.update({name: twin_of(op.draftgraph_op) for name, op in chosen.items()})
    try:
        yield
    finally:
        namespace.update(chosen)


def resolved_ops(model: Any, device: torch.device) -> dict[str, str]:
    """Which implementation each device-dependent op of the model's module runs on `device`: op -> module.function."""
    namespace = vars(sys.modules[type(model).__module__])
    found = {}
    for name in DEVICE_DEPENDENT_OPS:
        op = getattr(namespace.get(name), "draftgraph_op", None)
        if op is not None:
            called = inspect.getclosurevars(op).nonlocals["implementation"] if device.type == "cuda" else twin_of(op)
            found[name] = f"{called.__module__}.{called.__qualname__}"
    return found


def require_fast_ops(model: Any, device: torch.device, allowed: Sequence[str]) -> None:
    """Refuse a GPU run in which an op fell back to PyTorch because its package is missing or does not import.

    Raises:
        CaptureError: with the package; `allowed` names packages that may be missing.
    """
    if device.type != "cuda":
        return
    for op, called in resolved_ops(model, device).items():
        package = "causal_conv1d" if op.startswith("causal_conv1d") else "fla"
        if called.startswith("transformers.") and package not in allowed:
            distribution = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}[package]
            raise CaptureError(
                f"op {op} of target family {model.config.model_type!r} fell back to slow PyTorch code: {package} is "
                f"missing or does not import. Install it (pip install {distribution}), or accept it by name: "
                f'capture.allow_fallback = ["{package}"]'
            )


def by_device(op: Callable) -> Callable:
    twin = twin_of(op)

    def chosen(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x, *args, **kwargs) if x.is_cuda else twin(x, *args, **kwargs)

    chosen.draftgraph_op = op  # type: ignore[attr-defined]
    return chosen


def twin_of(op: Callable) -> Callable:
    """The plain PyTorch function under transformers' choice of implementation."""
    while hasattr(op, "__wrapped__"):
        op = op.__wrapped__
    return op
