"""The plots of a report: which figures, on which axes, with which words."""

from html import escape

from draftgraph.engine.report.curves import Curve
from draftgraph.engine.report.record import Record, mapping, rows_of
from draftgraph.engine.report.svg import Line, Plot, bar_plot, colour, histogram, legend, line_plot, shade_of
from draftgraph.engine.run.flatness import HOST

LAST_SLOTS = 16


def framed(title: str, drawing: str, lines: list[Line] | None = None, note: str = "") -> str:
    """A plot with its title and legend; empty where nothing was drawn."""
    if not drawing:
        return ""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure><h3>{escape(title)}</h3>{legend(lines or [])}{drawing}{caption}</figure>"


def grid(*figures: str) -> str:
    inside = "".join(figures)
    return f'<div class="plots">{inside}</div>' if inside else ""


def over_steps(title: str, y_label: str, curves: list[tuple[str, Curve]], note: str = "", zero: bool = False) -> str:
    """One line per run."""
    lines = [
        Line(name, curve.points, colour(index), dashed=index > 0) for index, (name, curve) in enumerate(curves) if curve
    ]
    return framed(title, line_plot(Plot(title, "step", y_label, from_zero=zero), lines), lines, note)


def plots_of_training(runs: list[Record], names: list[str]) -> str:
    def each(figure: str) -> list[tuple[str, Curve]]:
        return [(name, run.curves[figure]) for run, name in zip(runs, names, strict=True)]

    lead = runs[0]
    real = any(run.curves["real_acceptance"] for run in runs)
    slots = [
        Line(f"slot {index + 1}", curve.points, shade_of(index, len(lead.per_slot)))
        for index, curve in enumerate(lead.per_slot[:LAST_SLOTS])
        if curve
    ]
    plain = [Line(line.name, [p._replace(low=p.mean, high=p.mean) for p in line.points], line.colour) for line in slots]
    per_slot = "Right tokens per slot of the draft block"
    count = max(len(run.per_slot) for run in runs)
    final = [
        (name, [run.per_slot[i].final if i < len(run.per_slot) else None for i in range(count)])
        for run, name in zip(runs, names, strict=True)
    ]
    final += [
        (f"{name}, real", run.real_per_slot[:count]) for run, name in zip(runs, names, strict=True) if run.real_per_slot
    ]
    bars = [Line(name, [], colour(index)) for index, (name, _) in enumerate(final)]
    share = "share right"
    return grid(
        over_steps("Loss", "loss", each("loss"), "Mean of each bin of steps, lowest to highest behind it."),
        over_steps(
            "Acceptance length",
            "tokens per target forward",
            [(f"{name}, simulated" if real else name, curve) for name, curve in each("acceptance")]
            + [(f"{name}, real", curve) for name, curve in each("real_acceptance") if curve],
            f"Simulated on training rows{', real by decoding' if real else ''}; bonus counted.",
        ),
        over_steps(
            "Real tokens per second",
            "tokens/s",
            [(name, run.tokens_per_s) for run, name in zip(runs, names, strict=True)],
            "From when figures arrived; evaluations and checkpoints included.",
            zero=True,
        ),
        framed(per_slot, line_plot(Plot(per_slot, "step", share, from_zero=True), plain), plain),
        framed(
            f"{per_slot}, at the end",
            bar_plot(Plot(per_slot, "slot", share), [str(index + 1) for index in range(count)], final),
            bars,
        ),
        over_steps("Gradient norm", "norm", each("grad_norm")),
        over_steps("Learning rate", "rate", each("lr"), zero=True),
    )


def plots_of_devices(runs: list[Record], names: list[str]) -> str:
    """Memory of every device, warm-up marked; the other samples folded away."""
    memory: list[str] = []
    details: list[str] = []
    for run, name in zip(runs, names, strict=True):
        shades = [phase for phase in run.phases if phase[2] == "warm-up"]

        def drawn(title: str, y_label: str, figure: str, devices: list[str], run=run, shades=shades) -> str:
            lines = [
                Line(device, getattr(run.devices[device], figure).points, colour(index))
                for index, device in enumerate(devices)
                if getattr(run.devices[device], figure)
            ]
            plot = Plot(title, "minutes", y_label, shades=shades, from_zero=True)
            return framed(title, line_plot(plot, lines), lines)

        gpus = sorted(device for device in run.devices if device != HOST)
        prefix = f"{name}: " if len(runs) > 1 else ""
        memory.append(drawn(f"{prefix}Used memory per device (NVML)", "GiB", "used_gib", gpus))
        # What the process itself holds matters where there is nothing else to see, or where it grows.
        host = drawn(
            f"{prefix}Resident memory of the training process", "GiB", "used_gib", [HOST] * (HOST in run.devices)
        )
        (details if gpus else memory).append(host)
        details += [
            drawn(f"{prefix}Busy share of time", "%", "utilisation", gpus),
            drawn(f"{prefix}Power", "W", "power_w", gpus),
            drawn(f"{prefix}SM clock", "MHz", "sm_mhz", gpus),
            drawn(f"{prefix}Temperature", "\N{DEGREE SIGN}C", "temperature_c", gpus),
        ]
    folded = grid(*details)
    more = f"<details><summary>Busy share, power, clocks, temperature</summary>{folded}</details>" if folded else ""
    return grid(*memory) + more


def plots_of_buckets(run: Record) -> str:
    lengths = mapping(run.filling.get("lengths"))
    if not lengths:
        return ""
    contexts = sorted({bucket["context"] for bucket in rows_of(run.filling.get("buckets"))})
    title = "Row lengths, and the contexts of the buckets"
    plot = Plot(title, "tokens of a row", "rows", marks=[(context, f"context {context}") for context in contexts])
    note = f"{lengths['rows']:,} rows, {lengths['tokens']:,} tokens."
    return grid(framed(title, histogram(plot, lengths["width"], lengths["counts"]), note=note))
