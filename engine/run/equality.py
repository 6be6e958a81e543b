"""Do all drafters hold the same bits? A checksum of each slice of the parameters on every drafter, every some steps.

Promises: no wait: the sums are made by a captured step of each lane and read once they have arrived; a check that has
not arrived skips the next, but gives way to that of a checkpoint, which is read before the checkpoint is written, by
when it has arrived.
"""

from collections.abc import Sequence

import torch

from draftgraph.engine.errors import RunError
from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.streams import Event, on, phase

EVERY = 20  # steps


class EqualityCheck:
    """Owns: one row of checksums per drafter on the host, pinned for a GPU."""

    def __init__(self, drafters: Sequence[DrafterLane]):
        self.drafters = [d for d in drafters if d.checksums is not None]
        count = len(self.drafters)
        pinned = count > 0 and drafters[0].device.type == "cuda"
        self.host = torch.zeros(count, count, dtype=torch.int64, pin_memory=pinned)
        self.arrived = [Event(d.device) for d in self.drafters]
        self.step: int | None = None  # of the check under way

    def after(self, step: int, now: bool = False) -> None:
        """Look at the check under way, if it has arrived, and begin the next, if it is time, or `now`.

        Raises:
            RunError: drafters differ.
        """
        self.look(wait=False)
        due = self.step != step if now else self.step is None and step % EVERY == 0
        if self.drafters and due:
            for drafter, row, arrived in zip(self.drafters, self.host, self.arrived, strict=True):
                with phase(drafter.lane, "reduce"), on(drafter.lane.stream):
                    assert drafter.checksums is not None
                    drafter.lane.replay("checksum")
                    row.copy_(drafter.checksums, non_blocking=True)
                    arrived.record(drafter.lane.stream)
            self.step = step

    def look(self, wait: bool) -> None:
        if self.step is None or not (wait or all(event.happened() for event in self.arrived)):
            return
        for event in self.arrived:
            event.wait()
        step, self.step = self.step, None
        different = (self.host != self.host[:1]).nonzero().tolist()
        if different:
            drafter, owner = different[0]
            raise RunError(
                f"after step {step} drafter {drafter} ({self.drafters[drafter].device}) does not hold the parameters "
                f"of drafter 0 ({self.drafters[0].device}): slice {owner}, which drafter {owner} updates. A copy "
                "between devices went wrong; nothing was written since. Go on from the last checkpoint with --resume, "
                "and without these devices if it comes again"
            )

    def values(self) -> list[int]:
        """The checksums of the last check, for a comparison of hosts."""
        return self.host[0].tolist() if self.drafters else []
