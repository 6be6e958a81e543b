"""Plots as inline SVG: lines with bands, bars, histograms; coloured by CSS, so that a page can be light or dark.

Promises: every text is escaped, and nothing but <title> reacts to a pointer. Colours are CSS variables --c0 to --c7 of
the page.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 14, 40
NUM_COLOURS = 8
HOVERS = 60  # places of a plot that say their figures
HUGE = 1e300  # an axis ends there, short of where floats do


class Point(NamedTuple):
    x: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: str = "var(--c0)"
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """What all plots share. A shade is (from, to, name); a mark is (x, name), drawn as an upright line."""

    title: str
    x_label: str
    y_label: str
    shades: Sequence[tuple[float, float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False


def number(value: float) -> str:
    """A figure with four significant digits, as short as it can be."""
    if value == 0:
        return "0"
    if abs(value) >= 1e15:
        return f"{value:.3e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


def colour(index: int) -> str:
    return f"var(--c{index % NUM_COLOURS})"


def shade_of(index: int, count: int) -> str:
    """One of an ordered row of colours, for lines that have an order."""
    return f"hsl({220 - 200 * index / max(1, count - 1):.0f} 65% var(--ordered))"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two bounds, multiples of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks with as many digits as their distance needs, so that no two read the same."""
    if len(values) < 2:
        return [(value, number(value)) for value in values]
    finest, largest = math.floor(math.log10(values[1] - values[0]) + 1e-9), max(map(abs, values))
    form = f",.{max(0, -finest)}f"
    if not 1e-3 <= largest < 1e7:
        form = f".{math.floor(math.log10(largest) + 1e-9) - finest}e"
    return [(value, format(value, form) if value else "0") for value in values]


