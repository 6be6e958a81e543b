"""Which drafts a target keeps, and what it says next: greedy, or sampled so that the target's distribution is kept.

Promises: fixed shapes, no wait for the device, no generator: randomness comes in as uniform numbers.
Source of the sampled rule: speculative sampling (arXiv 2211.17192): accept with probability min(1, p / q), else draw
from what p has more than q.
"""

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, -1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index of each [..., V] row of weights, which need not sum to 1, by a number [...] from [0, 1)."""
    reached = weights.cumsum(-1)
    index = (reached <= uniform[..., None] * reached[..., -1:]).sum(-1)
    # Rounding must not lead to a token of no weight behind the last one that has some.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return index.minimum(last)


def verify_greedily(block: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Args: block [R, n], the newest token and n-1 drafts; logits [R, n, V], the target's.

    Returns:
        tokens [R, n], what the target says at every slot; num_accepted [R]: so many of them are drafts, and the token
        that follows those is right as well.
    """
    said = logits.argmax(-1)
    return said, (said[:, :-1] == block[:, 1:]).long().cumprod(1).sum(1)


def verify_sampled(
    block: Tensor, logits: Tensor, drafted: Tensor, uniform: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `verify_greedily`, for drafts that were drawn from `drafted` [R, n-1, V] probabilities.

    Args:
        uniform: [R, n], used nowhere else.
    """
    p, drafts = probabilities(logits, temperature), block[:, 1:]
    likely = [x.gather(-1, drafts[..., None])[..., 0] for x in (p[:, :-1], drafted)]
    accepted = (uniform[:, :-1] * likely[1] < likely[0]).long().cumprod(1).sum(1)
    # Nothing was drafted behind the last slot: there p itself is left.
    left = torch.cat([(p[:, :-1] - drafted).clamp(min=0), p[:, -1:]], 1)
    left, own = (x.gather(1, accepted[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0] for x in (left, p))
    # And where p and q agree but for rounding, which may have taken all that p has more.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, own)
    following = draw(left, uniform[:, -1])
    tokens = torch.cat([drafts, following[:, None]], 1)
    return tokens.scatter(1, accepted[:, None], following[:, None]), accepted
