"""The tables of `draftgraph plan`."""

from typing import Any

from rich.console import Console

from draftgraph.engine.predict.memory import PARTS
from draftgraph.engine.run.idle import REASONS
from draftgraph.engine.show import UNITS, bytes_text, columns_table

Row = dict[str, Any]


def show_plan(console: Console, values: Row) -> None:
    rows = zip(values["buckets"], values["rows_per_bucket"], strict=True)
    times = {(g["step"], g["bucket"]): g for g in values.get("graphs", [])}
    console.print(columns_table("Buckets", [bucket_row(b, count, times) for b, count in rows]))
    if times:
        where = f"on {values['gpu']}" if values["gpu"] != "cpu" else "on this CPU"
        console.print(f"Milliseconds {where}; ~ is estimated from FLOPs and bytes, without it a warm-up measured.\n")
    for note in values["notes"]:
        console.print(f"{note}\n", markup=False)
    unit, memory = memory_rows(values)
    console.print(columns_table(f"Predicted memory in {unit}; the pool is an estimate", memory))
    switch = values["recompute"]
    at_rate = f" ({switch['costs_ms']:.2f} ms at {switch['at_tflops']:.0f} TFLOP/s)" if switch["at_tflops"] else ""
    saves = bytes_text(switch["saves_bytes"]) if switch["saves_bytes"] > 0 else "nothing"
    console.print(
        f"drafter.recompute is {'on' if switch['on'] else 'off'}: on, a micro-step of {switch['bucket']} keeps "
        f"{saves} less and takes {switch['costs_flop_share']:.1%} more FLOPs{at_rate}.\n"
    )
    if not times:
        return
    if values["fits"] is False:
        console.print(f"[bold red]More than {bytes_text(values['memory_limit_bytes'])} of one {values['gpu']}.[/]")
    lanes = [lane_row(*item) for item in values["lanes"].items()]
    console.print(columns_table("Predicted use of each lane's time", lanes))
    console.print(
        f"{values['step_ms']:,.1f} ms a step, {values['tokens_per_s']:,.0f} real tokens/s "
        f"({values['figures']} figures), bound by {values['bound_by']}.\n"
    )
    for title, name in (
        (f"All uses of {used(values)} devices (targets:drafters)", "arrangements"),
        ("The best use of more and fewer devices", "best"),
        ("drafter.reuse: one extraction feeds so many micro-steps, tokens/s count it once", "reuse"),
    ):
        shown = [row for row in values[name] if name != "arrangements" or row["devices"] == used(values)]
        if shown:
            per = "micro step" if name == "reuse" else "device"
            console.print(columns_table(title, [arrangement_row(row, per) for row in shown]))


def used(values: Row) -> int:
    return len(values["busy"])


def bucket_row(bucket: Row, count: int, times: dict[tuple[str, str], Row]) -> dict[str, str]:
    name = f"r{bucket['rows']}-s{bucket['context']}-a{bucket['anchors']}"
    shown = {"rows": str(bucket["rows"]), "context": str(bucket["context"]), "anchors": str(bucket["anchors"])}
    shown["data rows"] = str(count)
    for step in ("target", "drafter"):
        if (step, name) in times:
            shown[f"{step} ms"] = ms_text(times[step, name])
    return shown


def ms_text(graph: Row) -> str:
    return f"{'' if graph['measured'] else '~'}{graph['ms']:,.1f}"


def memory_rows(values: Row) -> tuple[str, list[dict[str, str]]]:
    """A unit, and a row per role in it."""
    roles = values["device_bytes"]
    parts = [part for part in PARTS if any(sizes.get(part) for sizes in roles.values())]
    power = 3 if max(sum(sizes.values()) for sizes in roles.values()) >= 1024**3 else 2
    return UNITS[power], [
        {"role": role}
        | {part: f"{sizes[part] / 1024**power:.2f}" if sizes.get(part) else "-" for part in parts}
        | {"total": f"{sum(sizes.values()) / 1024**power:.2f}"}
        for role, sizes in roles.items()
    ]


def lane_row(lane: str, shares: dict[str, float]) -> dict[str, str]:
    return {"lane": lane, "work": f"{shares['work']:.0%}"} | {f"waits: {r}": f"{shares[r]:.0%}" for r in REASONS}


def arrangement_row(row: Row, per: str) -> dict[str, str]:
    """A line of a table that compares by tokens/s per device, or by milliseconds per micro-step."""
    fits = {True: "", False: "no", None: "-"}[row["fits"]]
    return {
        "devices": str(row["devices"]),
        "use": row["arrangement"],
        "reuse": str(row["reuse"]),
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        f"per {per}": f"{row['tokens_per_s_and_device']:,.0f}"
        if per == "device"
        else f"{row['micro_step_ms']:,.1f} ms",
        "busy": f"{row['busy_min']:.0%}-{row['busy_max']:.0%}",
        "bound by": row["bound_by"].replace("target and drafter", "both"),
        "micro steps": str(row["micro_steps"]),
        "memory": f"{bytes_text(row['most_bytes'])}{fits and ' ' + fits}",
    }
