"""Tables for people; numbers as they are read. The same content goes to JSON unrounded."""

from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

SHORT = 10  # characters of a cell that is a figure
LONG = 20  # characters of a word, such as a path, that may be cut in two
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError


def cell(name: str, value: Any) -> str:
    """One figure: bytes with a unit, shares as they are, unmeasured as a dash."""
    if value is None:
        return "-"
    if name.endswith("_bytes") or "bytes_per_step" in name:
        return bytes_text(value)
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(cell("", v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell('', v)}" for k, v in value.items()) or "none"
    return escape(str(value))


def summary_table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, cell(name, value))
    return table


def columns_table(title: str, rows: list[dict[str, str]]) -> Table:
    """Rows of ready texts under the keys of the first; the first column is a name, the others are figures.

    A figure is shown whole in a terminal of 80 columns; headers and longer texts wrap between words, long words inside.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(rows[0]):
        widest = max(len(row[name]) for row in rows)
        header = fill(name, max(widest, 1), break_long_words=False, break_on_hyphens=False)
        justify: JustifyMethod = "right" if index else "left"
        word = max(len(word) for text in (name, *(row[name] for row in rows)) for word in text.split() or [""])
        # NOTE: rich cuts off, without a sign, what the least widths leave no room for.
        table.add_column(header, justify=justify, min_width=min(word, LONG), no_wrap=widest <= SHORT, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def show_warmup(console: Console, evidence: dict[str, Any]) -> None:
    captured = evidence["mode"] == "graph"
    graphs = evidence["graphs"]
    console.print(columns_table("What each step takes", [times(row, captured) for row in graphs]))
    if captured:
        console.print(columns_table("What each graph is", [sizes(row) for row in graphs]))
        console.print(columns_table("Kernels in the largest graph of each kind", holdings(graphs)))
        console.print(columns_table("Pools", [pool(row) for row in evidence["lanes"]]))
    for op, called in evidence["ops"].items():
        fell_back = captured and called.startswith("transformers.")
        console.print(Text(f"{op}: {called}", style="bold red" if fell_back else ""))
    if evidence["tap_errors"]:
        errors = ", ".join(f"{error:.1%} at layer {layer}" for layer, error in evidence["tap_errors"].items())
        console.print(f"The target's products are in FP8: its taps differ from target.dtype's by {errors} (per token).")
    for row in evidence["devices"]:
        console.print(Text(row["sentence"]))
    seconds = ", ".join(
        f"{name.replace('_', ' ')} {value:.1f} s" for name, value in evidence["seconds_by_phase"].items()
    )
    if captured:
        rounds = evidence["verification"]["rounds"]
        console.print(
            f"Captured and verified ({seconds}): every graph replayed {rounds} rounds of changing inputs, buckets "
            "interleaved, bit-equal to the eager run."
        )
    else:
        worst = evidence["verification"]["padded_against_unpadded_relative_difference"]
        console.print(
            f"Ran EAGERLY, as the profile says ({seconds}): no graph was captured, so nodes, launches, kernels, pools, "
            "replays and the matmul ceiling do not apply. "
            f"Verified: buckets with NaN in every pad equal their rows alone, to {worst:.1e}."
        )


def step_cells(row: dict[str, Any]) -> dict[str, str]:
    return {"step": f"{row['step']} {row['lane'].split()[-1]}", "bucket": row["bucket"] or "-"}


def times(row: dict[str, Any], captured: bool) -> dict[str, str]:
    """What one step of the evidence takes, eager and replayed."""
    eager, replayed, share = row["eager_ms"], row["replay_ms"], row["gemm_ceiling_share"]
    if not captured:
        return {**step_cells(row), "eager ms": cell("", eager)}
    return {
        **step_cells(row),
        "launches": f"{row['eager_launches']} > 1" if row["eager_launches"] else "-",
        "eager ms": cell("", eager),
        "replay ms": cell("", replayed),
        "ratio": f"{eager / replayed:.2f}" if eager and replayed else "-",
        "GEMM/ceiling": "-" if share is None else f"{share:.2f}",
    }


def sizes(row: dict[str, Any]) -> dict[str, str]:
    """What one graph of the evidence takes, and that it is right."""
    return {
        **step_cells(row),
        "nodes": cell("", row["nodes"]),
        "pool": bytes_text(row["pool_bytes"]),
        "executable": bytes_text(row["executable_bytes"]),
        "capture ms": cell("", row["capture_seconds"] and 1e3 * row["capture_seconds"]),
        "diff.": cell("", row["max_difference"]),
    }


def holdings(graphs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Per family, how many kernels the first, largest graph of every kind of step holds; lanes of a kind are alike."""
    largest: dict[str, dict[str, int]] = {}
    for row in graphs:
        largest.setdefault(row["step"], row["families"] or {})
    totals = {name: sum(counts.get(name, 0) for counts in largest.values()) for c in largest.values() for name in c}
    return [
        {"family": name.replace("_", " ")} | {step: cell("", counts.get(name, 0)) for step, counts in largest.items()}
        for name in sorted(totals, key=lambda name: -totals[name])
    ]


def pool(row: dict[str, Any]) -> dict[str, str]:
    return {
        "lane": row["lane"],
        "pool": bytes_text(row["pool_bytes"]),
        "largest graph's": bytes_text(row["largest_pool_bytes"]),
        "ratio": cell("", row["pool_over_largest"]),
    }


def show_evaluation(console: Console, values: dict[str, Any]) -> None:
    """A line per set of prompts, and what else a reader of the summary would miss."""
    rows = [
        {
            "set": escape(row["name"]),
            "prompts": str(row["prompts"]),
            "acceptance": cell("", row["acceptance"]),
            "by slot": " ".join("-" if share is None else f"{share:.2f}" for share in row["acceptance_per_slot"]),
            "as greedy": {True: "yes", False: "NO", None: "-"}[row["identical_to_greedy"]],
        }
        for row in values["sets"]
    ]
    if tree := values.get("tree"):
        for row, chain, other in zip(rows, values["sets"], tree["sets"], strict=True):
            row["tree"] = cell("", other["acceptance"])
            both = chain["identical_to_greedy"] and other["identical_to_greedy"]
            row["as greedy"] = "yes" if both else "NO"
    console.print(columns_table("tokens per verify forward, the bonus token counted", rows))
    if count := values["different_from_one_token"]:
        first = values["first_differences"][0]
        console.print(
            f"{count} of {values['prompts']} answers differ from one-token decoding, where another shape rounds "
            f"a tie differently; the first at token {first['token']} of prompt {first['prompt']} of {first['set']}",
            markup=False,
        )
