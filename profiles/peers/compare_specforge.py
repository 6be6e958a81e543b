"""Live comparison with code that nobody here wrote: SpecForge's DFlash step, in float32 on the CPU, at random shapes.

Promises: hidden output, loss, its sum and weight, accuracy and every gradient are compared on the same weights, rows
and anchors, ours in a bucket larger than the batch; theirs is our export, loaded by their own class with no weight
missing or unexpected. Exit status 0 where all agree or the wheel is absent (one sentence says so), else 1.

    pip install --no-deps specforge==0.2.0
    python profiles/peers/compare_specforge.py --cases 20
"""

import argparse
import importlib.util
import random
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftgraph.engine.models.drafter import Drafter, DrafterShape, block_tokens
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.loss import LossRule, dflash_loss
from draftgraph.engine.models.released import load_zlab

TOLERANCE = 1e-5  # max|difference| / max|reference| of a tensor
PACKAGES = ("", ".core", ".modeling", ".modeling.draft", ".algorithms", ".algorithms.common")


def import_peer() -> tuple[Any, Any] | None:
    """SpecForge's (training model, draft model) without its packages' own imports, which start its server."""
    spec = importlib.util.find_spec("specforge")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent.parent
    for package in PACKAGES:
        module = types.ModuleType(f"specforge{package}")
        module.__path__ = [str(root.joinpath("specforge", *package.split(".")[1:]))]
        sys.modules[module.__name__] = module
    quiet: Any = types.ModuleType("specforge.utils")
    quiet.print_on_rank0 = lambda *_, **__: None
    sys.modules["specforge.utils"] = quiet
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    return OnlineDFlashModel, DFlashDraftModel


def random_case(draw: random.Random) -> tuple[DrafterShape, LossRule, list[int], int]:
    """A drafter's shape, a loss, the lengths of the rows and the anchors of a row."""
    num_layers, num_taps, num_kv_heads = draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 2])
    num_sliding = draw.randint(0, num_layers)
    vocab_size = draw.randint(60, 200)
    shape = DrafterShape(
        hidden_size=draw.choice([32, 48, 64]),
        intermediate_size=draw.choice([64, 96]),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw.choice([1, 2, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([16, 32]),
        block_size=draw.randint(2, 16),
        vocab_size=vocab_size,
        mask_token_id=vocab_size - 1,
        target_layer_ids=tuple(sorted(draw.sample(range(8), num_taps))),
        num_target_layers=8,
        layer_types=("sliding_attention",) * num_sliding + ("full_attention",) * (num_layers - num_sliding),
        sliding_window=draw.randint(4, 24) if num_sliding else None,
        rope_theta=draw.choice([1e4, 1e6, 1e7]),
        rms_norm_eps=1e-6,
    )
    rule = draw.choice([LossRule("decay", 0.0), LossRule("decay", 4.0), LossRule("decay", 7.0), LossRule("dpace")])
    lengths = [draw.randint(12, 90) for _ in range(draw.randint(1, 4))]
    return shape, rule, lengths, draw.randint(1, 24)


def peer_step(peer: tuple[Any, Any], draft: Any, inputs: dict[str, Tensor], rule: LossRule, num_anchors: int) -> Any:
    """The peer's training forward: (loss, accuracy, metrics, anchor positions, anchor validity, hidden)."""
    shape_of = draft.config
    head = torch.nn.Linear(shape_of.hidden_size, shape_of.vocab_size, bias=False)
    head.weight = torch.nn.Parameter(inputs["lm_head"], requires_grad=False)
    embedding = torch.nn.Embedding.from_pretrained(inputs["embedding"])
    model = peer[0](
        draft,
        head,
        embedding,
        mask_token_id=draft.mask_token_id,
        block_size=draft.block_size,
        attention_backend="sdpa",
        num_anchors=num_anchors,
        loss_decay_gamma=rule.gamma or None,
        loss_type={"decay": "dflash", "dpace": "dpace"}[rule.kind],
        dpace_alpha=rule.alpha,
    )
    seen: list[Any] = []
    inner = model._forward_draft_blocks

    def record(**arguments: Any) -> Any:
        seen.extend(inner(**arguments))
        return tuple(seen)

    model._forward_draft_blocks = record
    return (*model(inputs["input_ids"], inputs["target_hidden"], inputs["loss_mask"].float()), *seen)


def padded(x: Tensor, size: int, value: float) -> Tensor:
    """x with its second dimension filled up to `size`."""
    out = x.new_full((x.shape[0], size, *x.shape[2:]), value)
    out[:, : x.shape[1]] = x
    return out


def our_hidden(drafter: Drafter, inputs: dict[str, Tensor], anchors: Tensor, valid: Tensor) -> Tensor:
    tokens, _ = block_tokens(inputs["input_ids"], anchors, drafter.shape.block_size)
    tokens[..., 1:] = drafter.shape.mask_token_id
    return drafter(inputs["target_hidden"], inputs["embedding"][tokens], anchors, valid)


def difference(ours: Tensor, reference: Tensor) -> float:
    """max|difference| / max|reference|; infinite where ours is not finite, so that no maximum hides it."""
    if not ours.isfinite().all():
        return float("inf")
    return ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-12)).item()


