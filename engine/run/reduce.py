"""Gradient reduction over D drafters: each owns 1/D of the flat range, whatever devices they are on.

Promises: the owner of a slice holds the sum of all drafters' gradients for it, added in drafter order (deterministic),
then over hosts; every drafter ends a step with bit-equal parameters (run/equality.py checks). Copies and collectives
stay outside the graphs. With one drafter on one host nothing is done.
NOTE: a copy between devices runs on the source's default stream and waits for the destination's current one, which has
waited for every drafter in `meet`: so its source is complete too.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.engine.run.idle import HOST, REDUCTION, WORK
from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.streams import Event, on, phase

Mark = Callable[[Lane, str], None]


class Across(Protocol):
    """The same slice on other hosts."""

    def sum(self, owner: int, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of owner `owner` in place, over the hosts, on the current stream."""


class Reduction:
    """Owns: one inbox per drafter, as large as its slice, and one row of exchanged scalars per drafter.

    Args:
        across: where there are several hosts.
    """

    def __init__(self, drafters: Sequence[DrafterLane], across: Across | None = None):
        self.drafters, self.across = drafters, across
        self.points = [Event(d.device) for d in drafters]
        if len(drafters) > 1:
            self.take_buffers()

    def take_buffers(self) -> None:
        drafters = self.drafters
        self.inboxes = [torch.empty_like(d.optimizer.master) for d in drafters]
        self.sums = [torch.zeros(len(drafters), d.sums.numel(), device=d.device) for d in drafters]
        self.norms = [torch.zeros(len(drafters), 1, device=d.device) for d in drafters]

    def meet(self) -> None:
        """Work that any drafter issues from here on waits for all that every drafter has issued so far."""
        for drafter, point in zip(self.drafters, self.points, strict=True):
            with phase(drafter.lane, "reduce"):
                point.record(drafter.lane.stream)
        for drafter in self.drafters:
            with phase(drafter.lane, "reduce"):
                for point in self.points:
                    point.hold(drafter.lane.stream)

    def step(self, mark: Mark = lambda lane, label: None) -> None:
        """One optimizer step over all drafters.

        Args:
            mark: receives a lane, and what it did since it was marked before.
        """
        for drafter in self.drafters:
            mark(drafter.lane, HOST)
        if len(self.drafters) > 1:
            self.meet()
            self.each(self.gather)
            self.meet()
            self.each(self.exchange)
            # NOTE: written only after every drafter has read its peers' own norms.
            self.meet()
            self.each(self.add_norms)
        elif self.across is not None:
            self.each(self.sum_across)
        for drafter in self.drafters:
            mark(drafter.lane, REDUCTION)
            with phase(drafter.lane, "optimizer"):
                drafter.lane.replay("optimizer")
            mark(drafter.lane, WORK)
        if len(self.drafters) > 1:
            self.meet()
            self.each(self.spread)
            self.meet()
            for drafter in self.drafters:
                mark(drafter.lane, REDUCTION)

    def each(self, part: Callable[[int, DrafterLane], None]) -> None:
        """Issue one part of the reduction to every drafter's stream."""
        for index, drafter in enumerate(self.drafters):
            with phase(drafter.lane, "reduce"), on(drafter.lane.stream):
                part(index, drafter)

    def gather(self, index: int, owner: DrafterLane) -> None:
        """Sum the peers' gradients of the owner's slice, and everybody's sums; then measure the slice."""
        low, high = owner.optimizer.low, owner.optimizer.high
        for j, other in enumerate(self.drafters):
            self.sums[index][j].copy_(other.sums, non_blocking=True)
            if other is not owner:
                self.inboxes[index].copy_(other.flat.grads[low:high], non_blocking=True)
                owner.flat.grads[low:high].add_(self.inboxes[index])
        torch.sum(self.sums[index], 0, out=owner.total)
        self.sum_across(index, owner)
        owner.lane.replay("norm")

    def sum_across(self, index: int, owner: DrafterLane) -> None:
        if self.across is not None:
            self.across.sum(index, [owner.flat.grads[owner.optimizer.low : owner.optimizer.high], owner.total])

    def exchange(self, index: int, drafter: DrafterLane) -> None:
        """Every slice's squared norm to every drafter."""
        for j, other in enumerate(self.drafters):
            self.norms[index][j].copy_(other.optimizer.norm_squared, non_blocking=True)

    def add_norms(self, index: int, drafter: DrafterLane) -> None:
        torch.sum(self.norms[index], 0, out=drafter.optimizer.norm_squared)

    def spread(self, index: int, drafter: DrafterLane) -> None:
        """The slices that the peers have updated."""
        for owner in self.drafters:
            if owner is not drafter:
                low, high = owner.optimizer.low, owner.optimizer.high
                drafter.flat.values[low:high].copy_(owner.flat.values[low:high], non_blocking=True)
