"""The DFlash loss: linear cross-entropy over draft slots, chunked, with gradients formed in the forward pass.

Promises: one workspace of `chunk_slots` rows of logits for all chunks; the sum of weighted losses and the sum of
weights, never their ratio (the optimizer divides once, by the global weight); fixed shapes; no host syncs.
The lm_head is frozen: no gradient to it is formed.
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

    kind "decay": weight exp(-(k-1)/gamma), gamma 0 = no decay; the sum is divided by the sum of weights.
    kind "dpace" (arXiv 2605.18810): weights from the drafter's own probabilities, `alpha` their floor; the sum is
    divided by the number of rows.
    """

    kind: str = "decay"
    gamma: float = 0.0
    alpha: float = 0.5


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


class _LinearCrossEntropy(torch.autograd.Function):
    """sum(w * ce) with the gradient to the hidden states formed chunk by chunk in the forward pass.

    NOTE: hidden [B, K, D] comes with slot 0, whose gradient is written as zero: autograd would pad that of a slice, at
    the price of two passes.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, labels, counted, rule, blocks_per_chunk):
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
        for start in range(0, num_blocks, blocks_per_chunk):
            part = slice(start, min(start + blocks_per_chunk, num_blocks))
            label = labels[part].flatten()
            rows, state = logits[: len(label)], states[: len(label)]
            blocks = state.view_as(hidden[part, 1:])
            blocks.copy_(hidden[part, 1:])
            torch.mm(state, lm_head.T, out=rows)
            if known:
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
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None


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
) -> LossSums:
    """The loss of one micro-step.

    Args:
        hidden: [R, A, K, D], the drafter's output.
        lm_head: [V, D], the target's, frozen, same dtype as hidden.
        input_ids: [R, S] int64; loss_mask: [R, S] bool or uint8.
        anchor_positions: [R, A] int32; anchor_valid: [R, A] bool.
        chunk_slots: rows of logits held at once; whole blocks are taken, at least one.
    Source: DFlash paper, training loss; D-PACE (arXiv 2605.18810) for rule.kind "dpace".
    """
    block_size = hidden.shape[2]
    targets = slot_targets(input_ids, loss_mask, anchor_positions, anchor_valid, block_size)
    counted = targets.counted.flatten(0, 1)
    loss, weights, correct = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1),
        lm_head,
        targets.labels.flatten(0, 1),
        counted,
        rule,
        max(1, chunk_slots // (block_size - 1)),
    )
    matches = (correct & counted).float()
    blocks = anchor_valid.sum(dtype=torch.float32)
    # D-PACE divides by rows; a row counts where it holds a valid block: pad rows of a bucket do not dilute the mean.
    weight = anchor_valid.any(-1).sum(dtype=torch.float32) if rule.kind == "dpace" else weights.sum()
    return LossSums(
        loss=loss,
        weight=weight,
        correct_per_slot=matches.sum(0),
        counted_per_slot=counted.sum(0, dtype=torch.float32),
        accepted=blocks + matches.cumprod(-1).sum(),
        blocks=blocks,
    )
