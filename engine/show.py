"""Tables for people; numbers as they are read. The same content goes to JSON unrounded."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

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
    """Rows of ready texts under the keys of the first; the first column is a name, the others are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def show_plan(console: Console, values: dict[str, Any]) -> None:
    buckets = [
        {"rows": str(b["rows"]), "context": str(b["context"]), "anchors": str(b["anchors"]), "data rows": str(count)}
        for b, count in zip(values["buckets"], values["rows_per_bucket"], strict=True)
    ]
    console.print(columns_table("Buckets", buckets))
    parts = ("weights", "gradients", "states", "batch", "pool")
    memory = [
        {"device": device}
        | {part: bytes_text(sizes.get(part)) for part in parts}
        | {"total": bytes_text(sum(sizes.values()))}
        for device, sizes in values["device_bytes"].items()
    ]
    console.print(columns_table("Predicted memory (the pool is an estimate; capture measures it)", memory))


def show_warmup(console: Console, evidence: dict[str, Any]) -> None:
    captured = evidence["mode"] == "graph"
    graphs = evidence["graphs"]
    console.print(columns_table("What each step costs", [costs(row, captured) for row in graphs]))
    if captured:
        console.print(columns_table("What the largest graph of each kind holds, read from the graph", holdings(graphs)))
        console.print(columns_table("Pools", [pool(row) for row in evidence["lanes"]]))
    for op, called in evidence["ops"].items():
        fell_back = captured and called.startswith("transformers.")
        console.print(Text(f"{op}: {called}", style="bold red" if fell_back else ""))
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


def costs(row: dict[str, Any], captured: bool) -> dict[str, str]:
    """One step of the evidence table."""
    number = row["lane"].split()[-1]
    name = {"graph" if captured else "step": f"{row['step']} {number}", "bucket": row["bucket"] or "-"}
    if not captured:
        return {**name, "eager ms": cell("", row["eager_ms"])}
    eager, replayed, share = row["eager_ms"], row["replay_ms"], row["gemm_ceiling_share"]
    return {
        **name,
        "launches": f"{row['eager_launches']} > 1" if row["eager_launches"] else "-",
        "eager ms": cell("", eager),
        "replay ms": cell("", replayed),
        "ratio": f"{eager / replayed:.2f}" if eager and replayed else "-",
        "GEMM/ceiling": "-" if share is None else f"{share:.2f}",
        "pool": bytes_text(row["pool_bytes"]),
        "exec.": bytes_text(row["executable_bytes"]),
        "capture s": cell("", row["capture_seconds"]),
        "diff.": cell("", row["max_difference"]),
    }


def holdings(graphs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Kernels per family of the first, largest graph of every step of every lane."""
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in graphs:
        largest.setdefault((row["lane"], row["step"]), row)
    counted = [row["families"] or {} for row in largest.values()]
    names = sorted(
        {name for row in counted for name in row}, key=lambda name: -sum(row.get(name, 0) for row in counted)
    )
    return [
        {"graph": f"{step} {lane.split()[-1]}", "nodes": cell("", row["nodes"])}
        | {name.replace("_", " "): cell("", (row["families"] or {}).get(name, 0)) for name in names}
        for (lane, step), row in largest.items()
    ]


def pool(row: dict[str, Any]) -> dict[str, str]:
    return {
        "lane": row["lane"],
        "pool": bytes_text(row["pool_bytes"]),
        "largest graph's": bytes_text(row["largest_pool_bytes"]),
        "ratio": cell("", row["pool_over_largest"]),
    }
