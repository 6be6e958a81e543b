"""Tables for people; numbers as they are read. The same content goes to JSON unrounded."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    rows = []
    for row in evidence["graphs"]:
        number = row["lane"].split()[-1]
        shown = {"graph" if captured else "step": f"{row['step']} {number}", "bucket": row["bucket"] or "-"}
        if captured:
            shown["nodes"] = cell("", row["nodes"])
            shown["kernels"] = cell("", sum(row["kernels"].values()) if row["kernels"] else None)
            shown["pool"] = bytes_text(row["pool_bytes"])
        shown["eager ms"] = cell("", row["eager_ms"])
        if captured:
            shown["replay ms"] = cell("", row["replay_ms"])
        rows.append(shown)
    console.print(columns_table(f"Evidence, on {', '.join(sorted({r['device'] for r in evidence['graphs']}))}", rows))
    for op, called in evidence["ops"].items():
        console.print(f"{op}: {called}", markup=False, highlight=False)
    if captured:
        rounds = evidence["verification"]["rounds"]
        console.print(
            f"Captured and verified: every graph replayed {rounds} rounds of changing inputs, buckets interleaved, "
            "bit-equal to the eager run."
        )
    else:
        worst = evidence["verification"]["padded_against_unpadded_relative_difference"]
        console.print(
            "Ran EAGERLY, as the profile says: no graph was captured, so nodes, kernels, pool and replay do not apply. "
            f"Verified: buckets with NaN in every pad equal their rows alone, to {worst:.1e}."
        )
