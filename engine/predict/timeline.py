"""A picture of the simulated schedule: one line per lane and copy stream, one box per piece of work. Plain SVG."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from draftgraph.engine.run.simulated import Interval

COLOURS = {
    "target": "#4c78a8",
    "drafter": "#f58518",
    "optimizer": "#54a24b",
    "hand-off": "#b279a2",
    "reduce": "#e45756",
}
WIDTH, LEFT, TOP, ROW, BAR = 1200, 170, 60, 26, 18
TICKS = 8
NARROWEST = 0.8  # of a box, pixels


def draw_timeline(intervals: Sequence[Interval], title: str, window_ms: float, path: Path) -> None:
    """Write the first `window_ms` of the record as SVG."""
    begin = min(i.start_ms for i in intervals)
    shown = [i for i in intervals if i.start_ms < begin + window_ms]
    streams = sorted({i.stream for i in shown}, key=order)
    height = TOP + ROW * len(streams) + 40
    scale = (WIDTH - LEFT - 20) / window_ms
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * number
        lines.append(
            f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="41">{kind}</text>'
        )
    bottom = TOP + ROW * len(streams)
    for ms in (tick / TICKS * window_ms for tick in range(TICKS + 1)):
        at = LEFT + ms * scale
        lines.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{ms:,.0f}</text>')
    lines.append(f'<text x="{WIDTH - 20}" y="{bottom + 32}" text-anchor="end">milliseconds</text>')
    for row, stream in enumerate(streams):
        y = TOP + ROW * row
        lines.append(f'<text x="{LEFT - 8}" y="{y + BAR - 5}" text-anchor="end">{escape(stream)}</text>')
        for i in (i for i in shown if i.stream == stream):
            start, end = i.start_ms - begin, min(i.end_ms - begin, window_ms)
            width = max(NARROWEST, (end - start) * scale)
            what = i.what.split()[0]
            edge = 'stroke="white" stroke-width="0.5" ' if width > 2 else ""
            lines.append(
                f'<rect x="{LEFT + start * scale:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" {edge}'
                f'fill="{COLOURS.get(what, "#999")}">'
                f"<title>{escape(i.what)}: {start:,.1f} to {i.end_ms - begin:,.1f} ms</title></rect>"
            )
    path.write_text("\n".join([*lines, "</svg>", ""]))


def order(stream: str) -> tuple[int, int, str]:
    """Targets with their copies, then drafters."""
    role, number, *rest = stream.split()
    return (role != "target", int(number), " ".join(rest))
