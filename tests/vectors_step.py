"""Runs a test vector through the engine's own step: a drafter lane over padded bucket buffers."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftgraph.engine.config import OptimSection
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import SlotLayout
from draftgraph.engine.models.drafter import Drafter, DrafterShape
from draftgraph.engine.models.loss import LossRule
from draftgraph.engine.run.buffers import BatchBuffer
from draftgraph.engine.run.lanes import DrafterLane, DrafterParts

FOLDER = Path(__file__).parent / "vectors"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


@dataclass(frozen=True)
class Vector:
    config: dict
    tensors: dict[str, Tensor]

    @property
    def shape(self) -> DrafterShape:
        c = self.config
        return DrafterShape(
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_layers=c["num_hidden_layers"],
            num_heads=c["num_attention_heads"],
            num_kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            block_size=c["block_size"],
            vocab_size=c["vocab_size"],
            mask_token_id=c["mask_token_id"],
            target_layer_ids=tuple(range(c["num_taps"])),
            num_target_layers=8,
            layer_types=tuple(c["layer_types"]),
            sliding_window=c["sliding_window"],
            rope_theta=c["rope_theta"],
            rms_norm_eps=c["rms_norm_eps"],
        )


def read_vector(name: str) -> Vector:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
        return Vector(json.loads(file.metadata()["config"]), tensors)


def drafter_lane(vector: Vector, device: torch.device, mode: str = "eager") -> tuple[DrafterLane, Bucket]:
    """The lane over a bucket with one more row, more context and more anchors than the vector has."""
    t, c = vector.tensors, vector.config
    num_rows, num_context = t["input_ids"].shape
    bucket = Bucket(num_rows + 1, num_context + 13, t["anchor_positions"].shape[1] + 3)
    batch = BatchBuffer({bucket: SlotLayout(bucket)}, t["target_hidden"].shape[-1], torch.float32, device)

    def fill(_: Bucket, __: int, views) -> None:
        # Whatever an earlier micro-batch left in the taps' pads must not matter.
        views.taps.fill_(float("nan"))
        for field in (views.input_ids, views.loss_mask, views.lengths, views.anchor_positions, views.anchor_valid):
            field.zero_()
        views.input_ids[:num_rows, :num_context] = t["input_ids"].to(device)
        views.loss_mask[:num_rows, :num_context] = t["loss_mask"].to(device)
        views.taps[:num_rows, :num_context] = t["target_hidden"].to(device)
        views.lengths[:num_rows] = num_context
        num_anchors = t["anchor_positions"].shape[1]
        # Valid anchors come first in a row, as the collation writes them.
        for r in range(num_rows):
            valid = t["anchor_positions"][r][t["anchor_valid"][r]].int().to(device)
            views.anchor_positions[0, r, : len(valid)] = valid
            views.anchor_valid[0, r, : len(valid)] = True
        assert int(views.anchor_valid.sum()) == int(t["anchor_valid"].sum()) and num_anchors

    rule = LossRule("dpace" if c["loss_type"] == "dpace" else "decay", c["gamma"])
    parts = DrafterParts(
        drafter=Drafter(vector.shape, bucket.context).to(device),
        embedding=t["embed_tokens"].to(device),
        lm_head=t["lm_head"].to(device),
        rule=rule,
        chunk_slots=40,
        optim=OptimSection(),
        num_steps=10,
    )
    lane = DrafterLane("drafter 0", parts, batch, device, mode, fill)
    fill(bucket, 0, batch.views[bucket])
    weights = {name.removeprefix("weight."): x for name, x in t.items() if name.startswith("weight.")}
    for name, view in lane.flat.named(lane.flat.values).items():
        view.copy_(weights[name])
    return lane, bucket


def relative(found: Tensor, expected: Tensor) -> float:
    """max|difference| / max|reference|."""
    return float((found.detach().cpu() - expected).abs().max() / expected.abs().max())


def differences(vector: Vector, lane: DrafterLane, bucket: Bucket) -> dict[str, float]:
    """Relative difference of every expected tensor, after one micro-step of the lane."""
    from draftgraph.engine.run.metrics import HEAD, LOSS, WEIGHT

    expected = {k.removeprefix("expected."): v for k, v in vector.tensors.items() if k.startswith("expected.")}
    sums, slots = lane.sums.cpu(), vector.config["block_size"] - 1
    weight = sums[WEIGHT]
    correct, counted = sums[HEAD : HEAD + slots].sum(), sums[HEAD + slots : HEAD + 2 * slots].sum()
    found = {
        "loss_sum": sums[LOSS][None],
        "weight_sum": weight[None],
        "loss": (sums[LOSS] / weight)[None],
        **{f"grad.{name}": g / weight for name, g in lane.flat.named(lane.flat.grads.cpu()).items()},
    }
    result = {name: relative(value, expected[name].view(value.shape)) for name, value in found.items()}
    result["accuracy"] = float(abs(correct / counted - expected["accuracy"][0]))
    return result
