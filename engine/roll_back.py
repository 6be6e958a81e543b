"""Going back: a run whose updates are no longer finite goes on from an earlier checkpoint, at half the rate."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftgraph.engine.errors import RunError
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.health import Diverged
from draftgraph.engine.run.rig import Rig

LOWER, LOWEST = 0.5, 2.0**-6  # of the profile's rate


def with_roll_backs(
    run: Callable[[Path | None, float | None], dict[str, Any]],
    start: Path | None,
    checkpoints: Path,
    rig: Rig,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What `run` returns.

    Args:
        run: goes on from a checkpoint; the share of the profile's rate is the checkpoint's where it is None.
    """
    rate_share = None
    while True:
        try:
            return run(start, rate_share)
        except Diverged as trouble:
            start, rate_share = go_back(checkpoints, trouble, rig, say)
        # The host memory of the attempt's checkpoints, which the next one takes again.
        gc.collect()


def go_back(checkpoints: Path, trouble: Diverged, rig: Rig, say: Callable[[str], None]) -> tuple[Path, float]:
    """Bring the lanes to rest and drop the checkpoints that came too late.

    Returns:
        The newest checkpoint with a good update between it and the trouble, since there a lower rate changes the
        weights; and the share of the rate to go on with.
    Raises:
        RunError: there is no such checkpoint, or the rate is very low already.
    """
    for lane in rig.lanes:
        lane.synchronize()
    share = LOWER * float(rig.drafters[0].optimizer.rate_share)
    for drafter in rig.drafters:
        drafter.clear()
    late = [path for path in checkpoint.found(checkpoints) if checkpoint.step_of(path) >= trouble.first_step - 1]
    if share < LOWEST or len(late) == len(checkpoint.found(checkpoints)):
        why = "the rate was halved often" if share < LOWEST else "no checkpoint is old enough to go back to"
        raise RunError(f"{trouble} {why}: lower optim.lr, or look at the data")
    for path in late:
        checkpoint.remove(path)
    start = checkpoint.newest(checkpoints, say)
    say(f"{trouble} Rolled back to {start.name}; the rate is {share:g} of the profile's from here on")
    return start, share
