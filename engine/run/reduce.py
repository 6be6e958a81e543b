"""Gradient reduction over D drafters: each owns 1/D of the flat range, whatever devices they are on.

Promises: the owner of a slice holds the sum of all drafters' gradients for it, added in drafter order (deterministic);
every drafter ends a step with bit-equal parameters. Copies stay outside the graphs. With one drafter nothing is done.
NOTE: a copy between devices runs on the source's default stream and waits for the destination's current one, which has
waited for every drafter in `meet`: so its source is complete too.
"""

from collections.abc import Sequence

import torch

from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.streams import Event, on, phase


class Reduction:
    """Owns: one inbox per drafter, as large as its slice, and one row of exchanged scalars per drafter."""

    def __init__(self, drafters: Sequence[DrafterLane]):
        self.drafters = drafters
        if len(drafters) == 1:
            return
        self.inboxes = [torch.empty_like(d.optimizer.master) for d in drafters]
        self.sums = [torch.zeros(len(drafters), d.sums.numel(), device=d.device) for d in drafters]
        self.norms = [torch.zeros(len(drafters), 1, device=d.device) for d in drafters]
        self.points = [Event(d.device) for d in drafters]

    def meet(self) -> None:
        """Work that any drafter issues from here on waits for all that every drafter has issued so far."""
        for drafter, point in zip(self.drafters, self.points, strict=True):
            with phase(drafter.lane, "reduce"):
                point.record(drafter.lane.stream)
        for drafter in self.drafters:
            with phase(drafter.lane, "reduce"):
                for point in self.points:
                    point.hold(drafter.lane.stream)

    def step(self) -> None:
        """One optimizer step over all drafters."""
        if len(self.drafters) == 1:
            self.optimize(self.drafters[0])
            return
        self.meet()
        for i, owner in enumerate(self.drafters):
            with phase(owner.lane, "reduce"), on(owner.lane.stream):
                self.gather(i, owner)
        self.meet()
        for i, drafter in enumerate(self.drafters):
            with phase(drafter.lane, "reduce"), on(drafter.lane.stream):
                for j, other in enumerate(self.drafters):
                    self.norms[i][j].copy_(other.optimizer.norm_squared, non_blocking=True)
            # NOTE: written only after every drafter has read its peers' own norms.
        self.meet()
        for norms, drafter in zip(self.norms, self.drafters, strict=True):
            with phase(drafter.lane, "reduce"), on(drafter.lane.stream):
                torch.sum(norms, 0, out=drafter.optimizer.norm_squared)
            self.optimize(drafter)
        self.meet()
        for drafter in self.drafters:
            with phase(drafter.lane, "reduce"), on(drafter.lane.stream):
                for owner in self.drafters:
                    if owner is not drafter:
                        low, high = owner.optimizer.low, owner.optimizer.high
                        drafter.flat.values[low:high].copy_(owner.flat.values[low:high], non_blocking=True)
        self.meet()

    def optimize(self, drafter: DrafterLane) -> None:
        with phase(drafter.lane, "optimizer"):
            drafter.lane.replay("optimizer")

    def gather(self, index: int, owner: DrafterLane) -> None:
        """Sum the peers' gradients of the owner's slice, and everybody's sums; then measure the slice."""
        low, high = owner.optimizer.low, owner.optimizer.high
        for j, other in enumerate(self.drafters):
            self.sums[index][j].copy_(other.sums, non_blocking=True)
            if other is not owner:
                self.inboxes[index].copy_(other.flat.grads[low:high], non_blocking=True)
                owner.flat.grads[low:high].add_(self.inboxes[index])
        torch.sum(self.sums[index], 0, out=owner.total)
        owner.lane.replay("norm")
