"""From a profile to everything that is decided before a device is touched: shapes, buckets, layouts, predicted bytes.

Promises: needs no GPU and no weights; every figure is counted from shapes. What would have to be measured is null.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.engine.config import DrafterSection, Profile
from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket, assign, choose_buckets, efficiency
from draftgraph.engine.data.collate import SlotLayout
from draftgraph.engine.data.schedule import ORDER, Schedule
from draftgraph.engine.data.shards import RandomRows, Selected, ShardReader
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.drafter import DrafterShape, default_target_layer_ids
from draftgraph.engine.models.layers import num_experts, unsupported
from draftgraph.engine.models.loss import LossRule
from draftgraph.engine.models.target import EMBEDDED, RANDOM_PREFIX, decoder_on_meta, load_config, load_tokenizer
from draftgraph.profiles.load import PEERS

# SmolLM2 has no mask token and no spare embedding row: <empty_output>. Qwen3.5/3.6: the id its released drafters use.
KNOWN_MASK_TOKENS = {"smollm2": 16, "qwen3_5_text": 248070}
PUBLISHED_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Plan:
    """What a run is made of."""

    profile: Profile
    target_config: Any
    shape: DrafterShape
    rule: LossRule
    rows: Selected  # rows with at least one valid anchor
    rows_without_anchor: int
    lengths: np.ndarray  # [rows that train] int64
    anchors: np.ndarray  # [rows that train] int64, min(drafter.anchors, valid)
    buckets: list[Bucket]
    assignment: np.ndarray  # [rows that train] int64, index into buckets
    flops: "FlopModel"

    @cached_property
    def layouts(self) -> dict[Bucket, SlotLayout]:
        return {b: SlotLayout(b, self.profile.drafter.reuse) for b in self.buckets}

    @property
    def draw(self) -> AnchorDraw:
        section = self.profile.drafter
        return AnchorDraw(self.profile.run.seed, section.anchors, self.shape.block_size, section.anchor_rule)

    @cached_property
    def schedule(self) -> Schedule:
        """Drafters take micro-batches in turn: those that they work on side by side cost the same."""
        return Schedule(self.assignment, self.buckets, self.profile.run.seed, len(self.profile.placement.drafters))

    @property
    def padding_efficiency(self) -> float:
        """Real context tokens over padded ones."""
        contexts = np.array([b.context for b in self.buckets])[self.assignment]
        return float(self.lengths.sum() / contexts.sum())

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that resumes from it."""
        placement, optim = self.profile.placement, dataclasses.asdict(self.profile.optim)
        del optim["max_skipped"]  # when to give up
        made_of = {
            "seed": self.profile.run.seed,
            "steps": self.profile.run.steps,
            "target": dataclasses.asdict(self.profile.target),
            "tokenizer": self.rows.fingerprint,
            "data": self.rows.digest,
            "reuse": self.profile.drafter.reuse,
            "chunk_slots": self.profile.drafter.chunk_slots,
            "placement": {"targets": len(placement.targets), "drafters": len(placement.drafters)},
            "order": ORDER,
            "draw": dataclasses.asdict(self.draw),
            "buckets": [b.name for b in self.buckets],
            "loss": dataclasses.asdict(self.rule),
            "optim": optim,
            "drafter": dataclasses.asdict(self.shape),
        }
        return json.loads(json.dumps(made_of))  # as a checkpoint gives it back: lists for tuples

    @property
    def taps_size(self) -> int:
        return (len(self.shape.target_layer_ids) + (self.rule.labels != "data")) * self.shape.hidden_size


