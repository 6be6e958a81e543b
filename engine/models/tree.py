"""DDTree: a tree of drafts from the per-slot distributions of one drafter pass, and the walk of the target through it.

The drafter's slots are independent given the context, so a path's probability is the product of its tokens' own. The
tree is the `budget` likeliest paths; a path's beginning is never less likely than the path, so they form a tree.
Promises: fixed shapes, no wait, all of it on the device; lossless, since a path is accepted only where the target says
it. Node 0 is the newest token; parents come before their children.
Source: DDTree (arXiv 2604.12989), best-first search under a node budget, here slot by slot with the same result: the
`budget` likeliest paths of each length hold the `budget` likeliest of all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """[R, N] int64 each, N = 1 + budget."""

    tokens: Tensor
    parents: Tensor  # node 0 is its own
    depths: Tensor

    def named(self) -> dict[str, Tensor]:
        return {"tree tokens": self.tokens, "tree parents": self.parents, "tree depths": self.depths}

    def copy_(self, other: "Tree") -> None:
        for ours, theirs in zip(self.named().values(), other.named().values(), strict=True):
            ours.copy_(theirs)


def likeliest_tree(newest: Tensor, logits: Tensor, budget: int) -> Tree:
    """The tree below newest [R] from logits [R, K-1, V] of slot 1 and on; `budget` is less than V * (K-1)."""
    num_rows, num_slots, vocab = logits.shape
    width = min(budget, vocab)
    # In float64, where a longer path is less likely than its beginning even if its last token is certain.
    scores, tokens = torch.log_softmax(logits.float(), -1).topk(width, -1)
    scores = scores.double() - 1e-9
    path = scores.new_zeros(num_rows, 1)
    level_scores, level_tokens, level_parents = [], [], []
    for slot in range(num_slots):
        longer = (path[..., None] + scores[:, slot, None]).flatten(1)
        path, index = longer.topk(min(budget, longer.shape[1]), -1)
        level_scores.append(path)
        level_tokens.append(tokens[:, slot].gather(1, index % width))
        level_parents.append(index // width)
    sizes = [level.shape[1] for level in level_scores]
    chosen = torch.zeros(num_rows, sum(sizes), dtype=torch.bool, device=logits.device)
    chosen.scatter_(1, torch.cat(level_scores, 1).topk(budget, -1)[1], True)
    # The number of each path among the chosen, counting from 1, level after level.
    number = chosen.long().cumsum(1)
    parents, depths, begin = [], [], 0
    for slot, (size, parent) in enumerate(zip(sizes, level_parents, strict=True)):
        above = number[:, begin - sizes[slot - 1] : begin].gather(1, parent) if slot else torch.zeros_like(parent)
        parents.append(above)
        depths.append(torch.full_like(parent, slot + 1))
        begin += size
    # Where the chosen lie, in order; all others write to a place that is left out.
    place = torch.where(chosen, number - 1, budget)
    order = torch.zeros_like(number[:, :1]).repeat(1, budget + 1)
    order = order.scatter_(1, place, torch.arange(begin, device=logits.device).expand_as(place))[:, :budget]

    def nodes(root: Tensor, levels: list[Tensor]) -> Tensor:
        return torch.cat([root[:, None], torch.cat(levels, 1).gather(1, order)], 1)

    none = torch.zeros_like(newest)
    return Tree(nodes(newest, level_tokens), nodes(none, parents), nodes(none, depths))


def ancestors(tree: Tree, block_size: int) -> Tensor:
    """[R, N, N] bool: is node j on the path of node i, i itself included."""
    num_nodes = tree.parents.shape[1]
    seen = torch.eye(num_nodes, dtype=torch.bool, device=tree.parents.device).expand(len(tree.parents), -1, -1)
    index = tree.parents[..., None].expand(-1, -1, num_nodes)
    for _ in range(block_size - 1):
        seen = seen | seen.gather(1, index)
    return seen


def walk(tree: Tree, said: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Follow what the target says [R, N] after each node, from the newest token down.

    Returns:
        path [R, K], the nodes, from node 0; num_accepted [R]: so many of those below it are real.
    """
    node = torch.zeros_like(tree.tokens[:, :1])
    alive = torch.ones_like(node, dtype=torch.bool)
    path, num_accepted = [node], torch.zeros_like(node[:, 0])
    own = torch.arange(tree.tokens.shape[1], device=node.device)
    for _ in range(block_size - 1):
        right = (tree.parents == node) & (tree.tokens == said.gather(1, node)) & (own > 0)
        alive = alive & right.any(1, keepdim=True)
        node = torch.where(alive, right.long().argmax(1, keepdim=True), node)
        num_accepted = num_accepted + alive[:, 0]
        path.append(node)
    return torch.cat(path, 1), num_accepted
