"""From a profile to everything that is decided before a device is touched: shapes, rows, buckets, layouts.

Promises: needs no GPU and no weights. What it will take and cost is predicted in `predict/`.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.engine.config import Profile
from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket, assign, choose_buckets
from draftgraph.engine.data.collate import SlotLayout
from draftgraph.engine.data.schedule import ORDER, Schedule
from draftgraph.engine.data.shards import RandomRows, Selected, ShardReader
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.drafter import DrafterShape, default_target_layer_ids
from draftgraph.engine.models.layers import unsupported
from draftgraph.engine.models.loss import LossRule
from draftgraph.engine.models.target import EMBEDDED, RANDOM_PREFIX, decoder_on_meta, load_config, load_tokenizer
from draftgraph.engine.models.weights import weight_bytes
from draftgraph.engine.predict.flops import FlopModel, flop_model
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
    flops: FlopModel
    host: int = 0
    hosts: int = 1

    @cached_property
    def layouts(self) -> dict[Bucket, SlotLayout]:
        return {b: SlotLayout(b, self.profile.drafter.reuse) for b in self.buckets}

    @property
    def draw(self) -> AnchorDraw:
        section = self.profile.drafter
        return AnchorDraw(self.profile.run.seed, section.anchors, self.shape.block_size, section.anchor_rule)

    @cached_property
    def schedule(self) -> Schedule:
        """Drafters take micro-batches in turn: those that they work on side by side, on all hosts, cost the same."""
        group = len(self.profile.placement.drafters) * self.hosts
        return Schedule(self.assignment, self.buckets, self.profile.run.seed, group, self.host, self.hosts)

    @cached_property
    def target_bytes(self) -> int:
        """Bytes of the target's weights on a device."""
        decoder, precision = decoder_on_meta(self.target_config), self.profile.target.precision
        return weight_bytes(decoder, self.last_layer, self.element_size, precision)

    @property
    def element_size(self) -> int:
        """Bytes of a number of the target, of the drafter's arithmetic and of what passes between them."""
        return 2 if self.profile.target.dtype == "bfloat16" else 4

    @property
    def whole_target(self) -> bool:
        """Whether more than the target's taps is needed: where the run decodes, or takes labels from the target."""
        return self.profile.eval.every > 0 or self.rule.labels != "data"

    @property
    def last_layer(self) -> int:
        """The last of the target's layers that is loaded."""
        return self.target_config.num_hidden_layers - 1 if self.whole_target else max(self.shape.target_layer_ids)

    @property
    def accumulate(self) -> int:
        """Micro-steps of this host in a step."""
        return self.profile.optim.accumulate // self.hosts

    @property
    def padding_efficiency(self) -> float:
        """Real context tokens over padded ones."""
        contexts = np.array([b.context for b in self.buckets])[self.assignment]
        return float(self.lengths.sum() / contexts.sum())

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that resumes from it."""
        placement, optim = self.profile.placement, dataclasses.asdict(self.profile.optim)
        del optim["max_skipped"], optim["on_not_finite"]  # when to give up, and how
        made_of = {
            "seed": self.profile.run.seed,
            "steps": self.profile.run.steps,
            "target": dataclasses.asdict(self.profile.target),
            "tokenizer": self.rows.fingerprint,
            "data": self.rows.digest,
            "reuse": self.profile.drafter.reuse,
            "chunk_slots": self.profile.drafter.chunk_slots,
            "placement": {
                "targets": len(placement.targets),
                "drafters": len(placement.drafters),
                "hosts": self.hosts,
            },
            "order": ORDER,
            "draw": dataclasses.asdict(self.draw),
            "buckets": [b.name for b in self.buckets],
            "loss": dataclasses.asdict(self.rule),
            "optim": optim,
            "drafter": dataclasses.asdict(self.shape),
        }
        return json.loads(json.dumps(made_of))  # as a checkpoint gives it back: lists for tuples

    @property
    def graphs_made_of(self) -> dict[str, Any]:
        """What the time of a graph of a bucket depends on, beside the device: a warm-up's evidence says it."""
        profile, kinds = self.profile, lambda names: sorted({name.partition(":")[0] for name in names})
        made_of = {
            "target": dataclasses.asdict(profile.target),
            "drafter": dataclasses.asdict(self.shape)
            | {"chunk_slots": profile.drafter.chunk_slots, "recompute": profile.drafter.recompute},
            "loss": {"kind": self.rule.kind, "labels": self.rule.labels},
            "capture": {"mode": profile.capture.mode},
            "placement": {"targets": kinds(profile.placement.targets), "drafters": kinds(profile.placement.drafters)},
        }
        return json.loads(json.dumps(made_of))  # as a file gives it back: lists for tuples

    @property
    def taps_size(self) -> int:
        return (len(self.shape.target_layer_ids) + (self.rule.labels != "data")) * self.shape.hidden_size


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
        if not section.target_layer_ids:
            raise UsageError(f"profile: drafter.taps ({section.taps}) is too many for a target of {num_layers} layers")
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