@dataclass(frozen=True)
class FlopModel:
    """Predicted GEMM FLOPs of a row; attention and elementwise work are left out.

    Source: 2 per parameter and token forward, 6 forward and backward; the frozen lm_head 4 per parameter and slot.
    """

    target_parameters: int  # seen by a context token
    context_parameters: int  # fc and k/v of every layer, seen by a context token
    block_parameters: int  # seen by a draft token
    head_parameters: int  # V*D
    block_size: int
    reuse: int

    def target(self, context: Any) -> Any:
        return 2.0 * self.target_parameters * context

    def drafter(self, context: Any, anchors: Any) -> Any:
        block = 6.0 * self.block_parameters * self.block_size + 4.0 * self.head_parameters * (self.block_size - 1)
        return 6.0 * self.context_parameters * context + block * anchors

    def row(self, context: Any, anchors: Any) -> Any:
        return self.target(context) + self.reuse * self.drafter(context, anchors)


def make_plan(profile: Profile) -> Plan:
    """Resolve the profile.

    Raises:
        UsageError: the mask token or a shape does not fit.
        CaptureError: the target's family is not supported.
        DataError: the shards are missing, damaged or do not fit the buckets.
    """
    config = load_config(profile.target.model)
    shape = drafter_shape(profile, config)
    loss = profile.drafter
    gamma = loss.gamma if loss.gamma >= 0 else PUBLISHED_GAMMAS.get(shape.block_size, shape.block_size / 2)
    rule = LossRule(loss.loss, gamma, loss.alpha, loss.labels, loss.loss_norm)
    rows = open_rows(profile, config.vocab_size)
    valid = rows.valid_anchors(profile.drafter.anchor_rule, shape.block_size)
    row_ids = np.flatnonzero(valid > 0)
    selected = Selected(rows, row_ids)
    if not len(row_ids):
        raise DataError(
            f"data: none of the {len(rows.lengths)} rows has a valid anchor (two supervised tokens in a row); "
            "look at what `draftgraph prepare` counted"
        )
    lengths = selected.lengths
    anchors = np.minimum(valid[row_ids], profile.drafter.anchors)
    section = profile.buckets
    if lengths.max() > section.max_context:
        raise DataError(
            f"data: the longest row has {lengths.max()} tokens, buckets.max_context is {section.max_context}; raise "
            f"it, or prepare again with --max-context {section.max_context}"
        )
    flops = flop_model(config, shape, profile.drafter)
    buckets = choose_buckets(
        lengths,
        anchors,
        count=section.count,
        context_tokens=section.context_tokens,
        draft_tokens=section.draft_tokens,
        block_size=shape.block_size,
        row_flops=flops.row,
        context_multiple=section.context_multiple,
    )
    assignment = assign(lengths, anchors, buckets, flops.row)
    return Plan(
        profile=profile,
        target_config=config,
        shape=shape,
        rule=rule,
        rows=selected,
        rows_without_anchor=len(valid) - len(row_ids),
        lengths=lengths,
        anchors=anchors,
        buckets=buckets,
        assignment=assignment,
        flops=flops,
    )


def drafter_shape(profile: Profile, config: Any) -> DrafterShape:
    section = profile.drafter
    needed = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_parameters")
    missing = [name for name in needed if getattr(config, name, None) is None]
    if missing:
        raise unsupported(config, f"its configuration has no {', '.join(missing)}")
    num_layers = config.num_hidden_layers
    ids = tuple(section.target_layer_ids) or default_target_layer_ids(section.taps, num_layers)
    # The last layer's output is not a tap: what others call its hidden state has passed the final norm.
    if not all(0 <= i < num_layers - 1 for i in ids) or list(ids) != sorted(set(ids)):
        raise UsageError(
            f"profile: drafter.target_layer_ids {list(ids)} must be ascending target layers, 0 to {num_layers - 2}"
        )
    heads = section.heads or config.num_attention_heads
    kv_heads = section.kv_heads or (heads if section.heads else config.num_key_value_heads)
    if heads % kv_heads:
        raise UsageError(f"profile: drafter.heads ({heads}) must be a multiple of drafter.kv_heads ({kv_heads})")
    head_dim = section.head_dim or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise UsageError(f"profile: drafter.head_dim = {head_dim} must be even")
    known = EMBEDDED if profile.target.model == EMBEDDED else config.model_type
    mask_token_id = section.mask_token_id if section.mask_token_id >= 0 else KNOWN_MASK_TOKENS.get(known, -1)
    if not 0 <= mask_token_id < config.vocab_size:
        raise UsageError(
            f"profile: drafter.mask_token_id = {section.mask_token_id} is not a row of the target's embedding; it has "
            f"{config.vocab_size} rows: choose an id from 0 to {config.vocab_size - 1} that the data does not use"
        )
    sliding = section.sliding_layers
    # Gemma 3 rotates its sliding layers in another way.
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=section.intermediate_size or config.intermediate_size,
        num_layers=section.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=section.block_size,
        vocab_size=config.vocab_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        num_target_layers=num_layers,
        layer_types=("sliding_attention",) * sliding + ("full_attention",) * (section.layers - sliding),
        sliding_window=section.sliding_window if sliding else None,
        rope_theta=section.rope_theta or rope["rope_theta"],
        # Of the drafter's own norms, which are RMS norms whatever the target's are.
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        sliding_rule=section.sliding_rule if sliding else "served",
    )


