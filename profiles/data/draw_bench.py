"""The README's table and plot of `draftgraph bench`, from its receipts.

    python profiles/data/draw_bench.py             # reads profiles/results/bench-*.json, writes profiles/data/bench.svg

The table is printed as Markdown, one line per receipt; the plot shows each ratio over the peer beside its goal.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parents[1]
# In the order of the README; what has no receipt is left out.
ORDER = ("w27-full", "w27-full-fp8", "w27-var", "w27-var-fp8", "w08-var", "w08-var-fp8", "target", "target-fp8")
OTHERS = ("overlap", "overlap-fp8", "attention", "cross-entropy", "optimizer", "observers", "observers-fp8")


def receipts(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> receipt, in order.

    Raises:
        SystemExit: one was not measured on a GPU, or not in full.
    """
    found = {}
    for name in (*ORDER, *OTHERS):
        path = folder / f"bench-{name}.json"
        if path.is_file():
            found[name] = json.loads(path.read_text())
            if not found[name]["gpu"] or found[name]["quick"]:
                sys.exit(f"{path} is no measurement: made without a GPU, or with --quick")
    return found


def goal_cells(receipt: dict[str, Any]) -> str:
    """Such as "ratio 1.62 (goal 1.50)"; a goal that was missed in bold."""
    cells = []
    for figure, goal in receipt["goals"].items():
        value = receipt["figures"].get(figure)
        if value is not None:
            scale, unit = (2**30, " GiB") if figure.endswith("_bytes") else (1, "")
            name = figure.removesuffix("_bytes").replace("_", " ")
            text = f"{name} {value / scale:.2f}{unit} (goal {goal['bound'] / scale:.2f}{unit})"
            cells.append(text if goal["met"] else f"**{text}**")
    return ", ".join(cells) or "-"


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| workload | ours | peer | ratio | of the ceiling or floor | goals (missed in bold) |", "|---" * 6 + "|"]
    for name, receipt in found.items():
        shown, ratio = receipt["shown"], receipt["ratio"]
        ratio_text = "-" if ratio is None else f"{ratio:.2f}"
        share = shown["share"]
        lines.append(
            f"| `{name}` | {shown['ours']} | {shown['peer']} | {ratio_text} | {share} | {goal_cells(receipt)} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of the ratios, a mark at each goal, a line where ours and the peer are equal."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    compared = {name: receipt for name, receipt in found.items() if receipt["ratio"] is not None}
    figure = Figure(figsize=(8, 0.6 + 0.42 * len(compared)), layout="constrained")
    axes = figure.add_subplot()
    places = list(range(len(compared)))[::-1]
    ratios = [receipt["ratio"] for receipt in compared.values()]
    axes.barh(places, ratios, height=0.62, color="tab:blue")
    for place, receipt in zip(places, compared.values(), strict=True):
        shown, goal = receipt["shown"], receipt["goals"].get("ratio", {}).get("bound", 0.0)
        axes.annotate(
            f"{receipt['ratio']:.2f}x  ({shown['ours']} : {shown['peer']})",
            (max(receipt["ratio"], goal), place),  # behind the mark of the goal
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
        if goal:
            axes.plot([goal] * 2, [place - 0.4, place + 0.4], color="tab:orange", linewidth=2)
    axes.axvline(1, color="gray", linewidth=1)
    gpus = ", ".join(sorted({receipt["gpu"] for receipt in found.values()}))
    axes.set(title=f"Over the peer on the same {gpus} (orange: the goal)", xlim=(0, 1.6 * max(ratios)), xlabel="ratio")
    axes.set_yticks(places, compared)
    with rc_context({"svg.hashsalt": path.name}):  # the same receipts, the same bytes
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=PROFILES / "results")
    parser.add_argument("--out", type=Path, default=PROFILES / "data" / "bench.svg", help=".svg or .png")
    args = parser.parse_args()
    found = receipts(args.results)
    if not found:
        sys.exit(f"no bench-*.json in {args.results}; write them with `draftgraph bench`")
    print(table(found))
    if any(receipt["ratio"] is not None for receipt in found.values()):
        draw(found, args.out)


if __name__ == "__main__":
    main()
