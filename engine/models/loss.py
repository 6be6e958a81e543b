"""The DFlash loss: linear cross-entropy over draft slots, chunked, with gradients formed in the forward pass; or the
divergence from the target's own distributions.

Promises: one workspace of `chunk_slots` rows of logits for all chunks (two for the divergence); the sum of weighted
losses and the sum of what divides it, never their ratio (the optimizer divides once, globally); fixed shapes; no host
syncs. The lm_head is frozen: no gradient to it is formed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftgraph.engine.models.drafter import block_tokens
from draftgraph.kernels import cross_entropy as cross_entropy_kernels
from draftgraph.kernels import reference


@dataclass(frozen=True)
class LossRule:
    """Which slots count how much.

    kind "decay": weight exp(-(k-1)/gamma), gamma 0 = no decay.
    kind "dpace" (arXiv 2605.18810): weights from the drafter's own probabilities, `alpha` their floor.
    labels: what slot k of anchor a is compared with. "data": the token at a + k. From the target's own distribution at
    a + k - 1, given the data up to there: "argmax": its best token; "target": all of it, by the divergence KL(target ||
    drafter), whose weights cannot be D-PACE's.
    norm: what the sum is divided by. "weights": their sum; "slots": the number of slots that count; "rows": rows with a
    valid block; "auto": "weights" for decay, "rows" for D-PACE.
    """

    kind: str = "decay"
    gamma: float = 0.0
    alpha: float = 0.5
    labels: str = "data"
    norm: str = "auto"

    @property
    def divides_by(self) -> str:
        return self.norm if self.norm != "auto" else {"decay": "weights", "dpace": "rows"}[self.kind]


@dataclass(frozen=True)
class SlotTargets:
    """Labels and weights of the K-1 predicted slots of every block, gathered from the row."""

    labels: Tensor  # [R, A, K-1] int64
    counted: Tensor  # [R, A, K-1] bool: a valid block, a + k < S, and the token is supervised


def slot_targets(
    input_ids: Tensor, loss_mask: Tensor, anchor_positions: Tensor, anchor_valid: Tensor, block_size: int
) -> SlotTargets:
    """Slot k >= 1 of the block of anchor a predicts the token AT a + k; slot 0 is the anchor itself and has no loss."""
    labels, positions = block_tokens(input_ids, anchor_positions, block_size)
    supervised, _ = block_tokens(loss_mask.long(), anchor_positions, block_size)
    counted = anchor_valid[..., None] & (positions < input_ids.shape[1]) & (supervised > 0)
    return SlotTargets(labels[..., 1:], counted[..., 1:])


def slot_weights(counted: Tensor, cross_entropy: Tensor | None, rule: LossRule) -> Tensor:
    """Detached weights of the slots, [..., K-1] float32, from whole blocks. Only D-PACE reads the cross-entropy."""
    mask = counted.float()
    if rule.kind == "dpace":
        assert cross_entropy is not None
        confidence = (1 - rule.alpha) * torch.exp(-cross_entropy) + rule.alpha
        survival = torch.where(counted, confidence, 1.0).cumprod(-1)
        return mask * (survival * mask).flip(-1).cumsum(-1).flip(-1)
    if rule.gamma == 0:
        return mask
    k = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
    return mask * torch.exp(-k / rule.gamma)


@dataclass(frozen=True)
class TargetStates:
    """Where the target's own distributions come from: its last hidden states, after its final norm."""

    rows: Tensor  # [R*S, D], rows may lie apart
    index: Tensor  # [B, K-1] int64: row of the state that predicts each slot


