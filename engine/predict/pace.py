"""How long a run's steps took beside what was predicted from its own warm-up."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from draftgraph.engine.plan import Plan
from draftgraph.engine.predict.costs import costs
from draftgraph.engine.predict.simulate import WARM_STEPS, simulate
from draftgraph.engine.run.metrics import StepFigures

MOST_STEPS = 2_000  # simulated


class Pace:
    """The wall's time from the first step whose figures arrived to the last, which both arrive late alike."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None

    def look(self, arrived: Sequence[StepFigures], away: float = 0.0) -> None:
        """Note the time at which a step is the newest whose figures are here.

        Args:
            away: seconds so far that went into something else, such as evaluations.
        """
        if arrived and (self.last is None or arrived[-1].step > self.last[0]):
            self.last = arrived[-1].step, time.perf_counter() - away
            self.first = self.first or self.last

    @property
    def step_ms(self) -> float | None:
        """Per step, checkpoints included, evaluations not; None where fewer than two were seen."""
        if self.first is None or self.last is None or self.first[0] == self.last[0]:
            return None
        return 1e3 * (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])

    def figures(self, plan: Plan, evidence: Mapping[str, Any]) -> dict[str, float | None]:
        """For a summary: measured, and predicted for the same steps by `plan`'s simulation of the warm-up's times."""
        measured, predicted = self.step_ms, None
        known = costs(plan, evidence, None)
        if measured is not None and known is not None:
            assert self.first is not None and self.last is not None
            begin = max(0, self.first[0] - WARM_STEPS)
            # Those that were timed, behind a few that bring the lanes into their rhythm.
            warm, timed = self.first[0] - begin, min(MOST_STEPS, self.last[0] - self.first[0])
            predicted = simulate(
                known, num_steps=warm + timed, hosts=plan.hosts, first_step=begin, warm_steps=warm
            ).step_ms
        return {
            "step_ms": measured,
            "predicted_step_ms": predicted,
            "predicted_over_measured": predicted / measured if measured and predicted else None,
        }
