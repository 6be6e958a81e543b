"""report.html: one file that shows a run, or two beside each other, in any browser, without a network.

Promises: what was not measured is left out or said to be; all text is escaped; a part that cannot be drawn, since its
file is damaged, says so and the others stay.
"""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from draftgraph.engine.report.plots import plots_of_buckets, plots_of_devices, plots_of_training
from draftgraph.engine.report.record import Record, mapping, read_run, rows_of
from draftgraph.engine.report.style import STYLE
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.show import cell, holdings, pool, sizes, times

# What a run is judged by first: key of its summary, name.
HEADLINES = {
    "steps": "steps",
    "loss_last": "loss, last 10 steps",
    "acceptance_after": "simulated acceptance, bonus counted",
    "real_tokens_per_s": "real tokens/s",
    "padding_efficiency": "real tokens of padded ones",
    "alloc_bytes_per_step": "allocated per step",
    "host_syncs_per_step": "host syncs per step",
    "late_compilations": "late compilations",
}
MACHINE = ("gpu", "num_gpus", "driver", "torch", "triton", "transformers", "fla", "commit", "date")
AS_WARM = "as warm-up left it"


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Write report.html into a run folder.

    Args:
        against: another run, drawn dashed, its figures beside.
    Raises:
        UsageError: a folder holds no run.
    """
    runs = [read_run(path) for path in (folder, against) if path is not None]
    path = folder / "report.html"
    write_text(path, page(runs))
    return path


def page(runs: list[Record]) -> str:
    """The whole file."""
    title = escape(" against ".join(names_of(runs)))
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} - Draftgraph</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Nothing may be fetched or run, whatever a run folder holds.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
    ]
    sections: list[Callable[[list[Record]], str]] = [
        header,
        comparison,
        lambda shown: section("Training", plots_of_training(shown, names_of(shown))),
        lambda shown: section("Devices", flatness(shown) + plots_of_devices(shown, names_of(shown))),
        lambda shown: section("Buckets", plots_of_buckets(shown[0]) + buckets(shown[0])),
        lambda shown: section("Evidence before step 1", evidence(shown[0])),
        lambda shown: section("Steady state", steady(shown)),
        lambda shown: section("Receipt", "".join(files(run, name) for run, name in named(shown))),
    ]
    for draw in sections:
        try:
            parts.append(draw(runs))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
            parts.append(f'<p class="bad">A part cannot be drawn from the files of this run: {escape(repr(error))}</p>')
    for run, name in named(runs):
        parts += [f'<p class="soft">{escape(name)}: {escape(line)}</p>' for line in run.trouble]
    return "".join(parts) + "</body></html>\n"


def names_of(runs: list[Record]) -> list[str]:
    """The folders' names; with their parents where they are the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def named(runs: list[Record]) -> list[tuple[Record, str]]:
    return list(zip(runs, names_of(runs), strict=True))


def section(title: str, inside: str) -> str:
    return f"<h2>{escape(title)}</h2>{inside}" if inside else ""


