"""A target's and a drafter's lane: which static tensors each captured step reads and writes.

Promises: every tensor named in a step is persistent and outside the graph pool; what a step leaves behind (taps,
gradients, sums, parameters) is written in place; verification inputs depend on the round alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.engine.config import OptimSection
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.models.drafter import Drafter, block_tokens
from draftgraph.engine.models.loss import LossRule, dflash_loss
from draftgraph.engine.models.target import Target
from draftgraph.engine.run.buffers import BatchBuffer, BatchViews
from draftgraph.engine.run.metrics import WEIGHT, as_vector, sums_size
from draftgraph.engine.run.optimizer import FlatParameters, OptimizerShard

# Writes a real micro-batch of verification round n into the views of a bucket: (bucket, n, views).
Filler = Callable[[Bucket, int, BatchViews], None]


class Taps(NamedTuple):
    """What an extraction reads on the host: which layers it taps, and how many hooks its layers have."""

    layers: tuple[int, ...]
    hooks: int


class TargetLane:
    """Extraction of one target: input ids in, taps out, one step per bucket."""

    def __init__(self, name: str, target: Target, batch: BatchBuffer, mode: str, fill: Filler):
        self.target, self.batch = target, batch
        self.lane = Lane(name, target.device, mode)  # type: ignore[arg-type]
        for bucket, views in batch.views.items():
            self.lane.add(self.step(bucket, views, fill))

    def step(self, bucket: Bucket, views: BatchViews, fill: Filler) -> Step:
        def prepare(round_index: int) -> None:
            fill(bucket, round_index, views)
            views.taps.fill_(float("nan"))  # every tap must be written, pads included

        return Step(
            step="target",
            bucket=bucket.name,
            run=lambda: self.target.extract(views.input_ids, views.taps),
            inputs={"input_ids": views.input_ids},
            outputs={"taps": views.taps},
            fill=prepare,
            predicted_bytes=bucket.rows * bucket.context * self.target.config.hidden_size,
            baked=self.taps,
        )

    def taps(self) -> Taps:
        layers = self.target.decoder.layers
        hooks = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers)
        return Taps(self.target.target_layer_ids, hooks)

    def replay(self, bucket: Bucket) -> None:
        self.lane.replay("target", bucket.name)


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter lane is made of, all on its device."""

    drafter: Drafter
    embedding: Tensor  # [V, D], the target's, frozen
    lm_head: Tensor  # [V, D], the target's, frozen
    rule: LossRule
    chunk_slots: int
    optim: OptimSection
    num_steps: int