class _LinearLoss(torch.autograd.Function):
    """sum(w * loss) with the gradient to the hidden states formed chunk by chunk in the forward pass.

    NOTE: hidden [B, K, D] comes with slot 0, whose gradient is written as zero: autograd would pad that of a slice, at
    the price of two passes.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, labels, counted, rule, blocks_per_chunk, target):
        num_blocks, block_size, _ = hidden.shape
        grad = torch.empty_like(hidden)
        grad[:, 0] = 0.0
        cross_entropy = torch.empty(counted.shape, dtype=torch.float32, device=hidden.device)
        correct = torch.empty_like(counted)
        # D-PACE weighs a slot by the statistics of its whole block, which come with the logits.
        known = rule.kind != "dpace"
        weights = slot_weights(counted, None, rule) if known else torch.empty_like(cross_entropy)
        ops = cross_entropy_kernels if hidden.is_cuda else reference
        slots = min(blocks_per_chunk, num_blocks) * (block_size - 1)
        logits, states = hidden.new_empty(slots, len(lm_head)), hidden.new_empty(slots, hidden.shape[-1])
        # Of the target's distribution, its best token is read before the drafter's logits take the workspace.
        target_logits = torch.empty_like(logits) if rule.labels == "target" else logits
        for start in range(0, num_blocks, blocks_per_chunk):
            part = slice(start, min(start + blocks_per_chunk, num_blocks))
            label = labels[part].flatten()
            rows, state = logits[: len(label)], states[: len(label)]
            if target is not None:
                others = target_logits[: len(label)]
                torch.index_select(target.rows, 0, target.index[part].flatten(), out=state)
                torch.mm(state, lm_head.T, out=others)
                if rule.labels == "argmax":
                    label = others.argmax(-1)
            blocks = state.view_as(hidden[part, 1:])
            blocks.copy_(hidden[part, 1:])
            torch.mm(state, lm_head.T, out=rows)
            if rule.labels == "target":
                ce, best, label = ops.divergence_gradient_(rows, others, weights[part].flatten())
                cross_entropy[part] = ce.view_as(cross_entropy[part])
            elif known:
                ce, best = ops.cross_entropy_gradient_(rows, label, weights[part].flatten())
                cross_entropy[part] = ce.view_as(cross_entropy[part])
            else:
                ce, log_sum, best = ops.softmax_statistics(rows, label)
                cross_entropy[part] = ce.view_as(cross_entropy[part])
                weights[part] = slot_weights(counted[part], cross_entropy[part], rule)
                ops.softmax_gradient_(rows, label, log_sum, weights[part].flatten())
            correct[part] = (best == label).view_as(correct[part])
            # The states have been read: their gradient takes their place.
            torch.mm(rows, lm_head, out=state)
            grad[part, 1:] = blocks
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(weights, correct)
        return torch.where(counted, weights * cross_entropy, 0.0).sum(), weights, correct

    @staticmethod
    def backward(ctx, grad_loss, _weights, _correct):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None, None


@dataclass(frozen=True)
class LossSums:
    """Sums over one micro-step; every figure a user sees is a ratio of sums of these."""

    loss: Tensor  # 0-D float32, carries the gradient
    weight: Tensor  # 0-D float32, what the loss is divided by, globally
    correct_per_slot: Tensor  # [K-1] float32
    counted_per_slot: Tensor  # [K-1] float32
    accepted: Tensor  # 0-D float32: sum over valid blocks of 1 + the leading run of matches (the 1: the bonus token)
    blocks: Tensor  # 0-D float32: valid blocks


def dflash_loss(
    hidden: Tensor,
    lm_head: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    anchor_positions: Tensor,
    anchor_valid: Tensor,
    rule: LossRule,
    chunk_slots: int,
    target_states: Tensor | None = None,
) -> LossSums:
    """The loss of one micro-step.

    Args:
        hidden: [R, A, K, D], the drafter's output.
        lm_head: [V, D], the target's, frozen, same dtype as hidden.
        input_ids: [R, S] int64; loss_mask: [R, S] bool or uint8.
        anchor_positions: [R, A] int32; anchor_valid: [R, A] bool.
        chunk_slots: rows of logits held at once (twice for the divergence); whole blocks are taken, at least one.
        target_states: [R, S, D], the target's last hidden states after its final norm, for labels that come from there.
    Source: DFlash paper, training loss; D-PACE (arXiv 2605.18810) for rule.kind "dpace".
    """
    block_size = hidden.shape[2]
    targets = slot_targets(input_ids, loss_mask, anchor_positions, anchor_valid, block_size)
    counted = targets.counted.flatten(0, 1)
    own = None
    if rule.labels != "data":
        assert target_states is not None
        num_rows, num_context, _ = target_states.shape
        # The state at a + k - 1 predicts slot k.
        before = anchor_positions.long()[..., None] + torch.arange(block_size - 1, device=hidden.device)
        first = num_context * torch.arange(num_rows, device=hidden.device).view(-1, 1, 1)
        own = TargetStates(target_states.flatten(0, 1), (first + before.clamp(max=num_context - 1)).flatten(0, 1))
    loss, weights, correct = _LinearLoss.apply(
        hidden.flatten(0, 1),
        lm_head,
        targets.labels.flatten(0, 1),
        counted,
        rule,
        max(1, chunk_slots // (block_size - 1)),
        own,
    )
    matches = (correct & counted).float()
    blocks = anchor_valid.sum(dtype=torch.float32)
    divisors = {
        "weights": weights,
        "slots": counted,
        # A row counts where it holds a valid block: pad rows of a bucket do not dilute the mean.
        "rows": anchor_valid.any(-1),
    }
    weight = divisors[rule.divides_by].sum(dtype=torch.float32)
    return LossSums(
        loss=loss,
        weight=weight,
        correct_per_slot=matches.sum(0),
        counted_per_slot=counted.sum(0, dtype=torch.float32),
        accepted=blocks + matches.cumprod(-1).sum(),
        blocks=blocks,
    )