def table(rows: list[dict[str, str]], text_columns: tuple[str, ...] = ()) -> str:
    """Rows of ready texts under the keys of the first."""
    if not rows:
        return ""
    kinds = {name: " class=text" if name in text_columns else "" for name in rows[0]}
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in kinds.items())
    lines = ["".join(f"<td{kind}>{escape(row.get(name, ''))}</td>" for name, kind in kinds.items()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(name: str, value: Any) -> str:
    """A figure as the tables of the terminal show it, without their markup."""
    if type(value) is int and not name.endswith("_bytes"):
        return f"{value:,}"
    return cell(name, value).replace("\\[", "[")


def header(runs: list[Record]) -> str:
    run = runs[0]
    known = {key: str(run.receipt[key])[:40] for key in MACHINE if run.receipt.get(key) is not None}
    machine = ", ".join(f"{key} {value}" for key, value in known.items())
    wanted = mapping(run.profile.get("run")).get("steps")
    parts = [f'<p class="soft">{escape(machine or "no receipt yet: the run goes on, or was killed")}</p>']
    if run.last_step and wanted and run.last_step < wanted:
        parts.append(f"<p>Step {run.last_step:,} of {wanted:,}.</p>")
    figures = {"steps": run.last_step, "loss_last": run.curves["loss"].final, **run.ours}
    figures.setdefault("acceptance_after", run.curves["acceptance"].final)
    figures.setdefault("real_tokens_per_s", run.tokens_per_s.final)
    cards = [
        f"<div><b>{escape(figure(key, figures[key]))}</b><span>{escape(name)}</span></div>"
        for key, name in HEADLINES.items()
        if figures.get(key) is not None
    ]
    return "".join(parts) + f'<div class="cards">{"".join(cards)}</div>'


def comparison(runs: list[Record]) -> str:
    """Two runs' figures side by side, and what their profiles and machines differ in."""
    if len(runs) < 2:
        return ""
    first, second = names_of(runs)
    left, right = (run.ours for run in runs)
    keys = [key for key in left if key in right and not isinstance(left[key], list | dict)]
    figures = [{"": key, first: figure(key, left[key]), second: figure(key, right[key])} for key in keys]
    left, right = ({**flat(run.profile), **{k: run.receipt.get(k) for k in MACHINE}} for run in runs)
    differing = [
        {"": key, first: str(left.get(key, "-")), second: str(right.get(key, "-"))}
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    ]
    return section("Side by side", table(figures)) + section(
        "What differs", table(differing, (first, second)) or "<p>Nothing: profile and machine are the same.</p>"
    )


def flat(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, keys in values.items() for key, value in mapping(keys).items()}


def flatness(runs: list[Record]) -> str:
    """Whether each device's memory stayed flat, and what held its clock back."""
    lines = []
    for run, name in named(runs):
        prefix = f"{name}, " if len(runs) > 1 else ""
        for sentence in run.flatness.sentences():
            kind = "good" if " flat: " in sentence else "bad"
            lines.append(f'<p class="{kind}">{escape(prefix + sentence)}</p>')
        for device, found in sorted(run.devices.items()):
            said = ", ".join(f"{reason} in {count:,} samples" for reason, count in sorted(found.throttled.items()))
            if said:
                lines.append(f"<p>{escape(f'{prefix}{device}: its clock was held back by {said}')}</p>")
        lines += [f'<p class="soft">{escape(prefix + note)}</p>' for note in run.notes]
    return "".join(lines)


def buckets(run: Record) -> str:
    replays, used = mapping(run.ours.get("replays_per_graph")), run.filling.get("tokens_per_bucket") or []
    rows = []
    for index, (bucket, count) in enumerate(
        zip(rows_of(run.filling.get("buckets")), run.filling.get("rows_per_bucket") or [], strict=False)
    ):
        name = f"r{bucket['rows']}-s{bucket['context']}-a{bucket['anchors']}"
        share = used[index] / (count * bucket["context"]) if index < len(used) and count else None
        rows.append(
            {
                "bucket": name,
                "rows of the data": figure("", count),
                "real tokens of padded ones": "-" if share is None else f"{share:.3f}",
                "replays, target": figure("", replays.get(f"target {name}")),
                "replays, drafter": figure("", replays.get(f"drafter {name}")),
            }
        )
    return table(rows)


def evidence(run: Record) -> str:
    """What warm-up found, as `draftgraph warmup` shows it."""
    warmup = run.warmup
    if not warmup:
        return ""
    captured, graphs = warmup["mode"] == "graph", rows_of(warmup["graphs"])
    parts = [f"<p>{escape(row['sentence'])}</p>" for row in rows_of(warmup["devices"])]
    verified = mapping(warmup["verification"])
    if captured:
        parts.append(
            f"<p>Every graph was replayed {verified['rounds']} rounds of changing inputs, buckets interleaved: "
            f"{escape(str(verified['replay_against_eager']))} to the eager run.</p>"
        )
    else:
        worst = verified["padded_against_unpadded_relative_difference"]
        parts.append(f"<p>Buckets with NaN in every pad equal their rows alone, to {worst:.1e}.</p>")
    clean = [{k: v.replace("\\[", "[") for k, v in times(row, captured).items()} for row in graphs]
    parts.append(table(clean))
    if captured:
        inner = table([sizes(row) for row in graphs]) + table(holdings(graphs))
        inner += table([pool(row) for row in rows_of(warmup["lanes"])])
        parts.append(f"<details><summary>Nodes, pools, kernels</summary>{inner}</details>")
    return "".join(parts)


def steady(runs: list[Record]) -> str:
    """What the watch found after warm-up, and the steps that took much longer than usual."""
    parts = []
    for run, name in named(runs):
        prefix = f"{name}: " if len(runs) > 1 else ""
        found = run.ours.get("steady_state")
        if isinstance(found, str):
            kind = "good" if found == AS_WARM else "bad"
            parts.append(f'<p class="{kind}">{escape(prefix + found)}</p>')
        if run.usual_seconds is not None:
            text = f"{prefix}{run.stalled:,} of {run.last_step:,} steps took more than three times the usual "
            text += f"{1e3 * run.usual_seconds:,.1f} ms (checkpoints and evaluations count)"
            parts.append(f"<p>{escape(text)}</p>")
        parts.append(table([{"step": f"{step:,}", "seconds": f"{took:.3f}"} for took, step in run.slowest]))
    return "".join(parts)


def files(run: Record, name: str) -> str:
    parts = []
    if run.receipt:
        text = json.dumps({key: value for key, value in run.receipt.items() if key != "profile"}, indent=1)
        parts.append(f"<details><summary>{escape(name)}/receipt.json</summary><pre>{escape(text)}</pre></details>")
    if run.profile_text:
        parts.append(
            f"<details><summary>{escape(name)}/profile.toml</summary><pre>{escape(run.profile_text)}</pre></details>"
        )
    return "".join(parts)
