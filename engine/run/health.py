"""Numbers going bad: updates skipped in a row end the run, or are told, or roll it back, as the profile says; a loss
spike is told with the rows that made it.

It reads figures that arrive late and waits for nothing; the skipping itself happens on the device.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from draftgraph.engine.errors import RunError
from draftgraph.engine.run.metrics import StepFigures

# A loss is a spike where it is this many times the median of the last ones, once there are enough of them.
SPIKE = 2.0
RECENT, ENOUGH = 50, 10


class Diverged(Exception):
    """Too many updates in a row were skipped, from `first_step` on: the run is to be rolled back."""

    def __init__(self, first_step: int, text: str):
        super().__init__(text)
        self.first_step = first_step


class Health:
    """Args:
    max_skipped: updates skipped in a row, at which `on_not_finite` is done; 0: never.
    on_not_finite: stop, keep, roll-back.
    skipped: how many were skipped before this process's first step.
    rows_of: the rows of a step, as a person finds them again.
    checkpoints: the steps of those on the disk.
    say: receives one line per event, at most one in RECENT steps.
    """

    def __init__(
        self,
        max_skipped: int,
        on_not_finite: str,
        skipped: int,
        rows_of: Callable[[int], str],
        checkpoints: Callable[[], Iterable[int]],
        say: Callable[[str], None],
    ):
        self.max_skipped, self.on_not_finite, self.skipped = max_skipped, on_not_finite, skipped
        self.rows_of, self.checkpoints, self.say = rows_of, checkpoints, say
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.in_a_row, self.told = 0, -RECENT
        self.first_skipped: int | None = None  # the step at which those in a row began

    def look(self, rows: Iterable[StepFigures]) -> None:
        """Look at the figures of steps, in order.

        Raises:
            RunError, Diverged: too many updates in a row were skipped.
        """
        for row in rows:
            if row.skipped > self.skipped:
                self.in_a_row, self.skipped = self.in_a_row + 1, row.skipped
                self.first_skipped = self.first_skipped or row.step
                self.tell(row.step, "its update was skipped: a gradient was not finite, or no token counted")
            else:
                self.in_a_row, self.first_skipped = 0, None
            if self.in_a_row == self.max_skipped > 0:
                self.too_many(row.step)
            if row.loss is None:
                continue
            usual = statistics.median(self.losses) if len(self.losses) >= ENOUGH else row.loss
            if row.loss > SPIKE * usual:
                self.tell(row.step, f"its loss is {row.loss:.3f}, the recent median {usual:.3f}")
            self.losses.append(row.loss)

    def tell(self, step: int, what: str) -> None:
        if step - self.told >= RECENT:
            self.told = step
            self.say(f"step {step}: {what}; {self.rows_of(step)}")

    def worth_keeping(self, step: int) -> bool:
        """Whether a checkpoint of `step` is: while updates are skipped, new ones would push the good ones out."""
        return self.first_skipped is None or step < self.first_skipped

    def too_many(self, step: int) -> None:
        assert self.first_skipped is not None
        told = (
            f"the updates of {self.in_a_row} steps in a row, up to step {step}, were skipped: their gradients were not "
            f"finite, or no token counted (step {step}; {self.rows_of(step)})."
        )
        if self.on_not_finite == "roll-back":
            raise Diverged(self.first_skipped, told)
        if self.on_not_finite == "stop":
            raise RunError(
                f"{told} Nothing was written since: {self.way_back()}, or look at the data; optim.max_skipped says "
                "when to give up, optim.on_not_finite what to do then"
            )
        self.say(f"{told} optim.on_not_finite = 'keep': the run goes on")
        self.in_a_row = 0

    def way_back(self) -> str:
        """From where a lower rate changes the weights that led here: a good update follows, as for a roll-back."""
        assert self.first_skipped is not None
        steps = sorted(self.checkpoints())
        good = [step for step in steps if step < self.first_skipped - 1]
        if not good:
            return "no checkpoint is old enough to go on from: start anew in another --run folder with a lower optim.lr"
        late = ", ".join(f"step-{step:06d}" for step in steps[len(good) :])
        first = f"remove {late} from checkpoints/, then " if late else ""
        return f"{first}go on from step {good[-1]} with --resume --set optim.lr=LOWER"
