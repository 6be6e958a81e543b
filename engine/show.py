"""Tables for people; numbers as they are read. The same content goes to JSON unrounded."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
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


def columns_table(title: str, rows: list[dict[str, Any]], columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        table.add_row(*(cell(name, row.get(name)) for name in columns))
    return table


def show_plan(console: Console, values: dict[str, Any]) -> None:
    rows = [
        {**bucket, "data rows": count}
        for bucket, count in zip(values["buckets"], values["rows_per_bucket"], strict=True)
    ]
    console.print(columns_table("Buckets: padded shapes, one graph each", rows, list(rows[0])))
    parts = [
        {
            "device": device,
            **{f"{name}_bytes": size for name, size in sizes.items()},
            "total_bytes": sum(sizes.values()),
        }
        for device, sizes in values["device_bytes"].items()
    ]
    names = ["device", "weights_bytes", "gradients_bytes", "states_bytes", "batch_bytes", "pool_bytes", "total_bytes"]
    console.print(columns_table("Predicted memory (pool: an estimate, capture measures it)", parts, names))
    rest = {k: v for k, v in values.items() if k not in ("buckets", "rows_per_bucket", "device_bytes")}
    console.print(summary_table("Plan", rest))


def show_warmup(console: Console, evidence: dict[str, Any]) -> None:
    captured = evidence["mode"] == "graph"
    rows = [{**row, "kernels": sum(row["kernels"].values()) if row["kernels"] else None} for row in evidence["graphs"]]
    names = [
        "lane",
        "device",
        "step",
        "bucket",
        "nodes",
        "kernels",
        "pool_bytes",
        "eager_ms",
        "replay_ms",
        "max_difference",
    ]
    console.print(columns_table("Evidence: one row per graph" if captured else "Evidence: eager steps", rows, names))
    if captured:
        rounds = evidence["verification"]["rounds"]
        console.print(
            f"Captured and verified: every graph replayed {rounds} rounds of changing inputs, buckets interleaved, "
            "bit-equal to the eager run."
        )
    else:
        console.print(
            "Ran EAGERLY, as the profile says: no graph was captured, so nodes, kernels, pool and replay do not apply. "
            "Verified: buckets with NaN in every pad equal their rows alone."
        )
