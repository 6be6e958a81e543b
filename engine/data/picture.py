"""The picture of a shard folder: how long its rows are, and how much of them is supervised."""

from collections.abc import Sequence
from pathlib import Path

BINS = 60


def draw_lengths(lengths: Sequence[int], supervised: Sequence[int], path: Path) -> bool:
    """Write a histogram of both as SVG; False, and no picture, where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    spread = (0, max(lengths) + 1)
    axes.hist(lengths, BINS, range=spread, color="lightgray", label="all tokens")
    axes.hist(supervised, BINS, range=spread, histtype="step", color="green", label="supervised tokens")
    axes.set(title=f"{len(lengths):,} rows, {sum(lengths):,} tokens", xlabel="tokens of a row", ylabel="rows")
    axes.legend()
    with rc_context({"svg.hashsalt": path.name}):  # the same rows, the same bytes
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True