def open_rows(profile: Profile, vocab_size: int) -> ShardReader | RandomRows:
    if profile.data.random_lengths:
        path = Path(profile.data.random_lengths)
        if not path.is_file() and path.name == profile.data.random_lengths:
            path = PEERS / path.name  # a bare name: a shipped file
        try:
            lengths = np.asarray(json.loads(path.read_text())["lengths"])
            if lengths.dtype.kind != "i" or lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
                raise ValueError("the lengths are not positive whole numbers")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'data.random_lengths: cannot read {path}: {error}; it takes a JSON file {{"lengths": [tokens, ...]}}'
            ) from error
        # Random rows have no end that a cut could lose: a longer one is one of max_context.
        clipped = np.minimum(lengths.astype(np.int64), profile.buckets.max_context)
        return RandomRows(clipped, vocab_size, profile.run.seed)
    reader = ShardReader(Path(profile.data.shards))
    check_fingerprint(profile, reader)
    if reader.vocab_size > vocab_size:
        raise DataError(
            f"data.shards: {profile.data.shards} was prepared for {reader.vocab_size} token ids, the target "
            f"{profile.target.model} has {vocab_size}; prepare it for this target"
        )
    return reader


def check_fingerprint(profile: Profile, reader: ShardReader) -> None:
    """Refuse shards of another tokenizer. The tokenizer is read only where the shards name another target.

    Raises:
        DataError: the shards' ids mean something else to this target.
    """
    prepared_for, model = reader.facts["target"], profile.target.model
    if prepared_for == model or model.startswith(RANDOM_PREFIX):
        return
    if Template(load_tokenizer(model)).fingerprint() != reader.fingerprint:
        raise DataError(
            f"data.shards: {profile.data.shards} was prepared for {prepared_for or 'an unnamed target'} with another "
            f"tokenizer or chat template than {model} has; prepare it again with --target {model}"
        )


def flop_model(config: Any, shape: DrafterShape, section: DrafterSection) -> FlopModel:
    from_target = section.labels != "data"  # all layers of the target run, and its logits are computed
    d, c, h, g = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
    kv = shape.num_layers * 2 * d * g * c
    block = kv + shape.num_layers * (2 * d * h * c + 3 * d * shape.intermediate_size)
    return FlopModel(
        target_parameters=matrix_parameters(config, -1 if from_target else max(shape.target_layer_ids)),
        context_parameters=len(shape.target_layer_ids) * d * d + kv,
        block_parameters=block,
        head_parameters=shape.vocab_size * d * (3 if from_target else 2) // 2,
        block_size=shape.block_size,
        reuse=section.reuse,
    )