class DrafterLane:
    """Forward and backward of one drafter per bucket, and its optimizer step.

    Args:
        index, count: this drafter owns slice `index` of `count` of the flat range.
        hosts: that train together.
    """

    def __init__(
        self,
        name: str,
        parts: DrafterParts,
        batch: BatchBuffer,
        device: torch.device,
        mode: str,
        fill: Filler,
        index: int = 0,
        count: int = 1,
        hosts: int = 1,
    ):
        self.parts, self.batch, self.device = parts, batch, device
        self.drafter = parts.drafter
        self.flat = FlatParameters(parts.drafter, parts.embedding.dtype, device)
        self.sums = torch.zeros(sums_size(parts.drafter.shape.block_size), device=device)
        # With one drafter the step's sums are the global ones.
        self.total = self.sums if count == 1 else torch.zeros_like(self.sums)
        # What a step publishes: sums [M], grad norm, rate, skipped.
        self.published = torch.zeros(self.sums.numel() + 3, device=device)
        self.repeat = torch.zeros(1, dtype=torch.int64, device=device)
        low, high = slice_of(self.flat.size, index, count)
        self.optimizer = OptimizerShard(self.flat, low, high, parts.optim, parts.num_steps, self.total, WEIGHT)
        self.lane = Lane(name, device, mode)  # type: ignore[arg-type]
        for bucket, views in batch.views.items():
            self.lane.add(self.bucket_step(bucket, views, fill))
        # With several drafters the norms are exchanged between measuring and updating, outside the graphs.
        if count > 1:
            self.lane.add(self.flat_step("norm", self.optimizer.measure, {"norm": self.optimizer.norm_squared}))
        self.checksums = None  # [D] int64, where there is a drafter to compare with
        self.spans = [slice_of(self.flat.size, i, count) for i in range(count)]
        if count * hosts > 1:
            self.checksums = torch.zeros(count, dtype=torch.int64, device=device)
            self.lane.add(self.flat_step("checksum", self.sum_bits, {"checksums": self.checksums}))
        self.lane.add(self.flat_step("optimizer", self.update if count > 1 else self.measure_and_update, self.state()))

    def state(self) -> dict[str, Tensor]:
        """Everything that an optimizer step writes."""
        return {
            "master": self.optimizer.master,
            "values": self.flat.values,
            "grads": self.flat.grads,
            "sums": self.sums,
            "published": self.published,
            "step_count": self.optimizer.step_count,
            "skipped": self.optimizer.skipped,
            **self.optimizer.state,
        }

    def forward_backward(self, views: BatchViews) -> None:
        """One micro-step: gradients and sums are added to; the anchors are those of the current repeat."""
        # What a target writes for pads may be anything; a zero gradient times a NaN would poison fc's gradient.
        positions = torch.arange(views.taps.shape[1], device=self.device)
        views.taps.masked_fill_((positions >= views.lengths[:, None])[..., None], 0.0)
        anchor_positions = views.anchor_positions.index_select(0, self.repeat)[0]
        anchor_valid = views.anchor_valid.index_select(0, self.repeat)[0]
        tokens, _ = block_tokens(views.input_ids, anchor_positions, self.drafter.shape.block_size)
        tokens[..., 1:] = self.drafter.shape.mask_token_id
        embeddings = F.embedding(tokens, self.parts.embedding)
        taps, final = views.taps, None
        if self.parts.rule.labels != "data":
            size = self.parts.embedding.shape[1]
            taps, final = taps[..., :-size], taps[..., -size:]
        hidden = self.drafter(taps, embeddings, anchor_positions, anchor_valid)
        sums = dflash_loss(
            hidden,
            self.parts.lm_head,
            views.input_ids,
            views.loss_mask,
            anchor_positions,
            anchor_valid,
            self.parts.rule,
            self.parts.chunk_slots,
            final,
        )
        sums.loss.backward()
        self.sums.add_(as_vector(sums))
        # Inside the graph, so that a repeat costs no host call beyond its replay.
        self.repeat.add_(1).remainder_(views.anchor_positions.shape[0])

    def measure_and_update(self) -> None:
        self.optimizer.measure()
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Update the owned slice, publish the step's sums, and zero what accumulates."""
        self.optimizer.update()
        scalars = [self.optimizer.grad_norm, self.optimizer.lr, self.optimizer.skipped]
        self.published.copy_(torch.cat([self.total, torch.stack(scalars)]))
        self.sums.zero_()

    @torch.no_grad()
    def sum_bits(self) -> None:
        """One integer per owned slice of the parameters; drafters whose bits agree have the same."""
        bits = self.flat.values.view(torch.int16 if self.flat.values.itemsize == 2 else torch.int32)
        assert self.checksums is not None
        for index, (low, high) in enumerate(self.spans):
            self.checksums[index].copy_(bits[low:high].sum(dtype=torch.int64))

    def replay(self, bucket: Bucket) -> None:
        self.lane.replay("drafter", bucket.name)

    def bucket_step(self, bucket: Bucket, views: BatchViews, fill: Filler) -> Step:
        shape = self.drafter.shape

        def prepare(round_index: int) -> None:
            fill(bucket, round_index, views)
            random_fill(views.taps, round_index)
            self.random_weights(round_index)
            self.clear()

        draft_tokens = bucket.rows * bucket.anchors * shape.block_size
        per_draft_token = shape.num_layers * (shape.hidden_size * 12 + shape.intermediate_size * 4)
        per_context_token = shape.num_layers * shape.num_kv_heads * shape.head_dim * 8 + shape.hidden_size * 4
        return Step(
            step="drafter",
            bucket=bucket.name,
            run=lambda: self.forward_backward(views),
            inputs={
                **views.inputs(),
                "values": self.flat.values,
                "embedding": self.parts.embedding,
                "lm_head": self.parts.lm_head,
            },
            outputs={"grads": self.flat.grads, "sums": self.sums, "repeat": self.repeat},
            fill=prepare,
            predicted_bytes=draft_tokens * per_draft_token + bucket.rows * bucket.context * per_context_token,
        )

    def flat_step(self, name: str, run: Callable[[], None], outputs: Mapping[str, Tensor]) -> Step:
        def prepare(round_index: int) -> None:
            self.random_weights(round_index)
            self.optimizer.reset()
            random_fill(self.flat.grads, round_index)
            self.total.fill_(100.0 + round_index)
            self.optimizer.norm_squared.fill_(4.0 + round_index)

        inputs = {
            "values": self.flat.values,
            "grads": self.flat.grads,
            "total": self.total,
            "norm_squared": self.optimizer.norm_squared,
        }
        return Step(name, "", run, inputs, outputs, prepare, predicted_bytes=0)

    def clear(self) -> None:
        """Zero what micro-steps add to."""
        for tensor in (self.flat.grads, self.sums, self.repeat):
            tensor.zero_()

    def random_weights(self, round_index: int) -> None:
        random_fill(self.flat.values, round_index, std=0.05)

    def initialise(self, weights: Callable[[Drafter], None]) -> None:
        """The state before step 1, of the weights that are written: what verification left behind is overwritten."""
        weights(self.drafter)
        self.optimizer.reset()
        self.clear()
        self.total.zero_()
        self.published.zero_()


def random_fill(tensor: Tensor, seed: int, std: float = 1.0) -> None:
    """Normal noise from a generator of the tensor's device: the same bits for the same seed."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    with torch.no_grad():
        tensor.normal_(0.0, std, generator=generator)


def slice_of(size: int, index: int, count: int) -> tuple[int, int]:
    """The part of a flat range that drafter `index` of `count` owns, on 64-element borders."""
    share = -(-size // count)
    share = -(-share // 64) * 64
    return min(index * share, size), min((index + 1) * share, size)