def compare(peer: tuple[Any, Any], seed: int) -> tuple[str, dict[str, float]]:
    """One random case: what it was, and the difference of everything compared."""
    shape, rule, lengths, num_anchors = random_case(random.Random(seed))
    torch.manual_seed(seed)
    num_rows, num_context, size = len(lengths), max(lengths), shape.hidden_size
    loss_mask = torch.rand(num_rows, num_context) < 0.8
    for row, length in enumerate(lengths):
        loss_mask[row, 4:6] = True  # at least one anchor in every row
        loss_mask[row, length:] = False
    inputs = {
        "input_ids": torch.randint(shape.vocab_size - 1, (num_rows, num_context)),
        "loss_mask": loss_mask,
        "target_hidden": torch.randn(num_rows, num_context, len(shape.target_layer_ids) * size),
        "embedding": torch.randn(shape.vocab_size, size),
        "lm_head": torch.randn(shape.vocab_size, size) / size**0.5,
    }
    drafter = Drafter(shape, max_context=128)
    drafter.initialise(seed, std=0.1)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
        parameter.data = parameter.data.bfloat16().float()  # exact in the export
        assert parameter.requires_grad, name

    with tempfile.TemporaryDirectory() as folder:
        target_config = types.SimpleNamespace(max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
        export_drafter(Path(folder) / "drafter", drafter, target_config, card={})
        draft, report = peer[1].from_pretrained(
            Path(folder) / "drafter", output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
        )
        read_shape, state = load_zlab(Path(folder) / "drafter")
    found: dict[str, float] = {
        "export: missing or unexpected weights": len(report["missing_keys"]) + len(report["unexpected_keys"]),
        "export: shape read back": float(read_shape != shape),
    }
    found["export: weights"] = max(difference(state[n].float(), p) for n, p in draft.state_dict().items())
    draft.train()
    loss, accuracy, metrics, anchors, valid, hidden = peer_step(peer, draft, inputs, rule, num_anchors)
    loss.backward()
    loss_sum, weight_sum = metrics["loss_terms"]

    # Ours in a bucket larger than the batch: context and anchors are padded, and what pads hold must not matter.
    context, width = num_context + 11, anchors.shape[1] + 3
    bucket = inputs | {
        "input_ids": padded(inputs["input_ids"], context, 0),
        "loss_mask": padded(loss_mask, context, False),
        "target_hidden": padded(inputs["target_hidden"], context, 1e3),
    }
    our_valid = padded(valid, width, False)
    our_anchors = padded(anchors.int(), width, 0)
    ours = our_hidden(drafter, bucket, our_anchors, our_valid)
    sums = dflash_loss(
        ours, inputs["lm_head"], bucket["input_ids"], bucket["loss_mask"], our_anchors, our_valid, rule, chunk_slots=64
    )
    (sums.loss / sums.weight).backward()

    hidden = hidden.view(num_rows, -1, shape.block_size, size)
    found["hidden"] = difference(ours[our_valid], hidden[valid])
    found["loss"] = difference(sums.loss / sums.weight, loss)
    found["loss sum"] = difference(sums.loss, loss_sum)
    found["weight sum"] = difference(sums.weight, weight_sum)
    found["accuracy"] = abs(float(sums.correct_per_slot.sum() / sums.counted_per_slot.sum()) - float(accuracy))
    references = dict(draft.named_parameters())
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        found[f"gradient of {name}"] = difference(parameter.grad, references[name].grad)
    layers = "+".join(t.removesuffix("_attention") for t in shape.layer_types)
    what = f"{num_rows} x {num_context}, {anchors.shape[1]} anchors, block {shape.block_size}, {rule}, {layers}"
    return what, found


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our DFlash step with SpecForge's at random shapes.")
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    peer = import_peer()
    if peer is None:
        print("Skipped: the wheel specforge is not installed (pip install --no-deps specforge==0.2.0).")
        return 0
    transformers.logging.disable_progress_bar()
    worst: dict[str, float] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        what, found = compare(peer, seed)
        name = max(found, key=lambda key: found[key])
        print(f"case {seed}: {what}: largest difference {found[name]:.1e} ({name})")
        for key, value in found.items():
            key = "gradients" if key.startswith("gradient of") else key
            worst[key] = max(worst.get(key, 0.0), value)
    for key, value in worst.items():
        print(f"{key}: {value:.1e}")
    return 0 if all(value <= TOLERANCE for value in worst.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
