"""A decoding lane that drafts trees as well: `draft tree`, and `verify tree` in one forward of the target.

A tree's nodes lie in the cache side by side behind the row's position, each seen by its descendants alone; keys and
values of the accepted path are then moved to the slots of their positions. For targets of attention alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget, SlotCache
from draftgraph.engine.models.tree import Tree, ancestors, likeliest_tree, walk
from draftgraph.engine.run.decoding import DecodeLane


def require_no_states(target: CachedTarget) -> None:
    """Raises: UsageError: a layer's recurrent state would have to be in all branches at once."""
    if target.recurrent:
        raise UsageError(
            f"--tree needs a target of attention alone: {target.config.model_type!r} has {len(target.recurrent)} gated "
            "delta layers, whose recurrent state has no branches; evaluate it without --tree"
        )


class TreeLane(DecodeLane):
    """Args: budget: nodes of a tree below the newest token; the caches have as many slots more than a row needs.

    Raises:
        UsageError: the target has recurrent states.
    """

    def __init__(
        self, budget: int, name: str, target: CachedTarget, drafter: CachedDrafter, stops: Sequence[int], mode: str
    ):
        require_no_states(target)
        self.budget = budget
        shape = (target.num_rows, 1 + budget)
        self.tree = Tree(*(torch.zeros(shape, dtype=torch.int64, device=target.device) for _ in range(3)))
        super().__init__(name, target, drafter, stops, mode)
        self.room += budget
        self.lane.add(self.step("draft tree", self.draft_tree, 0, self.block_size - 1))
        self.lane.add(self.step("verify tree", self.verify_tree, 1 + budget, 1 + budget))

    @torch.no_grad()
    def draft_tree(self) -> None:
        newest, start = self.newest()
        self.tree.copy_(likeliest_tree(newest, self.drafter.logits(newest, start), self.budget))

    @torch.no_grad()
    def verify_tree(self) -> None:
        newest, start = self.newest()
        tree, nodes = self.tree, torch.arange(1 + self.budget, device=start.device)
        tree.tokens[:, 0] = newest
        positions, slots = start[:, None] + tree.depths, start[:, None] + nodes
        seen, at = self.visible(start, positions)
        hidden, taps = self.target.forward(tree.tokens, positions, slots, seen, at)
        said = self.target.logits(hidden).argmax(-1)
        path, accepted = walk(tree, said, self.block_size)
        num = self.settle(said.gather(1, path), accepted)
        behind = start[:, None] + torch.arange(self.block_size, device=start.device)
        for cache in self.target.caches:
            assert isinstance(cache, SlotCache)
            cache.move(start[:, None] + path, behind)
        self.drafter.append(taps.gather(1, path[..., None].expand(-1, -1, taps.shape[-1])), behind)
        self.emit(said.gather(1, path), num)

    def visible(self, start: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots a node sees, [R, N, slots]: those before the tree, and its own path; positions of slots."""
        node = self.target.slots - start[:, None]
        inside = (node >= 0) & (node <= self.budget)
        node = node.clamp(0, self.budget)
        path = ancestors(self.tree, self.block_size).gather(2, node[:, None].expand(-1, 1 + self.budget, -1))
        before = (self.target.slots < start[:, None])[:, None]
        return before | (path & inside[:, None]), torch.where(inside, positions.gather(1, node), self.target.slots)

    def drafts(self, step: str) -> str:
        return "draft tree" if step == "verify tree" else super().drafts(step)

    def written(self) -> dict[str, Tensor]:
        return {**super().written(), **self.tree.named()}

    def fill(self, number: int) -> None:
        super().fill(number)
        generator = torch.Generator().manual_seed(number)
        size: Any = self.tree.tokens.shape
        self.tree.tokens.copy_(torch.randint(self.target.config.vocab_size, size, generator=generator))
        # A star: every node below the newest token.
        self.tree.parents.zero_()
        self.tree.depths.fill_(1)
        self.tree.depths[:, 0] = 0