def matrix_parameters(config: Any, last_layer: int) -> int:
    """Parameters of the target's layers up to `last_layer` (-1: all) that a token's GEMMs read, without memory."""
    layers = decoder_on_meta(config).layers[: last_layer + 1 or None]
    dense = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    experts = sum(p.numel() for name, p in layers.named_parameters() if p.dim() == 3 and ".experts." in name)
    return dense + (experts * config.num_experts_per_tok // num_experts(config) if experts else 0)


def device_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """Predicted bytes per logical device and part. The pool is an estimate; capture measures it."""
    profile, shape = plan.profile, plan.shape
    size = 2 if profile.target.dtype == "bfloat16" else 4
    largest_context = max(b.rows * b.context for b in plan.buckets)
    batch = max(layout.num_bytes for layout in plan.layouts.values()) + largest_context * plan.taps_size * size
    embedding = shape.vocab_size * shape.hidden_size * size
    head = 0 if getattr(plan.target_config, "tie_word_embeddings", False) else embedding
    target_weights = sum(p.numel() for p in decoder_on_meta(plan.target_config).parameters()) * size + head
    parameters = shape.num_parameters
    state = 8 if size == 4 else 12  # moments, and masters where the parameters are not float32
    draft_tokens = max(b.rows * b.anchors * shape.block_size for b in plan.buckets)
    # Kept for the backward: inputs and outputs of both norms, q/k/v before and after rotation, attention, the MLP.
    heads = (3 * shape.num_heads + 4 * shape.num_kv_heads) * shape.head_dim
    kept_per_token = shape.num_layers * (4 * shape.hidden_size + heads + 3 * shape.intermediate_size) * size
    logits = profile.drafter.chunk_slots * shape.vocab_size * size * (2 if plan.rule.labels == "target" else 1)
    # Hidden, MLP and attention activations of one layer; a layer's are freed before the next.
    target_pool = largest_context * (4 * shape.hidden_size + 4 * plan.target_config.intermediate_size) * size
    parts: dict[str, dict[str, int]] = {}
    for t, device in enumerate(profile.placement.targets):
        parts[f"target {t} on {device}"] = {"weights": target_weights, "batch": batch, "pool": target_pool}
    for d, device in enumerate(profile.placement.drafters):
        shared = device in profile.placement.targets
        parts[f"drafter {d} on {device}"] = {
            "weights": parameters * size + (0 if shared else embedding + head),
            "gradients": parameters * 4,
            "states": parameters * state // len(profile.placement.drafters),
            "batch": batch * (profile.placement.look_ahead + 1) if profile.placement.look_ahead else 0,
            "pool": draft_tokens * kept_per_token + logits,
        }
    return parts


def summary(plan: Plan) -> dict[str, Any]:
    """The summary of `draftgraph plan`."""
    placement = plan.profile.placement
    shares = efficiency(plan.lengths, plan.anchors, plan.buckets, plan.flops.row)
    contexts = np.array([b.context for b in plan.buckets])[plan.assignment]
    held = np.array([b.anchors for b in plan.buckets])[plan.assignment]
    target = plan.flops.target(contexts).sum() / len(placement.targets)
    drafter = plan.flops.reuse * plan.flops.drafter(contexts, held).sum() / len(placement.drafters)
    return {
        "buckets": [{"rows": b.rows, "context": b.context, "anchors": b.anchors} for b in plan.buckets],
        "rows_per_bucket": np.bincount(plan.assignment, minlength=len(plan.buckets)).tolist(),
        "rows_without_anchor": plan.rows_without_anchor,
        "padding_efficiency": shares["token_efficiency"],
        "anchor_efficiency": shares["anchor_efficiency"],
        "flop_efficiency": shares["flop_efficiency"],
        "row_efficiency": plan.schedule.row_efficiency,
        "target_flop_share": float(target / (target + drafter)),
        "device_bytes": device_bytes(plan),
        "tokens_per_s": None,  # a prediction needs measured rates; warm-up and training measure
        "split": {"targets": len(placement.targets), "drafters": len(placement.drafters)},
        "bound_by": "target" if target > drafter else "drafter",
    }
