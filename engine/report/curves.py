"""Series of any length in one pass and fixed memory: bins that widen as figures come in."""

import math
from collections.abc import Iterator

from draftgraph.engine.report.svg import Point

BINS = 400  # at most; at least half of them once so many figures came in


class Curve:
    """Figures in order, as the lowest, mean and highest of equally many each."""

    def __init__(self) -> None:
        self._bins: list[list[float]] = []  # count, sum of x, low, sum, high
        self._per_bin = 1

    def add(self, x: float, y: object) -> None:
        """Take a figure; what is none, or not finite, is left out."""
        # Written for speed: a long run has millions of figures.
        if (type(y) is not float and type(y) is not int) or not math.isfinite(y):
            return
        if not self._bins or self._bins[-1][0] == self._per_bin:
            if len(self._bins) == BINS:
                self._halve()
            self._bins.append([0, 0.0, y, 0.0, y])
        found = self._bins[-1]
        found[0] += 1
        found[1] += x
        found[3] += y
        if y < found[2]:
            found[2] = y
        elif y > found[4]:
            found[4] = y

    def _halve(self) -> None:
        pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
        self._bins = [[a[0] + b[0], a[1] + b[1], min(a[2], b[2]), a[3] + b[3], max(a[4], b[4])] for a, b in pairs]
        self._per_bin *= 2

    def __bool__(self) -> bool:
        """Whether there is any figure."""
        return bool(self._bins)

    @property
    def points(self) -> list[Point]:
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        for count, xs, low, total, high in self._bins:
            yield Point(xs / count, low, total / count, high)

    @property
    def final(self) -> float | None:
        """The mean of the last twentieth, or of the last figure."""
        tail = self._bins[-max(1, len(self._bins) // 20) :]
        return sum(b[3] for b in tail) / sum(b[0] for b in tail) if tail else None
