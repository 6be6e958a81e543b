"""Pictures of row lengths: of a shard folder, and of a plan's buckets over them. They need matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftgraph.engine.data.buckets import Bucket

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


def draw_buckets(lengths: Sequence[int], buckets: Sequence[Bucket], title: str, path: Path) -> bool:
    """Write a histogram with the edge of every bucket, as SVG or PNG; False, and no picture, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    largest = max(bucket.context for bucket in buckets)
    axes.hist(lengths, BINS, range=(0, largest), color="lightgray")
    top = axes.get_ylim()[1]
    names: dict[int, list[str]] = {}
    for bucket in buckets:
        names.setdefault(bucket.context, []).append(bucket.name)
    at_top = -largest  # the last edge whose name begins there
    for context, at_edge in sorted(names.items()):
        axes.axvline(context, color="tab:blue", linewidth=1)
        style: dict[str, Any] = {
            "rotation": "vertical",
            "ha": "right",
            "va": "top",
            "fontsize": "x-small",
            "color": "tab:blue",
        }
        crowded = context - at_top < 0.02 * largest
        at_top = at_top if crowded else context
        place = (context, 0.7 * top if crowded else top)
        axes.annotate(", ".join(at_edge), place, (-2, -3), textcoords="offset points", **style)
    axes.set(title=title, xlabel="tokens of a row", ylabel="rows", xlim=(0, largest * 1.01), ylim=(0, top))
    figure.savefig(path)
    return True