class _Axes:
    """The frame of a plot: from figures to places."""

    def __init__(self, plot: Plot, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.plot = plot
        self.x0, self.x1, low, high = (max(-HUGE, min(HUGE, end)) for end in (*x, *y))
        if self.x1 - self.x0 <= max(1e-12 * max(abs(self.x0), abs(self.x1)), 1 / HUGE):
            apart = max(0.5, 1e-6 * abs(self.x0))
            self.x0, self.x1 = self.x0 - apart, self.x1 + apart
        low, high = (min(0.0, low), max(0.0, high)) if plot.from_zero else (low, high)
        # What differs by rounding alone is no curve.
        flat = high - low <= max(1e-6 * max(abs(low), abs(high)), 1 / HUGE)
        margin = (0.1 * abs(high) or 1.0) if flat else 0.06 * (high - low)
        # The names of shades stand above the lines.
        self.y0, self.y1 = low if plot.from_zero else low - margin, high + (3 if plot.shades else 1) * margin

    def left(self, x: float) -> float:
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def top(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def drawn(self, inside: str, x_ticks: Sequence[tuple[float, str]] | None = None) -> str:
        """The whole SVG, `inside` between the grid and the frame."""
        plot = self.plot
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">'
            f"<title>{escape(plot.title)}</title>"
        ]
        bottom = HEIGHT - BOTTOM
        for begin, end, name in plot.shades:
            x, width = self.left(max(begin, self.x0)), self.left(min(end, self.x1)) - self.left(max(begin, self.x0))
            if width > 0:
                parts.append(
                    f'<rect class="shade" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}">'
                    f"<title>{escape(name)}</title></rect>"
                )
                if width > 8 * len(name):
                    parts.append(f'<text class="note" x="{x + 4:.1f}" y="{TOP + 12}">{escape(name)}</text>')
        for value, text in labelled(ticks(self.y0, self.y1)):
            y = self.top(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>')
        shown = x_ticks if x_ticks is not None else labelled(ticks(self.x0, self.x1))
        for value, text in shown:
            parts.append(f'<text class="x" x="{self.left(value):.1f}" y="{bottom + 15}">{escape(text)}</text>')
        parts.append(inside)
        for value, name in plot.marks:
            x = self.left(value)
            parts.append(f'<path class="mark" d="M{x:.1f} {TOP}V{bottom}"><title>{escape(name)}</title></path>')
        parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="x label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 7}">{escape(plot.x_label)}</text>'
            f'<text class="x label" transform="translate(12 {(TOP + bottom) / 2}) rotate(-90)">'
            f"{escape(plot.y_label)}</text></svg>"
        )
        return "".join(parts)


def line_plot(plot: Plot, lines: Sequence[Line]) -> str:
    """Means as lines, lowest to highest as bands behind them; empty where there is no point."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    xs = [point.x for point in points] + [end for begin, end, _ in plot.shades for end in (begin, end)]
    axes = _Axes(plot, (min(xs), max(xs)), (min(p.low for p in points), max(p.high for p in points)))
    parts = []
    for line in lines:
        above = [f"{axes.left(p.x):.1f} {axes.top(p.high):.1f}" for p in line.points]
        below = [f"{axes.left(p.x):.1f} {axes.top(p.low):.1f}" for p in reversed(line.points)]
        if any(p.low < p.high for p in line.points):
            parts.append(f'<path class="band" style="fill:{line.colour}" d="M{"L".join(above + below)}Z"/>')
        middle = "L".join(f"{axes.left(p.x):.1f} {axes.top(p.mean):.1f}" for p in line.points)
        if len(line.points) == 1:
            (p,) = line.points
            parts.append(
                f'<circle style="fill:{line.colour}" cx="{axes.left(p.x):.1f}" cy="{axes.top(p.mean):.1f}" r="3"/>'
            )
        dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
        parts.append(f'<path class="line" style="stroke:{line.colour}"{dashes} d="M{middle}"/>')
    parts += _hovers(axes, lines)
    return axes.drawn("".join(parts))


def _hovers(axes: _Axes, lines: Sequence[Line]) -> Iterator[str]:
    """Invisible columns over a plot whose titles say the figures below."""
    width = (WIDTH - LEFT - RIGHT) / HOVERS
    said: list[list[str]] = [[] for _ in range(HOVERS)]
    for line in lines:
        last: dict[int, Point] = {}
        for point in line.points:
            last[max(0, min(HOVERS - 1, int((axes.left(point.x) - LEFT) / width)))] = point
        for index, p in last.items():
            spread = f" ({number(p.low)} to {number(p.high)})" if p.low < p.high else ""
            said[index].append(f"{line.name} at {number(p.x)}: {number(p.mean)}{spread}")
    for index, texts in enumerate(said):
        if texts:
            yield (
                f'<rect class="hover" x="{LEFT + index * width:.1f}" y="{TOP}" width="{width:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(texts))}</title></rect>'
            )


def bar_plot(plot: Plot, names: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Bars from zero, one place per name; groups (name, figures) stand side by side."""
    counted = [value for _, values in groups for value in values if value is not None]
    if not counted:
        return ""
    axes = _Axes(replace(plot, from_zero=True), (-0.5, len(names) - 0.5), (min(counted), max(counted)))
    parts, width = [], 0.8 / len(groups)
    for place, (group, values) in enumerate(groups):
        for index, value in enumerate(values):
            if value is None:
                continue
            left, right = (axes.left(index - 0.4 + width * n) for n in (place, place + 1))
            y, zero = sorted((axes.top(value), axes.top(0.0)))
            parts.append(
                f'<rect style="fill:{colour(place)}" x="{left:.1f}" y="{y:.1f}" '
                f'width="{max(1.0, right - left - 1):.1f}" height="{zero - y:.1f}">'
                f"<title>{escape(f'{group} {names[index]}: {number(value)}')}</title></rect>"
            )
    every = -(-len(names) // 16)
    return axes.drawn("".join(parts), [(index, name) for index, name in enumerate(names) if index % every == 0])


def histogram(plot: Plot, width: float, counts: Sequence[float]) -> str:
    """Counts of bins of one width, the first from 0."""
    if not any(counts):
        return ""
    axes = _Axes(replace(plot, from_zero=True), (0.0, width * len(counts)), (0.0, max(counts)))
    parts = []
    for index, count in enumerate(counts):
        if count:
            left, right = axes.left(index * width), axes.left((index + 1) * width)
            where = f"{number(index * width)} to {number((index + 1) * width)}: {number(count)}"
            parts.append(
                f'<rect style="fill:var(--c0)" x="{left:.1f}" y="{axes.top(count):.1f}" '
                f'width="{max(0.5, right - left - 0.5):.1f}" height="{axes.top(0) - axes.top(count):.1f}">'
                f"<title>{escape(where)}</title></rect>"
            )
    return axes.drawn("".join(parts))


def legend(lines: Sequence[Line]) -> str:
    """Names beside their colours, as HTML."""
    items = "".join(
        f'<li><i class="{"dashed" if line.dashed else "solid"}" style="border-color:{line.colour}"></i>'
        f"{escape(line.name)}</li>"
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>' if len(lines) > 1 else ""
